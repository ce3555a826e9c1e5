"""What-ifs of one GPU on invented traces whose answers are known."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from layered_training import (
    ADD_KERNEL,
    IMAGE,
    MAP_BYTES,
    MUL_KERNEL,
    WEIGHT,
    Work,
    conv,
    conv_back,
    layered,
    norm,
    norm_back,
    relu,
    relu_back,
)

import autotune.whatif.changes.all  # noqa: F401
from autotune.dfg.graph import NONE
from autotune.errors import InvalidInput
from autotune.profiling.traces.job import TraceJob
from autotune.whatif.answers.predict import predict
from autotune.whatif.base import Base
from autotune.whatif.changes.elementwise import tensors_touched
from autotune.whatif.changes.kernel_times import KernelTime, inputs_text
from autotune.whatif.question import Question, Reading
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.registry import WHAT_IFS, combined

OTHER = Work("aten::mm", "gemm", 100.0, sequence=900)
BLOCK = [norm(1), relu(1), conv(1), norm(2), relu(2), conv(2)]
BACK = [conv_back(2), relu_back(2), norm_back(2), conv_back(1), relu_back(1), norm_back(1)]


def after_us(job: TraceJob, names: str, question: Question | None = None) -> float:
    base = recorded_base(job, 0)
    return predict(base, combined(names), question or Question()).after_s * 1e6


def changed_us(job: TraceJob, name: str, reading: Reading, **given: object) -> float:
    """The step time in one reading."""
    from autotune.whatif.base import steady

    base = recorded_base(job, 0)
    question = Question(reading=reading, **given)  # type: ignore[arg-type]
    return steady(WHAT_IFS[name].change(base, question)).step_s * 1e6


def refusal(job: TraceJob, name: str, question: Question | None = None) -> str:
    with pytest.raises(InvalidInput) as caught:
        WHAT_IFS[name].change(recorded_base(job, 0), question or Question())
    return str(caught.value)


def test_a_faster_gpu_shortens_kernels_until_the_host_is_the_limit() -> None:
    job = layered([OTHER] * 4)
    assert after_us(job, "faster_gpu") == pytest.approx(200, rel=1e-3)
    four = Question(amounts={"faster_gpu": 4.0})
    assert after_us(job, "faster_gpu", four) == pytest.approx(100, rel=1e-3)
    hundred = Question(amounts={"faster_gpu": 100.0})
    assert after_us(job, "faster_gpu", hundred) == pytest.approx(44, rel=1e-3)
    for amount in (0.0, -1.0, float("nan")):
        text = refusal(job, "faster_gpu", Question(amounts={"faster_gpu": amount}))
        assert "must be above 0" in text


def test_copies_do_not_run_faster_on_a_faster_gpu() -> None:
    job = layered([OTHER] * 4, copy_bytes=100e3)
    assert after_us(job, "faster_gpu") == pytest.approx(300, rel=1e-3)


@pytest.mark.parametrize("waits", [False, True])
def test_without_data_loading_the_device_is_the_limit(waits: bool) -> None:
    job = layered([OTHER] * 4, load_us=1000, waits=waits)
    before_s = predict(recorded_base(job, 0), [], Question()).before_s
    assert before_s * 1e6 >= 1044 - 1
    free = layered([OTHER] * 4, waits=waits)
    free_us = predict(recorded_base(free, 0), [], Question()).before_s * 1e6
    assert after_us(job, "no_data_loading") == pytest.approx(free_us, rel=0.02)
    assert "no data loading" in refusal(free, "no_data_loading")


def test_cuda_graphs_leave_the_device_and_one_launch() -> None:
    """Four kernels of 2 us behind 10 us of host work each: the host is the limit before."""
    job = layered([Work("aten::mm", "gemm", 2.0)] * 4)
    base = recorded_base(job, 0)
    found = predict(base, combined("cuda_graphs"), Question())
    assert found.before_s * 1e6 == pytest.approx(44, rel=1e-3)
    # the launch takes 5 us and 0.2 us per kernel; 4 us lie between two steps
    assert found.after_s * 1e6 == pytest.approx(5 + 4 * 0.2 + 4, rel=1e-3)
    best_us = changed_us(job, "cuda_graphs", Reading.OPTIMISTIC)
    assert best_us == pytest.approx(8, rel=1e-3)  # the device alone


def test_cuda_graphs_keep_the_stream_and_the_device_bound() -> None:
    job = layered([OTHER] * 4)
    assert after_us(job, "cuda_graphs") == pytest.approx(400, rel=1e-3)


def test_a_wait_for_the_device_ends_a_graph() -> None:
    from autotune.whatif.changes.graphs import _captured, _graphs

    middle = layered([Work("aten::mm", "gemm", 2.0)] * 4, waits=True)
    base = recorded_base(middle, 0)
    graphs = list(_graphs(base, _captured(base)))
    assert len(graphs) == 1
    changed = WHAT_IFS["cuda_graphs"].change(base, Question())
    assert "cudaDeviceSynchronize" in changed.names.ops
    assert list(changed.names.ops).count("cudaGraphLaunch") == 1
    assert len(changed.launched) == 1


def test_data_loading_stays_outside_of_graphs() -> None:
    job = layered([Work("aten::mm", "gemm", 2.0)] * 4, load_us=500)
    graph_us = 5 + 4 * 0.2 + 4
    assert after_us(job, "cuda_graphs") == pytest.approx(500 + graph_us, rel=1e-3)
    assert after_us(job, "no_data_loading+cuda_graphs") == pytest.approx(graph_us, rel=1e-3)


def test_cuda_graphs_need_launches() -> None:
    assert "the host launches" in refusal(layered([Work("aten::mm", "")] * 4), "cuda_graphs")


def test_neighbouring_elementwise_kernels_become_one() -> None:
    """Forward: an addition of three tensors, and a product that reads its result and writes one."""
    add = Work("aten::add", ADD_KERNEL, 30.0, (IMAGE, IMAGE), sequence=1)
    mul = Work("aten::mul", MUL_KERNEL, 20.0, (IMAGE, ()), sequence=2)
    job = layered([OTHER, add, mul, OTHER])
    for reading, fixed_us, left_us in (
        (Reading.EXPECTED, 20.0, 10.0),  # the forward pass keeps the inner result
        (Reading.OPTIMISTIC, 20.0, 10.0 * 2 / 3),
        (Reading.PESSIMISTIC, 0.0, 30.0 + 20.0 / 2),
    ):
        fused_us = changed_us(job, "fused_elementwise", reading)
        assert fused_us == pytest.approx(200 + fixed_us + left_us, rel=1e-3)


def test_the_backward_pass_drops_inner_results() -> None:
    node = "MulBackward0"
    add = Work("aten::add", ADD_KERNEL, 30.0, (IMAGE, IMAGE), "AddBackward0", sequence=2)
    mul = Work("aten::mul", MUL_KERNEL, 20.0, (IMAGE, ()), node, sequence=1)
    short = Work("aten::neg", MUL_KERNEL, 3.0, (IMAGE,), node, sequence=3)
    job = layered([OTHER, short, OTHER, add, mul, OTHER])
    fused_us = changed_us(job, "fused_elementwise", Reading.EXPECTED)
    assert fused_us == pytest.approx(303 + 3 + 27 * 2 / 3 + 17 / 2, rel=1e-3)


def test_fusion_removes_the_launches_and_their_operators() -> None:
    add = Work("aten::add", ADD_KERNEL, 2.0, (IMAGE, IMAGE), sequence=1)
    short = Work("aten::mm", "gemm", 2.0, sequence=2)
    job = layered([*[add] * 8, short], host_us=20)
    base = recorded_base(job, 0)
    found = predict(base, combined("fused_elementwise"), Question())
    assert found.before_s * 1e6 == pytest.approx(9 * 20 + 4, rel=1e-3)
    assert found.after_s * 1e6 == pytest.approx(2 * 20 + 4, rel=1e-3)
    assert len(found.base.launched) == 2


@pytest.mark.parametrize(
    "works",
    [
        pytest.param([OTHER, OTHER], id="no elementwise kernel"),
        pytest.param(
            [
                Work("aten::add", ADD_KERNEL, 30.0, (IMAGE, IMAGE), sequence=1),
                Work("aten::add", ADD_KERNEL, 30.0, ((8,), (8,)), sequence=2),
            ],
            id="other sizes",
        ),
        pytest.param(
            [Work("aten::add", ADD_KERNEL, 30.0, sequence=number) for number in (1, 2)],
            id="unknown sizes and one name",
        ),
        pytest.param(
            [Work("aten::add_", ADD_KERNEL, 30.0, (IMAGE, IMAGE), update=True)] * 2, id="optimizer"
        ),
    ],
)
def test_what_does_not_chain_is_not_fused(works: list[Work]) -> None:
    # a matrix product ends the step, so that its last kernel does not neighbour its first one
    job = layered([*works, OTHER])
    assert "no two neighbouring elementwise kernels" in refusal(job, "fused_elementwise")


def test_kernel_names_state_their_tensors() -> None:
    assert tensors_touched(ADD_KERNEL) == 3
    assert tensors_touched(MUL_KERNEL) == 2
    assert tensors_touched("at::detail::Array<char*, 4>") == 4
    assert tensors_touched("elementwise_kernel<FillFunctor<float>>") == 1
    assert tensors_touched("elementwise_kernel<direct_copy_kernel_cuda>") == 2
    assert tensors_touched("elementwise_kernel<>") == 3
    assert tensors_touched("std::array<char*, 0>") == 1


def test_batchnorm_halves_and_its_activations_go() -> None:
    job = layered([*BLOCK, OTHER, *BACK])
    assert after_us(job, "restructured_batchnorm") == pytest.approx(500 + 200, rel=1e-3)
    least_us = changed_us(job, "restructured_batchnorm", Reading.PESSIMISTIC)
    assert least_us == pytest.approx(500 + 4 * 72.5 + 4 * 45, rel=1e-3)


def test_activations_behind_an_addition_stay() -> None:
    add = Work("aten::add", ADD_KERNEL, 100.0, (IMAGE, IMAGE), sequence=300)
    job = layered([norm(1), add, relu(1), conv(1), conv_back(1), relu_back(1), OTHER, norm_back(1)])
    assert after_us(job, "restructured_batchnorm") == pytest.approx(700, rel=1e-3)


def test_batchnorm_is_known_by_its_kernels_without_operators() -> None:
    works = [Work("", "bn_fw_tr_1C11", 100.0), OTHER]
    assert after_us(layered(works), "restructured_batchnorm") == pytest.approx(150, rel=1e-3)
    assert "no batch normalization" in refusal(layered([OTHER]), "restructured_batchnorm")


def policy(folder: Path, text: str) -> Question:
    path = folder / "policy.yaml"
    path.write_text(text)
    return Question(files={"metaflow": str(path)})


def test_a_policy_removes_and_scales_layers(tmp_path: Path) -> None:
    job = layered([*BLOCK, OTHER, *BACK])
    text = """
        substitutions:
          - name: ReLUs into the convolutions in front of them
            remove: [relu1, relu2]
            scale: {conv1: 1.2}
          - scale: {"norm*": 0.5}
    """
    expected_us = 1300 - 400 + 40 - 200
    found_us = after_us(job, "metaflow", policy(tmp_path, text))
    assert found_us == pytest.approx(expected_us, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("substitutions: [{remove: [relu9]}]", "no layer 'relu9'; did you mean 'relu"),
        ("substitutions: [{remove: [zzz]}]", "no layer 'zzz'; it has conv1"),
        ("substitutions: [{remove: [relu1], scale: {'relu*': 2}}]", "'relu1' is named again"),
        ("substitutions: [{scale: {conv1: 0}}]", "must be above 0"),
        ("substitutions: [{name: nothing}]", "must remove or scale a layer"),
        ("substitutions: [{drop: [relu1]}]", "unknown field"),
    ],
)
def test_a_policy_is_checked(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(layered(BLOCK), "metaflow", policy(tmp_path, text))


def test_a_policy_needs_layers_and_a_file(tmp_path: Path) -> None:
    assert "name its file" in refusal(layered(BLOCK), "metaflow")
    given = policy(tmp_path, "substitutions: [{remove: [a]}]")
    assert "it states no layers at all" in refusal(layered([OTHER]), "metaflow", given)


CONVS = [conv(1), conv(2), conv(3), conv_back(3), conv_back(2), conv_back(1)]
FAST = Question(amounts={"vdnn": MAP_BYTES / 1e9 / 50e-6})
"""A map takes 50 us."""
SLOW = Question(amounts={"vdnn": MAP_BYTES / 1e9 / 250e-6})
"""A map takes 250 us."""


def test_fast_offloading_hides_behind_the_layers() -> None:
    """All but the last map, which returns when its backward pass could begin already."""
    job = layered(CONVS)
    assert after_us(job, "vdnn", FAST) == pytest.approx(650, rel=0.01)


def test_slow_offloading_delays_both_passes() -> None:
    """Each layer forward takes 250 us; the maps return one after the other."""
    job = layered(CONVS)
    forward_us, last_us = 3 * 250, 250 + 100
    rest_us = 2 * 250
    found_us = after_us(job, "vdnn", SLOW)
    assert found_us == pytest.approx(forward_us + last_us + rest_us, rel=0.02)
    # without waiting for copies to the host, these delay the copies back only
    best_us = changed_us(job, "vdnn", Reading.OPTIMISTIC, amounts=SLOW.amounts)
    assert best_us == pytest.approx(forward_us + last_us + rest_us, rel=0.03)


def test_offloading_takes_the_bandwidth_of_the_trace() -> None:
    job = layered(CONVS, copy_bytes=2**21)
    base = recorded_base(job, 0)
    changed = WHAT_IFS["vdnn"].change(base, Question())
    copies = [at for at, name in enumerate(changed.names.ops) if name.startswith("offload ")]
    assert changed.duration_s[copies] == pytest.approx([MAP_BYTES / 1e9] * 3)


def test_offloading_is_refused_by_reason() -> None:
    assert "needs the bandwidth" in refusal(layered(CONVS), "vdnn")
    assert "no convolutions" in refusal(layered([OTHER]), "vdnn", FAST)
    twice = layered([conv(1), conv(1), conv_back(1)])
    assert "2 run forward and 1 backward" in refusal(twice, "vdnn", FAST)
    plain = [Work(one.operator, one.kernel, 100.0, (), one.node, one.layer) for one in CONVS]
    assert "record_shapes=True" in refusal(layered(plain), "vdnn", FAST)


def test_gradients_of_weights_and_inputs_may_have_operators_of_their_own() -> None:
    """As in torch before 1.11. The copy must be back for the weights' gradient only."""
    name, node = "aten::cudnn_convolution_backward", "CudnnConvolutionBackward"
    backward = [
        work
        for number in (3, 2, 1)
        for work in (
            Work(f"{name}_input", f"dgrad_{number}", 50.0, ((), IMAGE, WEIGHT), node),
            Work(f"{name}_weight", f"wgrad_{number}", 50.0, ((), IMAGE, IMAGE), node),
        )
    ]
    job = layered([*CONVS[:3], *backward])
    assert after_us(job, "vdnn", FAST) == pytest.approx(600, rel=1e-3)
    other = [replace(backward[1], dims=((), (9, 9), (9, 9))), *backward[2:]]
    assert "meets a gradient that reads [[9, 9], [9, 9]]" in refusal(
        layered([*CONVS[:3], *other]), "vdnn", FAST
    )


def test_encoding_adds_kernels_at_the_rate_of_the_relu() -> None:
    """Sparse in front of convolution 2 only: convolution 1 does not follow a ReLU."""
    works = [conv(1), relu(1, 40.0), conv(2), conv_back(2), relu_back(1), conv_back(1)]
    found_us = after_us(layered(works), "gist")
    assert found_us == pytest.approx(540 + 20 * (2 + 0.625) + 20 * (1 + 0.625), rel=1e-3)


def test_maps_in_front_of_poolings_become_bits() -> None:
    pool = Work("aten::max_pool2d_with_indices", "max_pool", 100.0, (IMAGE,), sequence=300)
    node = "MaxPool2DWithIndicesBackward0"
    back = Work("aten::max_pool2d_with_indices_backward", "max_pool_b", 100.0, (), node, "", 300)
    works = [conv(1), relu(1, 64.0), pool, OTHER, back, relu_back(1), conv_back(1)]
    found_us = after_us(layered(works), "gist")
    assert found_us == pytest.approx(664 + 2 * 32 * (1 + 1 / 32), rel=1e-3)


def test_encoding_needs_relus() -> None:
    assert "no ReLU" in refusal(layered(CONVS), "gist")
    alone = layered([conv(1), relu(1), OTHER, relu_back(1), conv_back(1)])
    assert "follows a ReLU" in refusal(alone, "gist")


def times(folder: Path, text: str) -> Question:
    path = folder / "times.csv"
    path.write_text(text)
    return Question(files={"kernel_times": str(path)})


def test_kernels_take_the_times_of_a_file(tmp_path: Path) -> None:
    job = layered([*BLOCK, OTHER, *BACK])
    by_kernel = times(tmp_path, "kernel,seconds\ngemm,500e-6\nfprop_1,0\n")
    assert after_us(job, "kernel_times", by_kernel) == pytest.approx(1600, rel=1e-3)
    by_layer = times(tmp_path, "layer,seconds\nconv1,50e-6\n")  # both passes
    assert after_us(job, "kernel_times", by_layer) == pytest.approx(1150, rel=1e-3)
    text = "operator,inputs,seconds\naten::relu,float[8x16x32x32],10e-6\naten::mm,,1e-6\n"
    by_operator = times(tmp_path, text)
    assert after_us(job, "kernel_times", by_operator) == pytest.approx(1300 - 180 - 99, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kernel\ngemm\n", "needs the column seconds"),
        ("kernel,seconds,colour\n", "needs the column seconds and some of"),
        ("", "but has none"),
        ("kernel,seconds\ngemm,fast\n", "line 2: seconds must be 0 to 100000, but are 'fast'"),
        ("kernel,seconds\ngemm,-1\n", "seconds must be"),
        ("kernel,seconds\ngemm,nan\n", "seconds must be"),
        ("kernel,seconds\ngemm\n", "as many values"),
        ("kernel,seconds\n,1\n", "selects nothing"),
        ("kernel,seconds\nother,1\n", "line 2: the trace has nothing"),
        ("kernel,seconds\ngemm,1\ngemm,2\n", "line 3: line 2 has stated a time"),
        ("kernel,inputs,seconds\ngemm,float[8],1\n", "inputs of no operator"),
    ],
)
def test_a_file_of_times_is_checked(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(layered([OTHER]), "kernel_times", times(tmp_path, text))


def walked_times(base: Base, row: KernelTime) -> list[float]:
    """The durations with the times of a row, by a walk over all ops."""
    after_s: list[float] = base.duration_s.tolist()
    executions: dict[int, list[int]] = {}
    for op in np.flatnonzero(base.on_device & (base.queue != NONE)).tolist():
        number, call = int(base.layer[op]), int(base.operator[op])
        layer = "" if number == NONE else base.names.layers[number]
        operator = None if call == NONE else base.names.operators[call]
        if row.kernel not in ("", base.names.ops[op]) or row.layer not in ("", layer):
            continue
        if row.operator and (operator is None or operator.name != row.operator):
            continue
        if operator is not None and row.inputs not in ("", inputs_text(operator)):
            continue
        together = op if row.kernel else call if row.operator else 0
        executions.setdefault(together, []).append(op)
    for ops in executions.values():
        total_s = sum(base.duration_s[ops])
        for op in ops:
            share = base.duration_s[op] / total_s if total_s else 1 / len(ops)
            after_s[op] = row.seconds * share
    return after_s


def test_times_of_a_file_are_those_of_a_walk_over_all_ops(tmp_path: Path) -> None:
    """Kernels of random calls and layers, some without time; a row states what one of them is."""
    rng = np.random.default_rng(0)
    base = recorded_base(layered([*BLOCK, OTHER, *BACK]), 0)
    device = np.flatnonzero(base.on_device)
    for _ in range(60):
        operator, layer = base.operator.copy(), base.layer.copy()
        operator[device] = rng.integers(NONE, len(base.names.operators), len(device))
        layer[device] = rng.integers(NONE, len(base.names.layers), len(device))
        duration_s = base.duration_s * rng.integers(0, 3, base.ops)
        mixed = replace(base, operator=operator, layer=layer, duration_s=duration_s)
        op = int(rng.choice(device))
        states_kernel, states_layer, states_inputs = rng.integers(0, 2, 3).tolist()
        call = None if operator[op] == NONE else base.names.operators[operator[op]]
        row = KernelTime(
            line=2,
            kernel=base.names.ops[op] if states_kernel or call is None else "",
            layer=base.names.layers[layer[op]] if states_layer and layer[op] != NONE else "",
            operator="" if call is None else call.name,
            inputs=inputs_text(call) if states_inputs and call is not None else "",
            seconds=1e-3,
        )
        text = io.StringIO()
        columns = ("kernel", "layer", "operator", "inputs", "seconds")
        csv.writer(text).writerows([columns, [getattr(row, column) for column in columns]])
        after = WHAT_IFS["kernel_times"].change(mixed, times(tmp_path, text.getvalue()))
        assert after.duration_s == pytest.approx(np.array(walked_times(mixed, row)), rel=1e-12)


def test_kernel_times_need_a_file() -> None:
    assert "name a CSV file" in refusal(layered([OTHER]), "kernel_times")


def test_results_are_numbers_of_all_readings() -> None:
    base = recorded_base(layered([*BLOCK, OTHER, *BACK]), 0)
    for name in ("faster_gpu", "cuda_graphs", "restructured_batchnorm", "gist"):
        found = predict(base, combined(name), Question())
        assert np.isfinite([found.speedup_low, found.speedup, found.speedup_high]).all()
        assert found.speedup_low <= found.speedup <= found.speedup_high
