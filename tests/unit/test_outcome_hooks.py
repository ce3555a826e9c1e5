"""DDP's options and torch's compression hooks as rivals: what is chosen, and the ratios."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from synthetic_job import WORKLOAD

from autotune.cluster import Cluster
from autotune.dataset.trials import Domain
from autotune.errors import LaunchError
from autotune.jobs.campaign.generated_models import MODELS
from autotune.jobs.campaign.train_varied import HOOKS
from benchmarks.outcome.ddp_options import ALL, DEFAULTS, SINGLE, fastest, option_sets
from benchmarks.outcome.hooks import (
    HookRivals,
    HookSide,
    _best_hooks,
    _with_look,
    _write,
    hook_keys,
    hook_ratios,
    hook_rounds,
    missing_looks,
    ratios_of,
    read_hooks,
    settings_of,
)
from benchmarks.outcome.horovod_through import BlockHung
from benchmarks.outcome.sweeps import FINALISTS

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
        HookSide("DDP, fp16 hook", "fp16", "bucket_cap_mb=4", blocks(0.15)),
        HookSide("DDP, power_sgd_4 hook", "power_sgd_4", "bucket_cap_mb=25", blocks(0.12)),
        HookSide("ours", rounds=blocks(0.2)),
        HookSide("ours with compressors", rounds=blocks(0.1)),
    ),
    {"fp16": ({"bucket_cap_mb=1": 0.2},)},
)


RUNNING = ("=1000", "=50", "=25", "=16")


class MadeRanks:
    """Ranks whose steps take a given time; PowerSGD hangs with less than 16 MiB."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def say(self, message: str) -> None:
        assert "hang" in message

    def block(self, source: str, side: HookSide) -> tuple[float, ...]:
        self.asked.append(side.name)
        if side.hook != "fp16" and not side.setting.endswith(RUNNING):
            raise BlockHung("hang")
        return (0.1 if side.setting == "bucket_cap_mb_list=[1, 8]" else 0.2,)


def test_each_hook_is_swept_over_the_buckets_of_ddp_with_the_budget_of_our_search():
    workload = MODELS["vgg"].workload()
    settings, budget, ranks = settings_of(workload, Cluster.local(2)), 25, MadeRanks()
    assert settings[0] == "bucket_cap_mb=1000" and len(settings) <= budget
    rivals = HookRivals("a.b")
    while left := missing_looks(rivals, settings, budget):
        rivals = _with_look(rivals, ranks, *left)
    looks = [name for name in ranks.asked if name.startswith("fp16")]
    assert len(looks) == budget + FINALISTS and set(settings) == {
        name.partition(", ")[2] for name in looks
    }
    best = {side.hook: side.setting for side in _best_hooks(rivals.sweep_s)}
    assert best["fp16"] == "bucket_cap_mb_list=[1, 8]"
    assert best["power_sgd_4"] in ("bucket_cap_mb=1000", "bucket_cap_mb=50", "bucket_cap_mb=25")
    hung = {name for name in ranks.asked if "power_sgd" in name and not name.endswith(RUNNING)}
    assert len(hung) == 1, "smaller buckets would hang, too"


@dataclass
class FailingRanks:
    """Ranks whose first looks fail with `errors`; later ones take 0.1 s."""

    errors: list[LaunchError]
    asked: list[str] = field(default_factory=list)

    def say(self, message: str) -> None:
        pass

    def block(self, source: str, side: HookSide) -> tuple[float, ...]:
        self.asked.append(side.setting)
        if self.errors:
            raise self.errors.pop()
        return (0.1,)


SETTINGS = ("bucket_cap_mb=1000", "bucket_cap_mb=25")


def looks(errors: list[LaunchError]) -> tuple[HookRivals, list[str]]:
    """Return the first round of a hook's sweep, and the settings that its ranks were asked for."""
    rivals, ranks = HookRivals("a.b"), FailingRanks(errors)
    for setting in SETTINGS:
        rivals = _with_look(rivals, ranks, "fp16", 0, setting)
    return rivals, ranks.asked


LARGE, SMALL = SETTINGS


def test_a_look_that_fails_once_is_repeated():
    for error in (LaunchError("a rank is lost"), BlockHung("silence")):
        rivals, asked = looks([error])
        assert rivals.sweep_s["fp16"] == ({LARGE: 0.1, SMALL: 0.1},)
        assert asked == [LARGE, LARGE, SMALL] and not rivals.failed


def test_only_a_setting_that_hangs_again_fails_smaller_ones():
    crashed, asked = looks([LaunchError("crash"), LaunchError("crash")])
    assert crashed.sweep_s["fp16"] == ({LARGE: None, SMALL: 0.1},)
    assert asked == [LARGE, LARGE, SMALL] and crashed.failed == {f"fp16, {LARGE}": "crash"}
    hung, asked = looks([BlockHung("silence"), BlockHung("silence")])
    assert hung.sweep_s["fp16"] == ({LARGE: None, SMALL: None},) and asked == [LARGE, LARGE]
    assert hung.failed[f"fp16, {SMALL}"] == f"as {LARGE}: silence"
    again = _with_look(hung, FailingRanks([]), "fp16", 1, LARGE)
    assert again.sweep_s["fp16"][1] == {LARGE: None} and again.failed == hung.failed


def test_a_hook_that_fails_with_every_setting_is_left_out_with_the_reason():
    failed = {hook: ({"bucket_cap_mb=1": None},) for hook in HOOKS}
    assert _best_hooks(failed) == []
    sides = tuple(side for side in RIVALS.sides if side.hook != "power_sgd_4")
    reasons = {"fp16, bucket_cap_mb=1": "hang", "power_sgd_4, bucket_cap_mb_list=[1, 8]": "crash"}
    ratios = ratios_of(replace(RIVALS, sides=sides, failed=reasons))
    assert ratios.left_out == {"power_sgd_4": "crash"}
    hooks = hook_keys([ratios])["hooks"]
    assert isinstance(hooks, list) and hooks[0]["left_out"] == {"power_sgd_4": "crash"}


def test_the_better_hook_is_compared_with_ours_with_compressors(tmp_path: Path):
    ratios = ratios_of(RIVALS)
    assert ratios.hook == "DDP, power_sgd_4 hook"
    assert ratios.value == pytest.approx(1.2, abs=0.01) and ratios.low > 1.1
    assert hook_keys([ratios])["ratio_geomean_to_hooks"] == ratios.value and hook_keys([]) == {}
    assert hook_ratios(tmp_path) is None and hook_rounds(tmp_path) == 0
    _write(tmp_path, RIVALS)
    assert read_hooks(tmp_path) == RIVALS and hook_ratios(tmp_path) == ratios
    assert hook_rounds(tmp_path) == ROUNDS + 1
    _write(tmp_path, replace(RIVALS, sweep_s={**RIVALS.sweep_s, "power_sgd_4": ({"x": None},)}))
    assert hook_rounds(tmp_path) == ROUNDS + 2
    few = replace(RIVALS, sides=tuple(replace(s, rounds=s.rounds[:2]) for s in RIVALS.sides))
    _write(tmp_path, few)
    assert hook_ratios(tmp_path) is None
