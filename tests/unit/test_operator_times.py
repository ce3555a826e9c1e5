"""`kernel_times` with times measured on this machine: each distinct operator and shape once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import json_output
from layered_training import MUL_KERNEL, Work, conv, layered

import autotune.whatif.changes.all  # noqa: F401
from autotune.errors import InvalidInput
from autotune.jobs.fused_times import recorded_options, updated_shapes, write_fused_times
from autotune.jobs.half_times import cast_times, half_times, write_half_times
from autotune.jobs.operator_times import (
    MeasuredOperator,
    measured_operators,
    measuring_device,
    working_operators,
    write_operator_times,
)
from autotune.profiling.traces.job import read_job
from autotune.whatif.answers.predict import Prediction, predict
from autotune.whatif.base import Base
from autotune.whatif.changes.kernel_times import inputs_text
from autotune.whatif.question import Question
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.registry import combined
from runtime_rewriter.probe.operators import (
    MOST_REPEATS,
    ROUNDS,
    WARM_UP,
    Invocation,
    operator_times,
    queued_s,
)
from runtime_rewriter.pytorch.exchange.device import Device

RECURRENT = ((8, 4, 16), (64, 16), (64, 16), (64,), (64,), (4, 16), (4, 16))
"""Input, weights, biases and states of an LSTM layer of torch, over 8 positions."""
FORWARD_VALUES = ("False", "[]", "2", "16", "1", "True", "False", "False", "True")
BACKWARD_VALUES = ("False", "2", "16", "1", "True", "True", "False", "[]", "False")


def literals(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("ScalarList" if value == "[]" else "Scalar" for value in values)


def record(path: Path, batch: int = 2) -> Path:
    """Record steps of a small convolutional model on the CPU."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.rand(batch, 3, 8, 8)).sum().backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return path


@pytest.fixture(scope="module")
def cpu_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("trace") / "rank0.json")


@pytest.fixture(scope="module")
def cpu_base(cpu_trace: Path) -> Base:
    return recorded_base(read_job(cpu_trace), 0)


def test_the_command_measures_writes_and_predicts(
    cpu_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = tmp_path / "times.csv"
    words = ("what-if", cpu_trace, "--only", "fused_adam_cpu", "--measure", times)
    data = json_output(capsys, *words, "--measure-time", "30s")
    (row,) = [row for row in data["what_ifs"] if row["what_if"] == f"kernel_times={times}"]
    assert row["speedup"] > 0
    assert times.read_text().startswith("operator,inputs,seconds\naten::")
    assert any("operators were timed on this machine" in note for note in data["notes"])
    half = times.with_suffix(".bf16.csv")
    fused = times.with_suffix(".fused.csv")
    for what_if in (f"amp_cpu={half}", f"fused_adam_cpu={fused}"):
        (row,) = [row for row in data["what_ifs"] if row["what_if"] == what_if]
        assert row["speedup"] > 0
    assert any("the step of SGD takes" in note for note in data["notes"])


def test_operators_of_a_trace_are_timed_and_predict_its_step(
    cpu_base: Base, tmp_path: Path
) -> None:
    measured = list(measured_operators(cpu_base, device="cpu"))
    timed = {one.operator.name for one in measured if one.seconds is not None}
    assert {"aten::mkldnn_convolution", "aten::addmm", "aten::clamp_min"} <= timed
    reasons = {one.operator.name: one.reason for one in measured if one.seconds is None}
    assert "it calls aten::convolution" in reasons["aten::conv2d"]
    assert "is no operator of torch" in reasons["ConvolutionBackward0"]
    path = tmp_path / "times.csv"
    assert write_operator_times(path, measured) == len(
        {
            (
                one.operator.name,
                one.operator.inputs and (one.operator.inputs.dims, one.operator.inputs.types),
            )
            for one in measured
            if one.seconds is not None
        }
    )
    found = predict(cpu_base, combined("kernel_times"), Question(files={"kernel_times": str(path)}))
    assert 0 < found.after_s < 1


def test_the_parameters_of_an_optimizer_are_what_its_step_changes_in_place(
    cpu_base: Base, tmp_path: Path
) -> None:
    own = [one for one in cpu_base.names.operators if one.optimizer == "SGD"]
    assert updated_shapes(own) == ((4,), (4, 3, 3, 3), (5,), (5, 144))
    assert recorded_options("SGD", own) == {"foreach": False, "weight_decay": 0.0, "momentum": 0.0}
    buffers = [*own, *(replace(one, name="aten::mul_") for one in own)]
    assert recorded_options("SGD", buffers)["momentum"] > 0
    with pytest.raises(InvalidInput, match="it needs one of Adagrad, Adam, AdamW, SGD, not fused"):
        write_fused_times(tmp_path / "times.csv", [])


def test_a_spent_budget_and_unknown_inputs_are_reasons(tmp_path: Path) -> None:
    base = recorded_base(layered([conv(1), Work("aten::neg", MUL_KERNEL)]), 0)
    timed = measured_operators(base, device="cpu", budget_s=-1)
    measured = {one.operator.name: one for one in timed}
    assert "was spent before" in measured["aten::cudnn_convolution"].reason
    assert "inputs are unknown" in measured["aten::neg"].reason
    with pytest.raises(InvalidInput, match="no operator could be timed: the budget"):
        write_operator_times(tmp_path / "times.csv", list(measured.values()))
    with pytest.raises(InvalidInput, match="record_shapes=True"):
        working_operators(recorded_base(layered([Work("aten::neg", MUL_KERNEL)]), 0))
    with pytest.raises(InvalidInput, match="record host events"):
        working_operators(recorded_base(layered([Work("", "gemm")]), 0))


def test_the_rank_that_is_predicted_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 takes longer, with other shapes: times of rank 0 would select nothing there."""
    folder, times = tmp_path / "traces", tmp_path / "times.csv"
    folder.mkdir()
    begun_us: list[float] = []
    for rank, batch in enumerate((2, 4000)):
        path = record(folder / f"rank{rank}.json", batch)
        trace = json.loads(path.read_text())
        trace["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": 2}
        timed = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        begun_us.append(min(event["ts"] for event in timed))
        for event in timed:  # both ranks train at the same time
            event["ts"] += begun_us[0] - begun_us[rank]
        path.write_text(json.dumps(trace))
    words = ("what-if", folder, "--only", "fused_adam_cpu", "--measure", times)
    data = json_output(capsys, *words, "--measure-time", "10s")
    (row,) = [row for row in data["what_ifs"] if row["what_if"] == f"kernel_times={times}"]
    assert data["rank"] == 1 and row["speedup"] > 0
    assert "float[4000x3x8x8]" in times.read_text()


def test_operators_are_timed_on_a_device_like_that_of_the_trace(cpu_base: Base) -> None:
    """Times of the two kinds of device were mixed where the machine has a GPU."""
    assert measuring_device(cpu_base) == "cpu"
    on_device = recorded_base(layered([conv(1)]), 0)
    if torch.cuda.is_available():
        assert measuring_device(on_device) == "cuda"
    else:
        with pytest.raises(InvalidInput, match="torch finds none on this machine"):
            list(measured_operators(on_device))


def test_calls_are_queued_in_rounds_behind_a_warm_up() -> None:
    calls: list[int] = []
    assert queued_s(lambda: calls.append(1), Device(torch.device("cpu"))) > 0
    in_rounds = len(calls) - WARM_UP - 1  # one call shows how many fit
    assert in_rounds % ROUNDS == 0 and ROUNDS <= in_rounds <= ROUNDS * MOST_REPEATS


def test_operators_with_the_longest_time_come_first(tmp_path: Path) -> None:
    short, long = conv(1, 10.0), Work("aten::mm", "gemm", 90.0, ((4, 4), (4, 4)), sequence=1)
    base = recorded_base(layered([short, long]), 0)
    assert [one.name for one in working_operators(base)] == ["aten::mm", "aten::cudnn_convolution"]
    operator = next(iter(working_operators(base)))
    twice = [MeasuredOperator(operator, seconds, 1.0) for seconds in (1e-3, 3e-3)]
    path = tmp_path / "times.csv"
    assert write_operator_times(path, twice) == 1
    asked = Question(files={"kernel_times": str(path)})
    found = predict(base, combined("kernel_times"), asked)
    assert found.after_s == pytest.approx(2e-3 + 10e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("invocation", "reason"),
    [
        (Invocation("aten::nothing", (), ()), "is no operator of torch"),
        (Invocation("MulBackward0", (), ()), "is no operator of torch"),
        (Invocation("aten::mm", ((2, 3), (2, 3)), ("float", "float")), "mat1"),
        (Invocation("aten::mm", ((2, 3),), ("float",)), "no overload"),
        (Invocation("aten::sum", ((2, 3), ()), ("float", "TensorList")), "without its value"),
        (Invocation("aten::neg", ((2**20, 2**20),), ("float",)), "at most"),
        (
            Invocation("aten::add", ((2,), (2,), ()), ("float", "float", "Scalar"), ("", "", "x(")),
            "is unknown",
        ),
    ],
)
def test_what_cannot_be_called_has_a_reason(invocation: Invocation, reason: str) -> None:
    (found,) = operator_times([invocation], "cpu", 10.0)
    assert found.seconds is None
    assert reason in found.reason


@pytest.mark.parametrize(
    "invocation",
    [
        Invocation("aten::mm", ((2, 3), (3, 2)), ("float", "float")),
        Invocation(
            "aten::index_select", ((9, 4), (), (3,)), ("float", "Scalar", "long int"), ("", "0", "")
        ),
        Invocation("aten::add_", ((4,), (4,), ()), ("float", "float", "Scalar"), ("", "", "1")),
        Invocation("aten::gelu", ((4,),), ("c10::BFloat16",)),
        Invocation(  # it adds its biases by an operator of its own
            "aten::mkldnn_rnn_layer",
            (*RECURRENT, *((),) * 9),
            (*("float",) * 7, *literals(FORWARD_VALUES)),
            (*("",) * 7, *FORWARD_VALUES),
        ),
        Invocation(  # as recorded: without gradients of the states, with a workspace
            "aten::mkldnn_rnn_layer_backward",
            (*RECURRENT, RECURRENT[0], (4, 16), (4, 16), RECURRENT[0], *((),) * 11, (4096,)),
            (*("float",) * 11, "", "", *literals(BACKWARD_VALUES), "unsigned char"),
            (*("",) * 13, *BACKWARD_VALUES, ""),
        ),
    ],
)
def test_tensors_and_written_values_make_a_call(invocation: Invocation) -> None:
    (found,) = operator_times([invocation], "cpu", 10.0)
    assert found.seconds is not None, found.reason


def test_autocast_takes_the_times_that_were_measured(cpu_base: Base, tmp_path: Path) -> None:
    # A disturbed recording makes some operators long, and so the others too short a share.
    measured = list(half_times(cpu_base, budget_s=30.0, least_share=0.0))
    names = {one.operator.name for one in measured}
    assert {"aten::addmm", "aten::clamp_min"} <= names
    # Without AVX-512 or AMX, oneDNN has no kernels of bfloat16: there is nothing to measure.
    assert ("aten::mkldnn_convolution" in names) is torch.ops.mkldnn._is_mkldnn_bf16_supported()
    casts = list(cast_times(cpu_base, budget_s=30.0))
    # the batch, weights and biases; the ReLU reads and writes bfloat16
    assert {one.dims for one in casts} == {(2, 3, 8, 8), (4, 3, 3, 3), (4,), (5, 144), (5,)}
    path = tmp_path / "times.bf16.csv"

    def predicted(share: float, cast_s: float) -> Prediction:
        faster = [replace(one, half_s=share * one.single_s) for one in measured]
        costs = [replace(one, forward_s=cast_s, backward_s=cast_s) for one in casts]
        distinct = {(one.operator.name, inputs_text(one.operator)) for one in faster}
        assert write_half_times(path, faster, costs) == len(distinct) + len(costs)
        return predict(cpu_base, combined("amp_cpu"), Question(files={"amp_cpu": str(path)}))

    known, same, cast = predicted(0.1, 1e-9), predicted(1.0, 1e-9), predicted(1.0, 1e-3)
    assert known.after_s < same.after_s
    # five casts forward; the batch has no gradient
    assert cast.after_s - same.after_s == pytest.approx(9e-3, rel=1e-3)
    guessed = predict(cpu_base, combined("amp_cpu"), Question())
    assert known.speedup_high - known.speedup_low <= guessed.speedup_high - guessed.speedup_low
    assert any("measure it with --measure" in note for note in guessed.base.notes)
    for text, message in (
        ("operator,inputs,float32_s,bfloat16_s\naten::addmm,x,1,-1\n", "line 2: seconds must be"),
        ("operator,seconds\n", "needs the columns operator, inputs, float32_s, bfloat16_s"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidInput, match=message):
            predict(cpu_base, combined("amp_cpu"), Question(files={"amp_cpu": str(path)}))
