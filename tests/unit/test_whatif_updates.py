"""Steps that update several times: iterations in one step of the profiler, and a GAN's models."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from synthetic_cluster import cluster
from test_gradients import with_shapes
from test_layers import Script
from test_trace_graph import job_of, mark

from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.changes.batch import accumulate
from autotune.whatif.changes.distributed import distributed
from autotune.whatif.changes.optimizer import for_each_optimizer, foreach_optimizer, fused_adam
from autotune.whatif.changes.p3 import p3
from autotune.whatif.changes.precision import amp_fp16
from autotune.whatif.messages.ddp_buckets import buckets_of
from autotune.whatif.question import Gradient, Question
from autotune.whatif.recording.gradients import gradients_of
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.registry import Change


def train(script: Script, *, linear_only: bool = False) -> None:
    """A forward and a backward pass of a convolution and a linear layer, or of the latter."""
    convolution = None if linear_only else script.op("conv2d")
    linear = script.op("addmm")
    script.node("Addmm", linear, gradients=2)
    if convolution is not None:
        script.node("Conv2D", convolution, gradients=1)


def update(script: Script, optimizer: str) -> None:
    begun = script.now
    script.op("mul_", node=False)
    script.op("add_", node=False)
    script.events.append(mark(f"Optimizer.step#{optimizer}.step", begun, script.now - begun))


def recorded(kind: str) -> tuple[Base, tuple[Gradient, ...]]:
    """Three steps of a GAN, or of two iterations each, of which each accumulates two batches."""
    script = Script()
    for step in range(3):
        begun = script.now
        if kind == "gan":
            train(script, linear_only=True)
            update(script, "Adam")
            train(script)
            update(script, "Adam")
        else:
            for _ in range(2):
                train(script)
                train(script)
                update(script, "SGD")
        script.step(step, begun)
    sizes = [[10, 32], [10], [10, 32], [10], [32, 3, 3, 3]]
    events = with_shapes(script.events, [10])
    if kind == "gan":
        shapes = iter(sizes * 3)
        for event in events:
            if "Input Dims" in event["args"]:
                event["args"]["Input Dims"] = [next(shapes)]
    job = job_of(events)
    base = recorded_base(job, 0)
    gradients = gradients_of(job, 0, base)
    assert gradients is not None
    return base, gradients


def kernels(base: Base) -> list[str]:
    return [base.names.ops[op] for op in base.launched.tolist()]


@pytest.mark.parametrize(("kind", "counts"), [("gan", [2, 3]), ("iterations", [3, 3])])
def test_the_gradients_of_each_update_are_apart(kind: str, counts: list[int]) -> None:
    """Iterations counted as batches that accumulate: half of the gradients were not sent."""
    base, gradients = recorded(kind)
    groups = [0] * counts[0] + [1] * counts[1]
    assert [one.updates_before for one in gradients] == groups
    names = kernels(base)
    second = names.index("k add_") + 1
    updates = [names.index("k mul_"), names.index("k mul_", second)]
    launched = base.launched.tolist()
    assert [launched.index(one.update) for one in gradients] == [updates[n] for n in groups]
    for one in gradients:
        assert launched.index(one.read) < launched.index(one.ready) < launched.index(one.update)
    assert [len(bucket.positions) for bucket in buckets_of(gradients)] == counts


@pytest.mark.parametrize("kind", ["gan", "iterations"])
@pytest.mark.parametrize("change", [fused_adam, foreach_optimizer])
def test_each_update_becomes_one_kernel_and_the_passes_stay(change: Change, kind: str) -> None:
    """Whatever lay between the first and the last update of a step went, too."""
    base, _ = recorded(kind)
    before, after = (Counter(kernels(one)) for one in (base, change(base, Question())))
    assert before["k mul_"] == before["k add_"] == after["k mul_"] == 2
    assert before - after == Counter({"k add_": 2})


@pytest.mark.parametrize("kind", ["gan", "iterations"])
def test_each_update_waits_for_its_own_messages(kind: str) -> None:
    base, gradients = recorded(kind)
    on = cluster((1, 1000.0), (1, 1000.0))
    names = kernels(distributed(base, Question(cluster=on, gradients=gradients)))
    order = ["unpack bucket 0", "k mul_", "unpack bucket 1"]
    places = [names.index(name) for name in order]
    assert places == sorted(places)
    assert places[-1] < names.index("k mul_", places[1] + 1)


def test_a_gradient_scaler_reads_the_gradients_before_each_update() -> None:
    """One read before the first update would wait for the second backward pass: a cycle."""
    base, gradients = recorded("gan")
    scaled = amp_fp16(replace(base, device="Tesla T4"), Question(gradients=gradients))
    names = kernels(scaled)
    assert len(scaled.order) == scaled.ops
    assert names.count("unscale") == 2
    assert names.index("unscale") < names.index("k mul_")


def test_what_needs_one_update_in_a_step_is_refused() -> None:
    base, gradients = recorded("gan")
    question = Question(cluster=cluster((1, 1000.0), (1, 1000.0)), gradients=gradients)
    for change in (for_each_optimizer, accumulate, p3):
        with pytest.raises(InvalidInput, match=r"prof\.step\(\) after every update"):
            change(base, question)
