"""DDP's options and torch's compression hooks as rivals: what is chosen, and the ratios."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_job import WORKLOAD

from autotune.cluster import Cluster
from autotune.dataset.trials import Domain
from autotune.jobs.campaign.train_varied import HOOKS
from benchmarks.outcome.ddp_options import ALL, DEFAULTS, SINGLE, fastest, option_sets
from benchmarks.outcome.hooks import (
    CAPS_MIB,
    HookRivals,
    HookSide,
    _best_hooks,
    _write,
    hook_keys,
    hook_ratios,
    hook_rounds,
    ratios_of,
    read_hooks,
)

ROUNDS = 6


def domain_with(buffers: int) -> Domain:
    workload = replace(WORKLOAD, buffers=buffers, buffer_bytes=(8,) * buffers)
    return Domain("a.b", "a", "b", workload, Cluster.local(2), {}, 2, (), ())


def test_ddp_keeps_torchs_defaults_unless_others_are_clearly_faster():
    assert fastest({DEFAULTS: 0.1, "static_graph": 0.0996}) == DEFAULTS
    assert fastest({DEFAULTS: 0.1, "static_graph": 0.0994, ALL: 0.0990}) == ALL


def test_every_option_is_tried_alone_and_with_all_others():
    """Broadcasts of buffers matter only to a model that has some."""
    sets = option_sets(domain_with(buffers=1))
    assert list(sets) == [DEFAULTS, *SINGLE, ALL]
    assert sets[ALL] == {key: value for one in SINGLE.values() for key, value in one.items()}
    assert sets["broadcast_buffers=False"] == {"broadcast_buffers": False}
    without = option_sets(domain_with(buffers=0))
    assert set(sets) - set(without) == {"broadcast_buffers=False"}
    assert without[ALL].keys() == {"gradient_as_bucket_view", "static_graph", "batched_grad_copy"}


def blocks(step_s: float) -> tuple[tuple[float, ...], ...]:
    return tuple((step_s + number * 1e-4,) * 3 for number in range(ROUNDS))


RIVALS = HookRivals(
    "vgg.two_hosts.ratio_1",
    (
        HookSide("DDP, fp16 hook", "fp16", 4, blocks(0.15)),
        HookSide("DDP, power_sgd_4 hook", "power_sgd_4", 25, blocks(0.12)),
        HookSide("ours", rounds=blocks(0.2)),
        HookSide("ours with compressors", rounds=blocks(0.1)),
    ),
    {"fp16, 1 MiB": 0.2},
)


def test_each_hook_has_the_bucket_size_of_its_lowest_median():
    sweep_s = {f"{hook}, {cap} MiB": 0.1 for hook in HOOKS for cap in CAPS_MIB}
    sweep_s |= {"fp16, 4 MiB": 0.09, "power_sgd_4, 25 MiB": 0.08}
    best = [(side.hook, side.bucket_cap_mb) for side in _best_hooks(sweep_s)]
    assert best == [("fp16", 4), ("power_sgd_4", 25)]
    failed = {f"power_sgd_4, {cap} MiB" for cap in CAPS_MIB}
    left = {title: step_s for title, step_s in sweep_s.items() if title not in failed}
    assert [side.hook for side in _best_hooks(left)] == ["fp16"]


def test_the_better_hook_is_compared_with_ours_with_compressors(tmp_path: Path):
    ratios = ratios_of(RIVALS)
    assert ratios.hook == "DDP, power_sgd_4 hook"
    assert ratios.value == pytest.approx(1.2, abs=0.01) and ratios.low > 1.1
    assert hook_keys([ratios])["ratio_geomean_to_hooks"] == ratios.value and hook_keys([]) == {}
    assert hook_ratios(tmp_path) is None and hook_rounds(tmp_path) == 0
    _write(tmp_path, RIVALS)
    assert read_hooks(tmp_path) == RIVALS and hook_ratios(tmp_path) == ratios
    assert hook_rounds(tmp_path) == ROUNDS + 1
    _write(tmp_path, replace(RIVALS, failed={"power_sgd_4, 1 MiB": "hang"}))
    assert hook_rounds(tmp_path) == ROUNDS + 2
    few = replace(RIVALS, sides=tuple(replace(s, rounds=s.rounds[:2]) for s in RIVALS.sides))
    _write(tmp_path, few)
    assert hook_ratios(tmp_path) is None
