"""Plans as groups of `hvd.DistributedOptimizer`. Horovod is not needed."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from synthetic_job import WORKLOAD, SyntheticWorld, drive, job_spec
from test_export import NOW

from autotune.errors import InvalidInput
from autotune.export import read_export
from autotune.jobs.exports import HorovodCode, build_export, write_export
from autotune.strategy_space.builders.collectives import per_variable, single_bucket, zero2_like
from autotune.strategy_space.horovod_groups import FUSION_THRESHOLD_BYTES, horovod_groups
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Compressor
from autotune.tuning.instructions import Finish
from autotune.workload import Library

BUCKET = plan(single_bucket(WORKLOAD), WORKLOAD, 2)


def _compressed(*compressors: Compressor):
    enacted = plan(per_variable(WORKLOAD), WORKLOAD, 2)
    kinds = (compressors * len(enacted.messages))[: len(enacted.messages)]
    return replace(
        enacted,
        messages=tuple(
            replace(message, compressor=kind)
            for message, kind in zip(enacted.messages, kinds, strict=True)
        ),
    )


def test_only_all_reduces_of_whole_variables_with_one_compression_are_groups() -> None:
    fp16 = horovod_groups(_compressed(Compressor.FP16), WORKLOAD.variables)
    assert fp16 is not None and fp16.fp16
    assert "compression=hvd.Compression.fp16," in fp16.script("Net", "strategy-1")
    for refused in (
        plan(zero2_like(WORKLOAD), WORKLOAD, 2),
        _compressed(Compressor.FP16, Compressor.NONE),
        _compressed(Compressor.BF16),
        replace(BUCKET, ring_order=(1, 0)),
    ):
        assert horovod_groups(refused, WORKLOAD.variables) is None
    sparse = [replace(variable, sparse=True) for variable in WORKLOAD.variables]
    assert horovod_groups(BUCKET, sparse) is None


def test_the_code_holds_the_groups_and_a_threshold_that_does_not_split_them() -> None:
    found = horovod_groups(BUCKET, WORKLOAD.variables)
    assert found is not None
    module = ast.parse(found.script("Net", "strategy-1"))
    (groups,) = [
        ast.literal_eval(part.value)
        for part in module.body
        if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "GROUPS"
    ]
    assert groups == [[part.variable for part in BUCKET.messages[0].slices]]
    assert found.largest_bytes == sum(variable.grad_bytes for variable in WORKLOAD.variables)
    small, large = (
        replace(found, largest_bytes=size).script("Net", "strategy-1")
        for size in (FUSION_THRESHOLD_BYTES // 2, FUSION_THRESHOLD_BYTES)
    )
    assert "HOROVOD_FUSION_THRESHOLD" not in small
    assert f'"HOROVOD_FUSION_THRESHOLD"] = "{2 * FUSION_THRESHOLD_BYTES}"' in large


def test_the_code_passes_on_the_options_of_the_scripts_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as `op=hvd.Sum`, without which Horovod averages. This module takes Horovod's place."""
    horovod: Any = ModuleType("horovod.torch")
    horovod.DistributedOptimizer = lambda optimizer, **options: options
    horovod.Compression = SimpleNamespace(none="none", fp16="fp16")
    monkeypatch.setitem(sys.modules, "horovod", ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    for name in ("HOROVOD_DISABLE_GROUP_FUSION", "HOROVOD_FUSION_THRESHOLD"):
        monkeypatch.setenv(name, "")  # restored afterwards
    named = [(variable.name, variable) for variable in WORKLOAD.variables]
    model = SimpleNamespace(named_parameters=lambda: iter(named))
    for enacted, compression in ((BUCKET, "none"), (_compressed(Compressor.FP16), "fp16")):
        groups = horovod_groups(enacted, WORKLOAD.variables)
        assert groups is not None
        code: dict[str, Any] = {}
        exec(groups.script("Net", "strategy-1"), code)
        options = code["distributed"](None, model, op="Sum", backward_passes_per_step=4)
        assert (options["op"], options["backward_passes_per_step"]) == ("Sum", 4)
        assert options["compression"] == compression
        assert len(options["groups"]) == len(enacted.messages)
        with pytest.raises(TypeError, match="compression"):
            code["distributed"](None, model, compression="another")


def test_the_export_of_a_horovod_script_comes_with_its_code(tmp_path: Path) -> None:
    history, end = drive(job_spec(), SyntheticWorld({5: 0.06}, noise=0.02))
    assert isinstance(end, Finish)
    export = build_export("job", job_spec(), history, end.decision, NOW)
    bucket = replace(export, strategy=single_bucket(WORKLOAD), plan_id=None)
    best, script = tmp_path / "best.json", tmp_path / "best_horovod.py"
    assert write_export(bucket, best) == HorovodCode()  # of a script with DDP
    with_code = replace(bucket, library=Library.HOROVOD)
    assert write_export(with_code, best) == HorovodCode(written=script)
    assert "hvd.DistributedOptimizer(" in script.read_text()
    assert read_export(best).library is Library.HOROVOD
    assert write_export(with_code, best) == HorovodCode(written=script)
    current = replace(export, strategy=None, plan_id=None, library=Library.HOROVOD)
    assert write_export(current, tmp_path / "current.json") == HorovodCode()


def test_an_export_replaces_earlier_exports_only(tmp_path: Path) -> None:
    history, end = drive(job_spec(), SyntheticWorld({5: 0.06}, noise=0.02))
    assert isinstance(end, Finish)
    export, best = build_export("job", job_spec(), history, end.decision, NOW), tmp_path / "b.json"
    for content in ('{"epoch": 3, "loss": 0.1}', "no JSON", "[]"):
        best.write_text(content)
        with pytest.raises(InvalidInput, match=r"b.json must be absent or an earlier export"):
            write_export(export, best)
        assert best.read_text() == content
    best.unlink()
    write_export(export, best)
    write_export(replace(export, job_id="another"), best)
    assert read_export(best).job_id == "another"


def test_code_of_an_earlier_export_goes_and_a_file_of_the_user_stays(tmp_path: Path) -> None:
    history, end = drive(job_spec(), SyntheticWorld({5: 0.06}, noise=0.02))
    assert isinstance(end, Finish)
    decided = build_export("job", job_spec(), history, end.decision, NOW)
    with_code = replace(
        decided, strategy=single_bucket(WORKLOAD), plan_id=None, library=Library.HOROVOD
    )
    current = replace(with_code, strategy=None)
    best, script = tmp_path / "best.json", tmp_path / "best_horovod.py"
    write_export(with_code, best)
    assert write_export(current, best) == HorovodCode(removed=script)
    assert not script.exists() and read_export(best).strategy is None
    script.write_text("import horovod\n")
    assert write_export(current, best) == HorovodCode()
    with pytest.raises(InvalidInput, match=r"best_horovod\.py .* move it, or choose another"):
        write_export(with_code, best)
    assert script.read_text() == "import horovod\n" and read_export(best).strategy is None
