"""Packing and issuing cost a GPU what was measured on one, or are marked as assumed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.cluster import Cluster, Host
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.device_costs import costs_of
from autotune.lowering.lower import Lowering
from autotune.optimizer.budget import Budget
from autotune.optimizer.optimize import optimize
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.plan import plan
from autotune.zoo.assumed_models import assumed_ops

H100, V100 = "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB"


def test_a_cpu_keeps_its_own_costs() -> None:
    assert costs_of("cpu") == RuntimeCosts()


def test_costs_are_measured_on_an_h100_and_assumed_elsewhere() -> None:
    measured, assumed = costs_of("cuda:0", H100), costs_of("cuda", V100)
    for name in ("bucket_s", "pack_s_per_byte", "write_s", "unpack_s_per_byte", "issue_s"):
        assert measured.sources[name].startswith("measured on an H100")
        assert assumed.sources[name].startswith("assumed")
    assert measured.sources["top_k_find_s_per_element"].startswith("assumed")
    ratio = assumed["pack_s_per_byte"] / measured["pack_s_per_byte"]
    assert ratio == pytest.approx(3.35 / 0.9)  # the memories' rates by their data sheets
    assert assumed["issue_s"] == measured["issue_s"]
    assert costs_of("cuda")["pack_s_per_byte"] == measured["pack_s_per_byte"]
    assert "H100" not in costs_of("cuda", H100).payload.source


def test_bert_large_on_eight_v100_exposes_less_than_its_transfer() -> None:
    """With a CPU's costs 240 ms were exposed, of which 18 ms are the transfer."""
    workload = replace(assumed_ops("bert-large").workload(), device_name=V100)
    cluster = Cluster("8 V100", (Host("a", 8, 12.5e9, 2e-5, 1.3e11, 5e-6),))
    ddp = plan(ddp_default(workload), workload, 8)
    transfer_s = 2 * 7 / 8 * workload.grad_bytes / 1.3e11
    exposed_s = Lowering(workload, cluster).step_s(ddp) - workload.compute_s
    assert 0 < exposed_s < transfer_s < 0.02
    on_cpu_s = Lowering(workload, cluster, RuntimeCosts()).step_s(ddp) - workload.compute_s
    assert on_cpu_s > 10 * transfer_s


def test_a_search_names_assumed_costs_of_the_device() -> None:
    workload = assumed_ops("resnet50").workload()
    cluster = Cluster("2 GPUs", (Host("a", 2, 12.5e9, 2e-5, 1.3e11, 5e-6),))
    for name, expected in (("", True), (H100, False)):
        named = replace(workload, device_name=name)
        found = optimize(named, cluster, budget=Budget(replays=3, seconds=60.0))
        assert any("packing and issuing" in note for note in found.assumed) == expected
