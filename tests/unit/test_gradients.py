"""Gradients of a trace: sizes are known or refused, and ops are where they are made and used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_traces import Event
from test_layers import ACCUMULATE, Script
from test_trace_graph import job_of, mark

from autotune.errors import InvalidInput
from autotune.profiling.traces.job import TraceJob
from autotune.whatif.messages.ddp_buckets import buckets_of
from autotune.whatif.question import Gradient
from autotune.whatif.recording.gradients import gradients_of
from autotune.whatif.recording.recorded import recorded_base

SHAPES = [[10, 32], [32, 3, 3, 3]]
"""The gradients of the weights, in the order of the backward pass."""


def training(
    *,
    shapes: bool = True,
    one_by_one: bool = False,
    batches: int = 1,
    first: Sequence[int] = (10,),
    types: Sequence[str] = ("float",) * 3,
) -> TraceJob:
    """Three steps of a convolution and a linear layer with SGD.

    `first`: the bias's shape. `types`: of the gradients, in the order of the backward pass.
    """
    script = Script()
    for step in range(3):
        begun = script.now
        for _ in range(batches):
            convolution = script.op("conv2d")
            script.op("t", kernels=0)
            weight, linear = script.sequence - 1, script.op("addmm")
            script.node("Addmm", linear, gradients=1)
            script.node("T", weight, gradients=1)
            script.node("Conv2D", convolution, gradients=1)
        updated = script.now
        for _ in range(3 if one_by_one else 1):
            script.op("mul_", node=False)
            script.op("add_", node=False)
        script.events.append(mark("Optimizer.step#SGD.step", updated, script.now - updated))
        script.step(step, begun)
    return job_of(with_shapes(script.events, list(first), types) if shapes else script.events)


def with_shapes(
    events: list[Event], first: list[int], types: Sequence[str] = ("float",) * 3
) -> list[Event]:
    sizes = [first, *SHAPES]
    count = 0
    out = []
    for event in events:
        if event["name"] == ACCUMULATE:
            shape, kind = sizes[count % len(sizes)], types[count % len(sizes)]
            count += 1
            event = event | {"args": {"Input Dims": [shape], "Input type": [kind]}}
        out.append(event)
    return out


def found(job: TraceJob, **options: Any) -> tuple[Gradient, ...] | None:
    return gradients_of(job, 0, recorded_base(job, 0), **options)


def known(job: TraceJob, **options: Any) -> tuple[Gradient, ...]:
    gradients = found(job, **options)
    assert gradients is not None
    return gradients


def embedding(rows: int, looked_up: int, *, shapes: bool = True, twice: bool = False) -> TraceJob:
    """Three steps of an embedding of 16 floats with sparse gradients; its node looks rows up."""
    script = Script()
    for step in range(3):
        begun = script.now
        lookup = script.op("embedding")
        script.node("Embedding", lookup, gradients=1)
        script.step(step, begun)
    told = {
        "Input Dims": [[looked_up, 16], [looked_up], [], [], []],
        "Input type": ["float", "long int", "Scalar", "Scalar", "Scalar"],
        "Concrete Inputs": ["", "", str(rows), "-1", "False"],
    }
    events = []
    for event in script.events:
        if event["name"] == ACCUMULATE:
            inside = event | {
                "name": "aten::embedding_sparse_backward",
                "args": told if shapes else {},
            }
            events += [inside] * (2 if twice else 1)
            event = event | {"args": {"Input Dims": [[rows, 16]], "Input type": ["float"]}}
        events.append(event)
    return job_of(events)


def test_sparse_gradients_are_known_by_the_rows_that_were_looked_up() -> None:
    (table,) = known(embedding(1000, 10))
    assert (table.size_bytes, table.rows_bytes) == (64_000, 10 * (64 + 8))
    (twice,) = known(embedding(1000, 10, twice=True))  # two nodes, one accumulation
    assert twice.rows_bytes == 20 * (64 + 8)
    (few,) = known(embedding(5, 10))  # no more rows than the table has
    assert few.rows_bytes == 5 * (64 + 8)
    assert all(one.rows_bytes is None for one in known(training()))
    with pytest.raises(InvalidInput, match=r"no shapes; record with shapes"):
        known(embedding(1000, 10, shapes=False))


def test_recorded_shapes_give_the_sizes_in_the_order_of_the_backward_pass() -> None:
    gradients = known(training())
    assert [(one.name, one.size_bytes, one.layer) for one in gradients] == [
        ("linear_0.0", 40, "linear_0"),
        ("linear_0.1", 1280, "linear_0"),
        ("conv_0.0", 3456, "conv_0"),
    ]


def test_sizes_that_nothing_states_are_not_guessed() -> None:
    assert found(training(shapes=False)) is None


@pytest.mark.parametrize("batches", [1, 2])
def test_a_gradient_is_completed_by_the_last_batch_and_read_by_the_first(batches: int) -> None:
    job = training(batches=batches)
    base = recorded_base(job, 0)
    gradients = known(job)
    device = base.launched.tolist()
    names = [base.names.ops[op] for op in device]
    last = len(names) - names[::-1].index("k Conv2DBackward0")
    assert [device.index(one.ready) for one in gradients] == [last - 4, last - 2, last]
    first = names.index("k conv2d"), names.index("k addmm")
    assert [device.index(one.read) for one in gradients] == [first[1], first[1], first[0]]


def test_an_optimizer_for_all_reads_every_gradient_with_its_first_op() -> None:
    job = training()
    names = recorded_base(job, 0).names.ops
    updates = {one.update for one in known(job)}
    assert len(updates) == 1
    assert names[updates.pop()] == "k mul_"


def test_an_optimizer_for_each_parameter_reads_one_gradient_at_a_time() -> None:
    job = training(one_by_one=True)
    base = recorded_base(job, 0)
    last, before, first = (one.update for one in known(job))
    assert [base.names.ops[op] for op in (first, before, last)] == ["k mul_"] * 3
    assert first < before < last


def recording(job: TraceJob, names: dict[str, list[int]]) -> TraceJob:
    variables = [{"name": name, "shape": shape} for name, shape in names.items()]
    return replace(job, details={"workload": {"model": "net", "variables": variables}})


@pytest.mark.parametrize("shapes", [True, False])
def test_our_recording_names_the_parameters(shapes: bool) -> None:
    names = {"fc.bias": [10], "fc.weight": [10, 32], "conv.weight": [32, 3, 3, 3]}
    gradients = known(recording(training(shapes=shapes), names))
    assert [one.name for one in gradients] == list(names)
    assert [one.size_bytes for one in gradients] == [40, 1280, 3456]


def test_recorded_shapes_correct_the_order_of_a_recording() -> None:
    names = {"conv.weight": [32, 3, 3, 3], "fc.weight": [10, 32], "fc.bias": [10]}
    gradients = known(recording(training(), names))
    assert [one.name for one in gradients] == ["fc.bias", "fc.weight", "conv.weight"]


def test_a_recording_of_another_model_is_not_taken() -> None:
    assert found(recording(training(shapes=False), {"other.weight": [5]})) is None


def parameters(folder: Path, content: Any) -> Path:
    path = folder / "parameters.json"
    path.write_text(json.dumps(content))
    return path


def test_a_file_of_parameters_gives_names_and_sizes(tmp_path: Path) -> None:
    half = {"shape": [10], "dtype": "float16"}
    content = {"conv.weight": 3456, "fc.weight": [10, 32], "fc.bias": half}
    gradients = known(training(shapes=False), parameters=parameters(tmp_path, content))
    assert [(one.name, one.size_bytes, one.dtype) for one in gradients] == [
        ("fc.bias", 20, "float16"),
        ("fc.weight", 1280, "float32"),
        ("conv.weight", 3456, "float32"),
    ]


def test_gradients_of_another_type_have_buckets_of_their_own() -> None:
    gradients = known(training(types=("float", "c10::BFloat16", "float")))
    assert [one.dtype for one in gradients] == ["float32", "bfloat16", "float32"]
    assert sorted(one.positions for one in buckets_of(gradients)) == [(0, 2), (1,)]


def test_the_type_of_a_gradient_follows_from_what_states_it(tmp_path: Path) -> None:
    """The trace's type counts before that of a recording, and a file's before both."""
    shapes = [("fc.bias", [10]), ("fc.weight", [10, 32]), ("conv.weight", [32, 3, 3, 3])]
    variables = [{"name": name, "shape": shape, "dtype": "float16"} for name, shape in shapes]
    details = {"workload": {"model": "net", "variables": variables}}
    bare = replace(training(shapes=False), details=details)
    assert [one.dtype for one in known(bare)] == ["float16"] * 3
    traced = replace(training(types=("c10::BFloat16",) * 3), details=details)
    assert [one.dtype for one in known(traced)] == ["bfloat16"] * 3
    content = {"c": {"shape": [32, 3, 3, 3], "dtype": "float16"}, "w": 640, "b": 20}
    stated = known(traced, parameters=parameters(tmp_path, content))
    assert [one.dtype for one in stated] == ["bfloat16", "bfloat16", "float16"]


WRONG: dict[str, tuple[Any, str]] = {
    "too few": ({"fc.weight": 5}, "lists 1 and the trace accumulates 3"),
    "another size": (
        {"conv.weight": 3456, "fc.weight": [10, 31], "fc.bias": [10]},
        "'fc.weight' has 1240 bytes and its gradient 1280",
    ),
    "no object": ([5], "must be a JSON object of 1 to"),
    "negative": ({"a": -5, "b": 5, "c": 5}, "'a' must have 1 to"),
    "a word": ({"a": "big", "b": 5, "c": 5}, "'a' must be a number of bytes, a shape"),
    "an extent": ({"a": [10**18], "b": 5, "c": 5}, "must have extents from 0 to"),
    "a type": ({"a": {"shape": [5], "dtype": "int4"}, "b": 5, "c": 5}, "dtype of 'a' must be"),
}


@pytest.mark.parametrize("wrong", sorted(WRONG))
def test_a_wrong_file_of_parameters_is_refused(tmp_path: Path, wrong: str) -> None:
    content, message = WRONG[wrong]
    with pytest.raises(InvalidInput, match=message):
        found(training(), parameters=parameters(tmp_path, content))


def test_a_file_needs_a_trace_that_accumulates_gradients(tmp_path: Path) -> None:
    script = Script()
    for step in range(3):
        begun = script.now
        script.op("conv2d")
        script.step(step, begun)
    job = job_of(script.events)
    with pytest.raises(InvalidInput, match="found by their accumulation"):
        found(job, parameters=parameters(tmp_path, {"conv.weight": 5}))


def test_a_shape_beyond_any_bound_is_unknown() -> None:
    assert found(training(first=[2**60, 5])) is None


def test_a_parameter_may_be_a_single_number() -> None:
    assert known(training(first=[]))[0].size_bytes == 4
