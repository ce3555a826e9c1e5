"""Host and device work belongs to module instances, with and without frames and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from synthetic_traces import Event, span
from test_trace_graph import job_of, kernel, mark

from autotune.profiling.graph.traced_steps import TracedSteps

EVALUATE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"


@dataclass
class Script:
    """A training that is written down operator by operator, each with a kernel of its own.

    `numbered`: whether sequence numbers are recorded.
    """

    numbered: bool = True
    events: list[Event] = field(default_factory=list)
    now: float = 0.0
    sequence: int = 100
    launches: int = 0

    def op(self, name: str, *, node: bool = True, kernels: int = 1, tid: int = 1) -> int:
        """An operator of the forward pass or the optimizer; the number of its node."""
        number = self.sequence
        args = {"Sequence number": number} if self.numbered else {}
        self._span(f"aten::{name}", f"k {name}", kernels, tid, args)
        self.sequence += node
        return number

    def node(
        self, name: str, number: int, *, gradients: int = 0, inner: tuple[str, ...] = ()
    ) -> None:
        args: dict[str, Any] = {"Sequence number": number} if self.numbered and number >= 0 else {}
        begun = self.now
        self.now += 1
        for one in inner:
            self.op(one, tid=2)
        self._span(f"{name}Backward0", f"k {name}Backward0", 1, 2, args)
        self.events.append(span(f"{EVALUATE}{name}Backward0", begun, self.now - begun, 2, **args))
        for _ in range(gradients):
            begun = self.now
            self._span(ACCUMULATE, "k accumulate", 1, 2, {})
            self.events.append(span(f"{EVALUATE}{ACCUMULATE}", begun, self.now - begun, 2))

    def _span(
        self, name: str, kernel_name: str, kernels: int, tid: int, args: dict[str, Any]
    ) -> None:
        length = 4.0 + 4 * kernels
        self.events.append(span(name, self.now, length, tid, **args))
        for place in range(kernels):
            at = self.now + 1 + 4 * place
            self.launches += 1
            ids = {"correlation": self.launches}
            call = span("cudaLaunchKernel", at, 2, tid, "cuda_runtime", **ids)
            self.events += [call, kernel(kernel_name, at + 1, 2, self.launches)]
        self.now += length + 2

    def step(self, number: int, begun: float) -> None:
        self.events.append(mark(f"ProfilerStep#{number}", begun, self.now - begun))
        self.now += 5

    def layers(self, *, step: int = 0) -> list[tuple[str, str]]:
        """(name, layer) of each device op of a step, in order."""
        events = sorted(self.events, key=lambda event: (event["ts"], -event["dur"]))
        job = job_of(events)
        ops = TracedSteps(job).rank_ops(0, step).ops
        found = [op for op in ops if job.ranks[0].lanes[op.lane].device]
        return [(op.name.removeprefix("k "), op.layer) for op in found]


def conv_net(script: Script, *, numbers: tuple[int, ...] | None = None) -> Script:
    """Two convolutions with normalization and relu, a residual and a linear layer."""
    numbers = tuple(
        script.op(name)
        for name in ("conv2d", "batch_norm", "relu_", "conv2d", "batch_norm", "add_", "relu_")
    )
    script.op("t", kernels=0)
    weight, linear = script.sequence - 1, script.op("addmm")
    loss = script.op("nll_loss")
    script.node("NllLoss", loss)
    script.node("Addmm", linear, gradients=1)
    script.node("T", weight, gradients=1)
    classes = ("Relu", "Add", "BatchNorm", "Conv2D", "Relu", "BatchNorm", "Conv2D")
    for name, number in zip(classes, reversed(numbers), strict=True):
        script.node(name, number, gradients={"BatchNorm": 2, "Conv2D": 1}.get(name, 0))
    return script


FORWARD = [
    ("conv2d", "conv_0"),
    ("batch_norm", "batch_norm_0"),
    ("relu_", "batch_norm_0"),
    ("conv2d", "conv_1"),
    ("batch_norm", "batch_norm_1"),
    ("add_", "batch_norm_1"),
    ("relu_", "batch_norm_1"),
    ("addmm", "linear_0"),
    ("nll_loss", "linear_0"),
]
BACKWARD = [
    ("NllLossBackward0", "linear_0"),
    ("AddmmBackward0", "linear_0"),
    ("accumulate", "linear_0"),
    ("TBackward0", "linear_0"),
    ("accumulate", "linear_0"),
    ("ReluBackward0", "batch_norm_1"),
    ("AddBackward0", "batch_norm_1"),
    ("BatchNormBackward0", "batch_norm_1"),
    ("accumulate", "batch_norm_1"),
    ("accumulate", "batch_norm_1"),
    ("Conv2DBackward0", "conv_1"),
    ("accumulate", "conv_1"),
    ("ReluBackward0", "batch_norm_0"),
    ("BatchNormBackward0", "batch_norm_0"),
    ("accumulate", "batch_norm_0"),
    ("accumulate", "batch_norm_0"),
    ("Conv2DBackward0", "conv_0"),
    ("accumulate", "conv_0"),
]


@pytest.mark.parametrize("numbered", [True, False])
def test_operators_with_parameters_are_instances_and_others_follow(numbered: bool) -> None:
    assert conv_net(Script(numbered)).layers() == FORWARD + BACKWARD


def test_accumulated_gradients_show_parameters_of_any_operator() -> None:
    script = Script()
    embedding, scaled = script.op("embedding"), script.op("mul")
    script.node("Mul", scaled, gradients=1)
    script.node("Embedding", embedding, gradients=1)
    assert script.layers()[:2] == [("embedding", "embedding_0"), ("mul", "mul_0")]


def test_a_matrix_product_has_parameters_if_its_prepared_operand_has() -> None:
    """Without a bias the gradient follows the node of the transposed weight."""
    script = Script()
    script.op("linear")
    weight, product = script.op("t", kernels=0), script.op("mm")
    scores = script.op("bmm")
    script.node("Bmm", scores)
    script.node("Mm", product)
    script.node("T", weight, gradients=1)
    layers = dict(script.layers())
    assert (layers["linear"], layers["mm"], layers["bmm"]) == ("linear_0", "linear_1", "linear_1")
    assert layers["TBackward0"] == "linear_1"


def test_an_operator_without_a_node_leaves_its_number_to_the_next_one() -> None:
    """Batch normalization counts its batches with an operator that has no gradient."""
    script = Script()
    convolution = script.op("conv2d")
    script.op("add_", node=False)
    norm = script.op("batch_norm")
    script.node("BatchNorm", norm, gradients=2)
    script.node("Conv2D", convolution, gradients=1)
    layers = dict(script.layers())
    assert layers["BatchNormBackward0"] == "batch_norm_0"
    assert layers["Conv2DBackward0"] == "conv_0"


def test_micro_batches_repeat_the_same_instances() -> None:
    script = Script()
    conv_net(conv_net(script))
    assert script.layers() == 2 * (FORWARD + BACKWARD)


def test_another_model_in_a_step_has_instances_of_its_own() -> None:
    script = conv_net(Script())
    number = script.op("conv2d")
    script.node("Conv2D", number, gradients=1)
    own = ("conv2d", "Conv2DBackward0", "accumulate")
    assert script.layers()[-3:] == [(name, "conv_2") for name in own]


def test_recomputed_operators_belong_to_the_instances_that_they_repeat() -> None:
    script = Script()
    numbers = [script.op(name) for name in ("conv2d", "batch_norm", "relu_", "conv2d", "relu_")]
    again = ("conv2d", "batch_norm", "relu_", "conv2d")
    script.node("Relu", numbers[4], inner=again)
    found = script.layers()
    place = [name for name, _ in found].index("relu_", 5)
    assert found[place - 2 : place + 3] == [
        ("conv2d", "conv_0"),
        ("batch_norm", "batch_norm_0"),
        ("relu_", "batch_norm_0"),
        ("conv2d", "conv_1"),
        ("ReluBackward0", "conv_1"),
    ]


def test_an_optimizer_that_updates_one_by_one_follows_the_first_use() -> None:
    script = conv_net(Script())
    begun = script.now
    for _ in range(8):
        script.op("mul_", node=False)
        script.op("add_", node=False)
    script.events.append(mark("Optimizer.step#SGD.step", begun, script.now - begun))
    updates = script.layers()[-16:]
    assert [layer for _, layer in updates[::2]] == [layer for _, layer in updates[1::2]]
    assert [layer for _, layer in updates[::2]] == [
        "conv_0",
        *["batch_norm_0"] * 2,
        "conv_1",
        *["batch_norm_1"] * 2,
        *["linear_0"] * 2,
    ]


def test_an_optimizer_for_all_parameters_at_once_belongs_to_no_layer() -> None:
    script = conv_net(Script())
    script.op("_foreach_add_", node=False)
    assert script.layers()[-1] == ("_foreach_add_", "")


def test_an_annotation_around_the_whole_pass_is_no_layer() -> None:
    script = conv_net(Script())
    script.events.append(mark("training step", 0, script.now))
    assert script.layers() == FORWARD + BACKWARD


def test_annotations_around_parts_name_the_layers() -> None:
    script = Script()
    numbers = []
    for block in ("stem", "head"):
        begun = script.now
        numbers += [script.op("conv2d"), script.op("conv2d")]
        script.events.append(mark(block, begun, script.now - begun))
    for number in reversed(numbers):
        script.node("Conv2D", number)
    assert [layer for _, layer in script.layers()] == ["stem"] * 2 + ["head"] * 4 + ["stem"] * 2


def test_every_step_counts_its_instances_anew() -> None:
    script = Script()
    for step in range(2):
        begun = script.now
        conv_net(script)
        script.step(step, begun)
    assert script.layers(step=1) == FORWARD + BACKWARD
