"""The messages of two ranks follow from the recording of one rank."""

from __future__ import annotations

import pytest

from autotune.profiling.traces.job import read_job
from autotune.whatif.changes.distributed import distributed
from autotune.whatif.gradients import gradients_of
from autotune.whatif.question import Question
from autotune.whatif.recorded import recorded_base
from benchmarks.repository import ROOT
from benchmarks.whatif_truth.messages import predicted_messages, recorded_messages

H100 = ROOT / "datasets" / "gpu_traces" / "h100"


@pytest.mark.parametrize("model", ["resnet50", "vgg19"])
def test_messages_have_the_recorded_number_bytes_order_and_kernels(model: str) -> None:
    """With buffers, which are broadcast before the forward pass, and without."""
    predicted = predicted_messages(H100 / f"{model}.fp32")
    assert predicted == recorded_messages(H100 / f"{model}.two_ranks")
    assert ("broadcast" in {one.collective for one in predicted}) == (model == "resnet50")


def test_a_recorded_step_of_ddp_keeps_its_own_copies() -> None:
    """Only messages and their issues are new, since every gradient is already packed."""
    from synthetic_cluster import cluster

    folder = H100 / "vgg19.fp32"
    job = read_job([folder])
    base = recorded_base(job, 0)
    gradients = gradients_of(job, 0, base)
    question = Question(cluster=cluster((1, 1e5), (1, 1e5)), gradients=gradients)
    changed = distributed(base, question)
    new = changed.names.ops[base.ops :]
    assert sum(name.startswith("all_reduce") for name in new) == 6
    assert not any("pack" in name for name in new)
    assert any("measured on an H100" in note for note in changed.notes)
