"""Horovod as a rival of the outcome benchmark: its log, its groups, and the ratios."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_job import WORKLOAD

from autotune.errors import InvalidInput
from autotune.lowering.negotiation import HorovodSettings
from autotune.records import Measured
from autotune.strategy_space.builders import collectives
from autotune.strategy_space.plan import plan
from benchmarks.outcome.horovod import (
    AUTOTUNE_OURS,
    AUTOTUNE_OWN,
    DEFAULT,
    MIB,
    SWEEP,
    THROUGH,
    HorovodRivals,
    HorovodSide,
    best_sample,
    groups_of,
    horovod_keys,
    ratios_of,
    read_samples,
)

ROUNDS = 6
LOG = """\
hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,tensor_fusion_threshold,score
0,0,0,1,1,128,50.5
0,0,0,1,7.5,32,90.25
0,0,0,1,2,
"""


def test_the_best_sample_of_the_log_has_the_highest_score(tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"
    log.write_text(LOG)
    samples = read_samples(log)
    assert len(samples) == 2  # the last row is cut off
    assert best_sample(samples) == HorovodSettings(32 * MIB, 7.5e-3)
    assert best_sample(samples[:1]) == HorovodSettings(128 * MIB, 1e-3)
    log.write_text(LOG.splitlines()[0])
    with pytest.raises(InvalidInput, match="must log a sample"):
        read_samples(log)


def test_only_plain_all_reduces_of_whole_variables_are_groups_of_horovod() -> None:
    names = {variable.name for variable in WORKLOAD.variables}
    bucket = groups_of(plan(collectives.single_bucket(WORKLOAD), WORKLOAD, 2), WORKLOAD)
    assert bucket is not None
    assert [set(group) for group in bucket] == [names]
    apart = groups_of(plan(collectives.per_variable(WORKLOAD), WORKLOAD, 2), WORKLOAD)
    assert apart is not None
    assert sorted(map(len, apart)) == [1] * len(names)
    zero = plan(collectives.zero2_like(WORKLOAD), WORKLOAD, 2)
    assert groups_of(zero, WORKLOAD) is None


def side(name: str, step_s: float) -> HorovodSide:
    return HorovodSide(name, HorovodSettings(), ((step_s, step_s),) * ROUNDS)


def test_ratios_compare_the_better_autotune_with_ours() -> None:
    sides = [side(name, 0.3) for name in SWEEP]
    sides += [side(DEFAULT, 0.28), side(AUTOTUNE_OWN, 0.24), side(AUTOTUNE_OURS, 0.26)]
    ours = [Measured(step_s=((0.2, 0.2),))] * ROUNDS
    alone = ratios_of(HorovodRivals("vgg.x", tuple(sides), 100), ours)
    assert (alone.rival, alone.through) == (AUTOTUNE_OWN, None)
    assert alone.autotune == pytest.approx(1.2)
    assert alone.low <= alone.autotune <= alone.high
    assert (alone.default, alone.swept) == pytest.approx((1.4, 1.5))
    through = ratios_of(HorovodRivals("b", (*sides, side(THROUGH, 0.2)), 100), ours)
    assert through.through == pytest.approx(1.2)
    keys = horovod_keys([alone, through])
    assert keys["ratio_geomean_to_horovod"] == pytest.approx(1.2)
    assert keys["ratio_geomean_through_horovod"] == pytest.approx(1.2)
    assert keys["ratio_min_to_horovod"] == pytest.approx(1.2)
    assert horovod_keys([]) == {}
