"""Horovod as a rival of the outcome benchmark: its log, bound, space, and the ratios."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_job import WORKLOAD

from autotune.cluster import Cluster, Host
from autotune.costs.timing import ready_times_s
from autotune.errors import InvalidInput, LaunchError
from autotune.lowering.horovod import ring_s_per_byte
from autotune.lowering.negotiation import HorovodSettings
from autotune.strategy_space.builders import collectives
from autotune.strategy_space.space import SearchSpace
from benchmarks.outcome.horovod import MIB, best_sample, read_samples
from benchmarks.outcome.horovod_sides import (
    AUTOTUNE_OURS,
    AUTOTUNE_OWN,
    DEFAULT,
    OURS_BESIDE,
    SWEPT,
    THROUGH,
    HorovodRivals,
    HorovodSide,
    horovod_keys,
    horovod_ratios,
    horovod_rounds,
    least_within_s,
    ratios_of,
    read_rivals,
    write_rivals,
)
from benchmarks.outcome.horovod_through import ThroughHorovod, operations_of_horovod

CLUSTER = Cluster("up", tuple(Host(f"h{number}", 1, 1e8, 1e-4, 1e9, 1e-5) for number in range(2)))
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


def test_only_operations_of_horovod_are_searched() -> None:
    space = operations_of_horovod(SearchSpace.default())
    bucket = collectives.single_bucket(WORKLOAD)
    for strategy in (bucket, replace(bucket, cross_step=True)):
        assert space.violation(strategy, WORKLOAD, CLUSTER) is None
    assert space.violation(collectives.zero2_like(WORKLOAD), WORKLOAD, CLUSTER) is not None


def test_a_step_within_horovod_takes_all_messages_one_by_one_after_the_first_gradient() -> None:
    slow = replace(WORKLOAD, forward_s=0.2, backward_s=0.1, update_s=0.01)
    sent_s = ring_s_per_byte(CLUSTER) * slow.grad_bytes
    ready_s = ready_times_s(slow)
    bound_s = least_within_s(slow, CLUSTER)
    assert bound_s >= 0.2 + max(0.1, float(ready_s.min()) + sent_s) + 0.01 - 1e-12
    assert bound_s <= 0.2 + max(0.1, float(ready_s.max()) + sent_s) + 0.01 + 1e-12


def rivals(domain: str, through_s: float, rounds: int = ROUNDS) -> HorovodRivals:
    def side(name: str, step_s: float) -> HorovodSide:
        settings = None if name in (OURS_BESIDE, THROUGH) else HorovodSettings()
        return HorovodSide(name, settings, rounds=((step_s, step_s),) * rounds)

    crossing = replace(collectives.single_bucket(WORKLOAD), cross_step=True)
    sides = (
        side(DEFAULT, 0.28),
        side(SWEPT, 0.3),
        side(AUTOTUNE_OWN, 0.24),
        side(AUTOTUNE_OURS, 0.26),
        side(OURS_BESIDE, 0.2),
        replace(side(THROUGH, through_s), strategy=crossing),
    )
    return HorovodRivals(domain, sides, 100, 10, {"64 MiB, 5 ms": 0.3}, 0.23)


def test_ratios_compare_the_better_autotune_with_ours_and_ours_through_it() -> None:
    one, two = ratios_of(rivals("vgg.x", 0.2)), ratios_of(rivals("b", 0.24))
    assert one.rival == AUTOTUNE_OWN
    assert one.autotune.ratio == pytest.approx(1.2)
    assert one.autotune.low <= one.autotune.ratio <= one.autotune.high
    assert (one.default, one.swept) == pytest.approx((1.4, 1.5))
    assert (one.through.ratio, two.through.ratio) == pytest.approx((1.2, 1.0))
    assert one.across and one.headroom == pytest.approx(0.24 / 0.23)
    keys = horovod_keys([one, two])
    assert keys["ratio_geomean_to_horovod"] == pytest.approx(1.2)
    assert keys["ratio_geomean_through_horovod"] == pytest.approx(1.2**0.5)
    assert keys["ratio_min_to_horovod"] == pytest.approx(1.2)
    assert horovod_keys([]) == {}


def test_rounds_are_kept_and_too_few_give_no_ratio(tmp_path: Path) -> None:
    assert read_rivals(tmp_path) is None and horovod_ratios(tmp_path) is None
    few = rivals("vgg.x", 0.2, rounds=2)
    write_rivals(tmp_path, few)
    assert read_rivals(tmp_path) == few and horovod_rounds(tmp_path) == 2
    assert horovod_ratios(tmp_path) is None
    write_rivals(tmp_path, rivals("vgg.x", 0.2))
    assert horovod_ratios(tmp_path) is not None


ANSWERS = """
import sys
print('{"strategy": null, "trials": 3}', flush=True)
print([float(sys.stdin.readline())], flush=True)
"""


def test_blocks_are_answers_of_a_process_whose_end_is_an_error() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", ANSWERS]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        through = ThroughHorovod(process)
        assert (through.found.strategy, through.found.trials) == (None, 3)
        assert through.block(7) == (7.0,)
        with pytest.raises(LaunchError, match="ended with status 0"):
            through._line()
