"""An export is enacted in a Horovod script that no launcher of autotune started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from bare_export import bare_export
from horovod_timelines import operations_of
from short_jobs import small_model

from autotune.export import Export
from autotune.jobs.exports import write_export
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.workload import Library

pytest.importorskip("horovod", reason="`make horovod` builds it")
pytestmark = pytest.mark.job
SCRIPT = Path(__file__).parents[1] / "scripts" / "horovod_by_hand.py"
STEPS = 3


def exported() -> Export:
    """An export of two buckets of `small_model`."""
    workload = small_model()
    strategy = ddp_default(workload, 64 * 1024, 2 * 1024)
    return bare_export(workload, strategy, 2, plan_id=None, library=Library.HOROVOD)


def test_horovod_executes_an_export_by_its_groups_and_by_one_line(tmp_path: Path) -> None:
    export = exported()
    assert write_export(export, tmp_path / "best.json").written == tmp_path / "best_horovod.py"
    plan = export.plan()
    assert plan is not None
    sizes = Counter(len(message.slices) for message in plan.messages)
    assert sorted(sizes) == [2, 4]
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", "2"]
    horovodrun += ["--gloo-timeout-seconds", "240"]
    started = ["env", "HOROVOD_TIMELINE=DYNAMIC", *horovodrun, sys.executable, str(SCRIPT)]
    done = subprocess.run(
        [*started, str(tmp_path), str(STEPS)], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    by_groups = operations_of(tmp_path / "groups.json")
    assert Counter(map(len, by_groups)) == {size: STEPS * sizes[size] for size in sizes}
    by_apply = operations_of(tmp_path / "apply.json")
    assert Counter(map(len, by_apply)) == {1: STEPS * len(plan.messages)}
    assert len(set(re.findall(r"(?:groups|apply) ([0-9a-f]{64})", done.stdout))) == 1
    assert done.stdout.count("restarts 1 ") == 2
    assert "carried out by Horovod, 2 operations" in done.stdout
    refused = f"join every rank must make the same number of steps under a plan (here {plan.id})"
    assert done.stdout.count(refused) == 2


@pytest.mark.slow
def test_a_run_enacts_an_export_under_torchrun(tmp_path: Path) -> None:
    """`test_testbed_tune.py` has such a run under horovodrun."""
    exported().write(tmp_path / "best.json")
    script = SCRIPT.with_name("train_horovod.py")
    run = [sys.executable, "-m", "autotune", "run", "--strategy", str(tmp_path / "best.json")]
    words = ["torchrun", "--nproc-per-node", "2", str(script), "--steps", "4"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*run, "--", *words],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "carried out by Horovod, 2 operations" in done.stdout
    for rank in range(2):
        assert f"rank {rank} of 2 synchronized by HorovodSynchronizer._synchronize" in done.stdout
