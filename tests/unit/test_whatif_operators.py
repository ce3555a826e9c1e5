"""Ops belong to the operators that launch them, with the shapes of their inputs."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from periodic_training import training
from synthetic_traces import Event, span

from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.formats.op_inputs import OpInputs, op_inputs
from autotune.profiling.traces.job import assemble
from autotune.whatif.primitives import insert, select
from autotune.whatif.recording.recorded import recorded_base


def external(number: int) -> dict[str, Any]:
    return {"External id": number}


def convolution_steps() -> list[Event]:
    """Three steps: an operator calls another one, which launches a kernel."""
    events: list[Event] = []
    for step in range(3):
        now, number = 1000.0 * step, step + 1
        shapes: Any = {
            "Input Dims": [[8, 3, 32, 32], [4, 3, 3, 3], []],
            "Input type": ["float"] * 3,
        }
        events += [
            span(f"ProfilerStep#{step}", now, 900, cat="user_annotation"),
            span("aten::conv2d", now + 5, 100, **external(10 * number)),
            span("aten::cudnn_convolution", now + 10, 80, **shapes, **external(11 * number)),
            span(
                "cudaLaunchKernel",
                now + 20,
                5,
                cat="cuda_runtime",
                correlation=number,
                **external(11 * number),
            ),
            {
                **span(
                    "implicit_gemm",
                    now + 30,
                    300,
                    7,
                    "kernel",
                    stream=7,
                    device=0,
                    correlation=number,
                    **external(11 * number),
                ),
                "pid": 0,
            },
        ]
    return events


def test_a_kernel_belongs_to_the_innermost_operator_around_its_launch() -> None:
    text = json.dumps({"traceEvents": convolution_steps()}).encode()
    base = recorded_base(assemble([read_kineto(BytesIO(text).read, "rank0.json")]), 0)
    (kernel,) = base.on_device.nonzero()[0]
    operator = base.names.operators[base.operator[kernel]]
    assert (operator.name, operator.around) == ("aten::cudnn_convolution", ("aten::conv2d",))
    assert operator.inputs is not None
    assert operator.inputs.dims == ((8, 3, 32, 32), (4, 3, 3, 3), ())
    (call,) = select(base, name="cudaLaunchKernel").nonzero()[0][:1]
    assert base.names.operators[base.operator[call]] == operator


def test_without_external_ids_the_call_that_launches_a_kernel_states_its_operator() -> None:
    base = recorded_base(training(20, 100), 0)
    kernels = np.flatnonzero(base.on_device)
    operators = [base.names.operators[base.operator[kernel]].name for kernel in kernels]
    assert operators == [
        f"aten::{base.names.ops[one].replace('gemm', 'linear')}" for one in kernels
    ]
    grown = insert(base, base.launched[:1], base.duration_s[:1], ["more"], base.kind[0])
    assert len(grown.operator) == grown.ops


@pytest.mark.parametrize(
    "dims",
    [None, "text", [], [[]], [["a"]], [[-1]], [[2**50]], [[1] * 17], [[1]] * 65, [[True]], [[1.5]]],
)
def test_implausible_shapes_are_no_shapes(dims: Any) -> None:
    assert op_inputs({"Input Dims": dims}) is None


def test_values_are_kept_as_written() -> None:
    args = {
        "Input Dims": [[2, 3], [[1], [2]]],
        "Input type": ["float", "TensorList"],
        "Concrete Inputs": ["", "[1, 1]"],
    }
    expected = OpInputs(((2, 3), ()), ("float", "TensorList"), ("", "[1, 1]"))
    assert op_inputs(args) == expected
    odd = op_inputs({"Input Dims": [[2]], "Input type": "float"})
    assert odd == OpInputs(((2,),), ("",), ("",))
