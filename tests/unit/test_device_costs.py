"""Packing and issuing cost a GPU what was measured on one, or are marked as assumed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.cluster import Cluster, CollectiveFit, Host
from autotune.dfg.graph import Kind
from autotune.dfg.utilisation import covered_s, covered_within_s
from autotune.lowering.costs import Constant, RuntimeCosts
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


@pytest.mark.parametrize("name", [H100, V100, ""])
def test_no_cost_of_a_gpu_claims_to_be_measured_on_a_cpu(name: str) -> None:
    sources = costs_of("cuda", name).sources
    on_cpus = {of for of, source in sources.items() if "runtime_costs" in source}
    assert on_cpus == {"settle_s", "defer_s", "buffer_s"}  # Python of the host
    assert all(sources[of].startswith("assumed") for of in on_cpus)


def test_steps_of_messages_on_a_gpu_wait_for_no_thread() -> None:
    gpu = costs_of("cuda", H100)
    assert gpu["lane_s"] == gpu["piece_s"] == gpu["fill_s"]  # a call
    assert gpu.lane_s.is_assumed
    assert gpu["lane_first_s"] == 0
    assert not gpu.lane_first_s.is_assumed  # so no calibration raises it


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
    workload = assumed_ops("vgg16").workload()
    cluster = Cluster("2 GPUs", (Host("a", 2, 12.5e9, 2e-5, 1.3e11, 5e-6),))
    for name, expected in (("", True), (H100, False)):
        named = replace(workload, device_name=name)
        found = optimize(named, cluster, budget=Budget(replays=3, seconds=60.0))
        assert any("packing and issuing" in note for note in found.assumed) == expected


def test_a_search_for_gpus_says_whose_reduce_scatter_it_assumes() -> None:
    """NCCL's moves half of the bytes of gloo's, unless a probe shows its time."""
    workload = assumed_ops("vgg16").workload()
    cluster = Cluster("2 GPUs", (Host("a", 2, 12.5e9, 2e-5, 1.3e11, 5e-6),))
    fit = CollectiveFit("reduce_scatter", 2, 1e-5, 1e-11, 0.0, 1, 2**30)
    cases = ((workload, cluster, True), (workload, cluster.with_fits((fit,)), False))
    for trained, on, expected in (*cases, (replace(workload, device="cpu"), cluster, False)):
        found = optimize(trained, on, budget=Budget(replays=3, seconds=60.0))
        assert any("NCCL's reduce-scatter" in note for note in found.assumed) == expected


def test_messages_are_longer_while_a_gpu_computes() -> None:
    """Only the part during computation is longer: all of it, none of it, or in between."""
    workload = replace(assumed_ops("resnet50").workload(), device_name=H100)
    free = replace(costs_of("cuda", H100), contention=Constant(0.0, "alone"))
    ddp = plan(ddp_default(workload), workload, 2)
    for bytes_per_s, least, most in ((1e12, 0.2, 0.2951), (1e8, 1e-3, 0.1)):
        cluster = Cluster("2", (Host("a", 2, 12.5e9, 2e-5, bytes_per_s, 5e-6),))
        sent_s = []
        for costs in (free, costs_of("cuda", H100)):
            graph, ops = Lowering(workload, cluster, costs).period_with_messages(ddp)
            inside = np.zeros(graph.ops, dtype=np.bool_)
            for first, last in zip(ops.starts, ops.ends, strict=True):
                inside[first : last + 1] = True
            sent = inside & np.isin(graph.kind, (Kind.SEND, Kind.VIRTUAL))
            sent_s.append(float(graph.duration_s[sent].sum()))
        longer = sent_s[1] / sent_s[0] - 1
        assert least < longer < most
    assert costs_of("cpu")["contention"] == 0.0


def test_covered_time_within_windows_agrees_with_the_union() -> None:
    random = np.random.default_rng(0)
    start_s = random.uniform(0, 10, 40)
    end_s = start_s + random.exponential(0.3, 40)
    from_s = random.uniform(-1, 10, 20)
    to_s = from_s + random.exponential(2.0, 20)
    found = covered_within_s(start_s, end_s, from_s, to_s)
    for low_s, high_s, covered in zip(from_s, to_s, found, strict=True):
        clipped = covered_s(np.clip(start_s, low_s, high_s), np.clip(end_s, low_s, high_s))
        assert covered == pytest.approx(clipped)
