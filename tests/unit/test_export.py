"""The export file: round trip, refusals, and the check against the model it is applied to."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from synthetic_job import WORKLOAD, SyntheticWorld, drive, job_spec, strategy

from autotune.errors import InvalidInput, ModelMismatch
from autotune.export import check_model, read_export
from autotune.jobs.exports import build_export
from autotune.records import CURRENT_SETUP, Decision
from autotune.strategy_space.plan import PlannedStrategy, plan
from autotune.tuning.events import Profiled, Proposal, Proposed
from autotune.tuning.history import History
from autotune.tuning.instructions import Finish

NOW = datetime(2024, 5, 1, 12, tzinfo=UTC)
MODEL = {variable.name: (variable.shape, variable.dtype) for variable in WORKLOAD.variables}


def exported(world=None):
    spec = job_spec()
    history, end = drive(spec, world or SyntheticWorld({5: 0.06}, noise=0.02))
    assert isinstance(end, Finish)
    return build_export("job", spec, history, end.decision, NOW), history


@pytest.fixture
def written(tmp_path):
    export, _ = exported()
    path = tmp_path / "out" / "best.json"
    export.write(path)
    return path


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_file_comes_back_equal_and_gives_the_plan_that_was_measured(written):
    export, history = exported()
    again = read_export(written)
    assert again == export and again.strategy == strategy(5)
    measured = next(
        trial for trial in history.trials if trial.request.strategy_id == strategy(5).id
    )
    assert (
        again.plan() == plan(strategy(5), WORKLOAD, 2)
        and again.plan_id == again.plan().id == measured.plan_id
    )


def test_an_export_of_a_script_that_clips_gives_the_plan_that_was_measured(tmp_path):
    spec, reads_norms = job_spec(), replace(WORKLOAD, reads_norms=True)
    crossing = replace(strategy(5), cross_step=True)
    planned = PlannedStrategy.of(crossing, reads_norms, 2)
    assert planned.plan.results is not None and planned.plan != plan(crossing, WORKLOAD, 2)
    profiled = Profiled(reads_norms, spec.cluster, 1.0, {})
    proposed = Proposed(0, (Proposal(crossing, "built"),), "none", "", 1, (), 0.0)
    history = History((profiled, proposed), 0.1)
    decision = Decision(crossing.id, "faster", None, crossing.id)
    build_export("job", spec, history, decision, NOW).write(tmp_path / "best.json")
    assert read_export(tmp_path / "best.json").plan() == planned.plan


def test_both_sides_carry_their_time_and_spread_over_all_steps_of_the_comparison():
    export, history = exported()
    steps = [t.outcome.step_s for t in history.ab_trials if t.request.strategy_id == CURRENT_SETUP]
    slowest = sorted(max(ranks) for block in steps for ranks in zip(*block, strict=True))
    assert (
        export.current.median_s == pytest.approx(float(np.median(slowest)))
        and export.current.blocks == job_spec().ab_pairs
    )
    assert export.tuned.low_s <= export.tuned.median_s <= export.tuned.high_s < export.current.low_s
    assert export.comparison.high < 1 and export.predicted_s == 0.06 and not export.lossy


def test_a_kept_current_setup_exports_no_strategy_but_says_what_was_compared(tmp_path):
    export, _ = exported(SyntheticWorld({}, default_s=0.2))
    path = tmp_path / "best.json"
    export.write(path)
    again = read_export(path)
    assert again.strategy is None and again.plan_id is None and again.plan() is None
    assert again.tuned.median_s == pytest.approx(0.2) and again.current.median_s == pytest.approx(
        0.1
    )


def test_without_a_comparison_the_times_are_those_of_the_search():
    export, _ = exported(SyntheticWorld(fails=lambda request: request.strategy_id != CURRENT_SETUP))
    assert export.strategy is None and export.tuned is None and export.comparison is None
    assert export.current.median_s == pytest.approx(0.1)


def test_an_edited_file_is_refused_unless_edits_are_allowed(written):
    edit(written, strategy=strategy(9).to_data())
    with pytest.raises(
        InvalidInput, match=r"was changed after autotune wrote it .* export it again"
    ):
        read_export(written)
    assert read_export(written, allow_edited=True).plan() == plan(strategy(9), WORKLOAD, 2)


def test_a_file_that_is_only_indented_otherwise_is_not_an_edit(written):
    written.write_text(json.dumps(json.loads(written.read_text()), indent=4))
    assert read_export(written).strategy == strategy(5)


def test_a_strategy_that_this_version_plans_otherwise_is_refused():
    export, _ = exported()
    with pytest.raises(InvalidInput, match="must give plan plan-0, but this version"):
        replace(export, plan_id="plan-0").plan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 7}, "reads export schema 1, but the file has 7; update autotune"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"variables": []}, "needs at least one variable"),
        ({"world_size": 0}, "world_size of job .* must be from 1 to 131072, but is 0"),
    ],
)
def test_a_file_that_breaks_a_rule_names_it_even_if_edits_are_allowed(written, change, message):
    edit(written, **change)
    with pytest.raises(InvalidInput, match=message):
        read_export(written, allow_edited=True)


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "{", '{"predicted_s": NaN}', "\ud800".encode("utf-8", "surrogatepass")]
)
def test_a_file_that_is_no_export_is_refused(tmp_path, text):
    path = tmp_path / "best.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidInput, match=r"best\.json"):
        read_export(path)


def test_a_strategy_alone_is_refused_with_the_command_that_measures_it(tmp_path):
    path = tmp_path / "strategy.json"
    path.write_text(strategy(5).to_json())
    with pytest.raises(InvalidInput, match="is a strategy alone; search and measure with"):
        read_export(path)


def test_a_missing_file_is_refused_with_its_path(tmp_path):
    with pytest.raises(InvalidInput, match=r"cannot read .*nothing\.json"):
        read_export(tmp_path / "nothing.json")


def test_writing_replaces_the_older_file_and_leaves_nothing_beside_it(written):
    export, _ = exported(SyntheticWorld({}, default_s=0.2))
    export.write(written)
    assert read_export(written).strategy is None
    assert [item.name for item in written.parent.iterdir()] == ["best.json"]


def test_a_place_that_cannot_be_written_is_refused():
    with pytest.raises(InvalidInput, match="cannot write the export"):
        exported()[0].write(Path("/proc/best.json"))


def test_the_model_it_was_made_for_is_accepted_in_any_order():
    check_model(exported()[0], dict(reversed(MODEL.items())), 2)
    check_model(
        exported()[0], {name: (list(shape), dtype) for name, (shape, dtype) in MODEL.items()}, 2
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head.bias": None}, "lacks head.bias"),
        ({"extra.weight": ((2,), "float32")}, "has the unexpected extra.weight"),
        ({"head.bias": ((11,), "float32")}, r"head.bias is float32\[11\] instead of float32\[10\]"),
        (
            {"head.bias": ((10,), "bfloat16")},
            r"head.bias is bfloat16\[10\] instead of float32\[10\]",
        ),
    ],
)
def test_another_model_is_refused_with_the_difference_named(changed, message):
    model = {name: value for name, value in {**MODEL, **changed}.items() if value is not None}
    with pytest.raises(ModelMismatch, match=message):
        check_model(exported()[0], model, 2)


def test_another_world_size_is_refused_with_both_sizes_and_the_fix():
    with pytest.raises(
        ModelMismatch,
        match="needs a world size of 2, but this run has 3; start 2 workers, or tune again with 3",
    ):
        check_model(exported()[0], MODEL, 3)
