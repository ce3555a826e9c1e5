"""The messages of two ranks follow from the recording of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorded_h100 import TRACES, Recording
from synthetic_traces import Job

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.profiling.traces.job import read_job
from autotune.whatif.base import Base, steady
from autotune.whatif.changes.blueconnect import blueconnect
from autotune.whatif.changes.compression import deep_gradient_compression
from autotune.whatif.changes.distributed import collectives, distributed
from autotune.whatif.changes.messages import fp16_gradients
from autotune.whatif.changes.network import faster_network, no_stragglers
from autotune.whatif.question import Question
from autotune.whatif.recording.gradients import gradients_of
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.registry import Change
from benchmarks.whatif_truth.messages import predicted_messages, recorded_messages
from benchmarks.whatif_truth.scaling import Row, noise, on_hosts, workload_of


@pytest.fixture(scope="module")
def vgg19() -> Recording:
    """A recording of two ranks on one GPU."""
    return Recording("vgg19.two_ranks")


@pytest.mark.parametrize("model", [pytest.param("resnet50", marks=pytest.mark.slow), "vgg19"])
def test_messages_have_the_recorded_number_bytes_order_and_kernels(model: str) -> None:
    """With buffers, which are broadcast before the forward pass, and without."""
    predicted = predicted_messages(TRACES / f"{model}.fp32")
    assert predicted == recorded_messages(TRACES / f"{model}.two_ranks")
    assert ("broadcast" in {one.collective for one in predicted}) == (model == "resnet50")


def test_a_recorded_step_of_ddp_keeps_its_own_copies() -> None:
    """Only messages and their issues are new, since every gradient is already packed."""
    from synthetic_cluster import cluster

    folder = TRACES / "vgg19.fp32"
    job = read_job([folder])
    base = recorded_base(job, 0)
    gradients = gradients_of(job, 0, base)
    question = Question(cluster=cluster((1, 1e5), (1, 1e5)), gradients=gradients)
    changed = distributed(base, question)
    new = changed.names.ops[base.ops :]
    assert sum(name.startswith("all_reduce") for name in new) == 6
    assert not any("pack" in name for name in new)
    assert any("measured on an H100" in note for note in changed.notes)


def test_recorded_messages_lose_their_waiting_and_take_the_time_of_the_cluster(
    vgg19: Recording,
) -> None:
    """Two ranks shared one GPU, so each waited for the other one; the cluster's link is fast."""
    from synthetic_cluster import cluster

    base = vgg19.base
    messages = collectives(base)
    assert base.waits_s and messages[list(base.waits_s)].all()
    together = no_stragglers(base, Question())
    assert together.duration_s[messages].sum() < base.duration_s[messages].sum()
    assert steady(together).step_s < steady(base).step_s
    on = distributed(base, Question(cluster=cluster((1, 1e5), (1, 1e5))))
    assert on.ops == base.ops and not on.waits_s
    assert on.duration_s[messages].sum() < 0.2 < base.duration_s[messages].sum()


def test_a_faster_network_holds_for_recorded_messages_that_take_the_time_of_the_cluster(
    vgg19: Recording,
) -> None:
    from synthetic_cluster import cluster

    base = vgg19.base
    slow, fast = (Question(cluster=cluster((1, rate), (1, rate))) for rate in (1e4, 2e4))
    found = distributed(faster_network(base, slow), slow)
    assert found.duration_s == pytest.approx(distributed(base, fast).duration_s)


def of_old_torch(folder: Path) -> Base:
    """Rank 0 of a job with NCCL, as torch 2.1 and older record it: without sizes of messages."""
    job = Job(ranks=2).run()
    for event in (event for events in job.events for event in events):
        for key in ("In msg nelems", "Out msg nelems", "dtype"):
            event["args"].pop(key, None)
    return recorded_base(read_job(job.write(folder)), 0)


@pytest.mark.parametrize(
    "change", [distributed, faster_network, fp16_gradients, deep_gradient_compression, blueconnect]
)
def test_collectives_without_sizes_have_no_time_on_the_cluster(
    change: Change, tmp_path: Path
) -> None:
    """BlueConnect and compression sent 0 bytes, and a faster network changed nothing."""
    from synthetic_cluster import cluster

    base = of_old_torch(tmp_path)
    assert collectives(base).any()
    with pytest.raises(InvalidInput, match="states the sizes of none of its 4 collectives"):
        change(base, Question(cluster=cluster((2, 1e4), (2, 1e4))))


def of_type(folder: Path, dtype: str) -> Base:
    """Rank 0 of a job whose four messages have 1000, 2000, 3000 and 4000 elements of a type."""
    job = Job(ranks=2).run()
    for event in (event for events in job.events for event in events):
        if "dtype" in event["args"]:
            event["args"]["dtype"] = dtype
    return recorded_base(read_job(job.write(folder)), 0)


def test_messages_of_16_bits_are_not_halved_again(tmp_path: Path) -> None:
    from synthetic_cluster import cluster

    base, question = of_type(tmp_path, "BFloat16"), Question(cluster=cluster((2, 1e4), (2, 1e4)))
    with pytest.raises(InvalidInput, match="elements of at most 2 bytes; leave this what-if out"):
        fp16_gradients(base, question)
    messages = np.flatnonzero(collectives(base)).tolist()
    mixed = replace(base, element_bytes={**dict.fromkeys(messages, 4), messages[0]: 2})
    after = fp16_gradients(mixed, question)
    shares = after.size_bytes[messages] / base.size_bytes[messages]
    assert shares.tolist() == [1.0, 0.5, 0.5, 0.5]
    with pytest.raises(InvalidInput, match="at most 2 bytes"):
        fp16_gradients(after, question)


@pytest.mark.parametrize(("dtype", "value_bytes"), [("Float", 4), ("BFloat16", 2), ("Double", 8)])
def test_compression_counts_the_elements_of_a_message_by_its_type(
    dtype: str, value_bytes: int, tmp_path: Path
) -> None:
    from synthetic_cluster import cluster

    base = of_type(tmp_path, dtype)
    question = Question(
        cluster=cluster((2, 1e4), (2, 1e4)), amounts={"deep_gradient_compression": 1.0}
    )
    after = deep_gradient_compression(base, question)
    messages = np.flatnonzero(collectives(base))
    elements = 1000 * np.arange(1, 5)
    assert sorted(base.size_bytes[messages]) == (value_bytes * elements).tolist()
    sent_bytes = 4 * elements * (value_bytes + 4)  # four workers send values and their numbers
    assert sorted(after.size_bytes[messages]) == sent_bytes.tolist()


def test_only_collectives_with_sizes_change(tmp_path: Path) -> None:
    """A barrier is an all-reduce without a size: it keeps its time, which held contention."""
    from synthetic_cluster import cluster

    base = recorded_base(Job(ranks=2).read(tmp_path), 0)
    messages = np.flatnonzero(collectives(base))
    sizes_bytes = base.size_bytes.copy()
    sizes_bytes[messages[0]] = 0.0
    question = Question(cluster=cluster((2, 1e4), (2, 1e4)))
    for change in (distributed, faster_network, blueconnect):
        after = change(replace(base, size_bytes=sizes_bytes), question)
        changed = after.duration_s[messages] != base.duration_s[messages]
        assert changed.tolist() == [False, True, True, True]
        unsized = "1 collectives without a stated size keep their times"
        assert (unsized in after.notes) == (change is not blueconnect)


@pytest.mark.parametrize(
    ("change", "ranks"), [(fp16_gradients, 1), (deep_gradient_compression, 1), (blueconnect, 2)]
)
def test_other_messages_wait_for_other_ranks_as_before(
    change: Change, ranks: int, vgg19: Recording
) -> None:
    """`no_stragglers` then still removes this waiting. Before, it was shortened or left out."""
    from synthetic_cluster import cluster

    base = vgg19.base
    waits_s = sum(base.waits_s.values())
    question = Question(cluster=cluster((ranks, 1e5), (ranks, 1e5)))
    after = change(base, question)
    assert after.waits_s == base.waits_s and waits_s > 5e-4
    for op, wait_s in base.waits_s.items():
        assert after.duration_s[op] > wait_s
    together = no_stragglers(after, question)
    assert after.duration_s.sum() - together.duration_s.sum() == pytest.approx(waits_s)


@pytest.mark.parametrize(
    "change", [distributed, fp16_gradients, deep_gradient_compression, blueconnect]
)
def test_collectives_of_a_part_of_the_ranks_have_no_time_on_the_cluster(
    change: Change, vgg19: Recording
) -> None:
    """Each was priced as one of all ranks. Changes of anything else still apply."""
    from synthetic_cluster import cluster

    base = vgg19.base
    assert (base.groups, base.world_size) == (((0, 1),), 2)
    question = Question(cluster=cluster((2, 1e5), (2, 1e5)))
    hybrid = replace(base, groups=((0, 1), (0, 2)), world_size=4)
    with pytest.raises(InvalidInput, match="of the ranks 0-1 and 0, 2 of 4 ranks"):
        change(hybrid, question)
    assert no_stragglers(hybrid, question).duration_s.sum() < base.duration_s.sum()


def test_sixteen_bits_of_one_worker_only_cost_their_rounding(vgg19: Recording) -> None:
    base = vgg19.base
    after = fp16_gradients(base, Question(cluster=Cluster.local(1)))
    assert (after.duration_s >= base.duration_s).all() and np.isfinite(after.duration_s).all()


def test_tables_of_placements_have_equal_clusters_and_the_model_its_parameters() -> None:
    rows = [Row(name, 4, step_s) for name, step_s in (("12", 1.0), ("21", 1.2), ("12", 1.1))]
    assert noise([*rows, Row("44", 4, 9.0)]) == pytest.approx((0.1 / 1.1 + 0.1 / 1.1) / 3)
    assert workload_of("cifar10").grad_bytes == 4 * 11_173_962
    assert [host.devices for host in on_hosts("134", 1e9, 1e-5).hosts] == [1, 3, 4]
