"""The final output of `autotune tune`: the decision, once, with what was emulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.cluster import Cluster, Host
from autotune.jobs.results import Results, decision_text
from autotune.records import CURRENT_SETUP, REAL_CONDITIONS, Conditions, Decision, Measured, Network
from autotune.tuning.closing import decide
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.tuning.statistics import Ended

SPEC = JobSpec(("python", "x.py"), 2, Cluster.local(2), conditions=Conditions(Network.EMULATED))
RESULTS = Results(Path("best.json"), Path("report.html"))


def first_line(decision: Decision) -> str:
    return decision_text(decision, RESULTS, "sqlite:///x", 0, SPEC).splitlines()[0]


def test_only_an_exported_strategy_is_to_be_used() -> None:
    exported = Decision("strategy-1", "faster", None, "strategy-1")
    text = decision_text(exported, RESULTS, "sqlite:///x", 0, SPEC, "8 messages")
    assert text.startswith("exported strategy-1 (8 messages): faster")
    assert "use it" in text
    stays = Decision(CURRENT_SETUP, "no better", None, None)
    assert "use it" not in decision_text(stays, RESULTS, "sqlite:///x", 0, SPEC)


def test_a_tracking_uri_is_shown_without_its_password() -> None:
    stays = Decision(CURRENT_SETUP, "no better", None, None)
    text = decision_text(stays, RESULTS, "https://me:bluebottle@tracking", 3, SPEC)
    assert "bluebottle" not in text and text.count("https://me:***@tracking") == 2


def test_the_printed_commands_can_be_typed_in_a_shell() -> None:
    exported = Decision("strategy-1", "faster", None, "strategy-1")
    results = Results(Path("my jobs/best.json"), Path("report.html"))
    spec = replace(SPEC, command=("python", "x.py", "--name", "a b", "--token", "***"))
    lines = decision_text(exported, results, "sqlite:///my jobs/mlflow.db", 0, spec).splitlines()
    assert (
        "  use it   autotune run --strategy 'my jobs/best.json' -- python x.py --name 'a b' "
        "--token '***'"
    ) in lines
    assert "  mlflow   mlflow ui --backend-store-uri 'sqlite:///my jobs/mlflow.db'" in lines


def test_a_server_of_mlflow_is_shown_by_its_address() -> None:
    stays = Decision(CURRENT_SETUP, "no better", None, None)
    text = decision_text(stays, RESULTS, "http://mlf:5000", 0, SPEC)
    assert "  mlflow   http://mlf:5000" in text.splitlines()


def test_unsent_items_of_a_training_that_goes_on_are_sent_after_it() -> None:
    stays = Decision(CURRENT_SETUP, "no better", None, None)
    kept = replace(SPEC, continue_training=True)
    later = "`autotune track` sends them after the training"
    assert later in decision_text(stays, RESULTS, "sqlite:///x", 3, kept)
    assert later not in decision_text(stays, RESULTS, "sqlite:///x", 3, SPEC)


def test_a_job_on_several_hosts_lists_them_with_the_command_of_each(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    exported = Decision("strategy-1", "faster", None, "strategy-1")
    first = Host("a", 1, 1e9, 1e-5, 1e10, 1e-6, address="10.0.0.1")
    cluster = Cluster("two", (first, replace(first, name="b", address="10.0.0.2")))
    arguments = (exported, RESULTS, "sqlite:///x", 0, replace(SPEC, conditions=REAL_CONDITIONS))
    lines = decision_text(*arguments, cluster=cluster).splitlines()
    assert "  hosts    0 a at 10.0.0.1 (1 rank), 1 b at 10.0.0.2 (1 rank)" in lines
    used = next(number for number, line in enumerate(lines) if line.startswith("  use it"))
    assert lines[used].endswith("with R = its number; every host needs best.json at this path")
    assert lines[used + 1].strip() == (
        "autotune run --strategy best.json -- torchrun --nnodes 2 --nproc-per-node 1 "
        "--node-rank R --master-addr 10.0.0.1 --master-port 29500 x.py"
    )
    emulated = decision_text(exported, RESULTS, "sqlite:///x", 0, SPEC, cluster=cluster)
    assert "use it   autotune run --strategy best.json -- python x.py" in emulated


def test_the_explanation_has_its_own_line() -> None:
    why = "predicted 1 ms, measured 2 ms (+100.0%: not explained)"
    decision = Decision("strategy-1", "faster", None, "strategy-1", why)
    lines = decision_text(decision, RESULTS, "sqlite:///x", 0, SPEC).splitlines()
    assert f"  why      {why}" in lines
    silent = Decision("strategy-1", "faster", None, "strategy-1")
    assert "why" not in decision_text(silent, RESULTS, "sqlite:///x", 0, SPEC)


def test_the_headline_names_the_export_or_only_the_reason() -> None:
    reason = "faster than the current setup"
    exported = Decision("strategy-1", reason, None, "strategy-1")
    assert first_line(exported) == f"exported strategy-1: {reason} [emulated network]"
    stays = Decision(CURRENT_SETUP, "no better, so the current setup stays", None, None)
    assert first_line(stays) == "no better, so the current setup stays [emulated network]"


def decided(ratios: Sequence[float], ended: Ended) -> Decision:
    """The decision after these pairs of blocks, of which a block takes one step."""
    history = History((), 0.1)
    current = [Measured(((0.1,),)) for _ in ratios]
    tuned = [Measured(((0.1 * ratio,),)) for ratio in ratios]
    spec = replace(SPEC, ab_precision=0.01)
    return decide(spec, history, "strategy-1", tuned, current, ended)


WIDE = (0.86, 0.92, 0.87, 0.91, 0.88, 0.90)
NARROW = (0.899, 0.901, 0.9, 0.9, 0.902, 0.898)


def test_only_a_narrow_interval_is_as_precise_as_asked_for() -> None:
    assert "as precise as asked for" in decided(NARROW, Ended.PRECISE).reason
    wide = decided(WIDE, Ended.PRECISE)
    assert wide.comparison is not None and wide.comparison.high / wide.comparison.low > 1.02
    assert "as precise as asked for" not in wide.reason
    assert "as precise as asked for" not in decided(NARROW, Ended.CAP).reason


def test_an_interval_above_one_is_called_slower() -> None:
    slower = decided([2 - ratio for ratio in WIDE], Ended.CAP)
    assert slower.comparison is not None and slower.comparison.low > 1
    assert "slower than the current setup" in slower.reason
    assert "not significantly faster" not in slower.reason
    unclear = decided((0.9, 1.1, 0.95, 1.05, 1.2, 0.8), Ended.CAP)
    assert "is not significantly faster" in unclear.reason
    assert unclear.strategy_id == CURRENT_SETUP
