"""What-ifs of precision, optimizer, batch and recomputation have exact answers on small traces."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from periodic_training import training
from recorded_passes import KERNEL_US, ROWS, UPDATE_US, WIDTH, recorded_passes
from synthetic_traces import span

from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.formats.op_inputs import OpInputs
from autotune.profiling.traces.job import assemble, read_job
from autotune.whatif.base import Base, Operator, steady
from autotune.whatif.changes.alone import alone
from autotune.whatif.changes.batch import accumulate, batch
from autotune.whatif.changes.optimizer import for_each_optimizer, foreach_optimizer, fused_adam
from autotune.whatif.changes.precision import amp, amp_fp16, channels_last, tf32
from autotune.whatif.changes.recomputation import Blocks, recompute, repeated_blocks
from autotune.whatif.kernels.factors import Roofline
from autotune.whatif.kernels.h100_factors import H100
from autotune.whatif.kernels.kernel_classes import KernelClass
from autotune.whatif.kernels.operator_work import ProductWork, product_work
from autotune.whatif.kernels.precisions import Precision, precision_of
from autotune.whatif.primitives import select
from autotune.whatif.question import Factor, Question, Reading
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.recording.recording_cost import (
    RecordingCost,
    recorded_events,
    without_recording,
)

SURE = Factor(1.0, 1.0, 1.0, "invented")
FLOPS = 2.0 * ROWS * WIDTH * WIDTH
PRODUCT = Roofline(FLOPS / 100e-6, 1e15, 10e-6, 8.0, SURE)
TABLE = replace(
    H100,
    products={KernelClass.GEMM: PRODUCT, KernelClass.CONVOLUTION: PRODUCT},
    classes={},
    tf32=SURE,
    cast_bytes_per_s=1e15,
    cast_s=0.0,
    cast_host_s=Factor(0.0, 0.0, 0.0, "invented"),
    fixed_s=Factor(50e-6, 40e-6, 60e-6, "invented"),
    fused=Factor(0.5, 0.5, 0.5, "invented"),
    each_s=150e-6,
    each_host_s=Factor(1e-6, 1e-6, 1e-6, "invented"),
)
ASKED = Question()


def step_us(base: Base) -> float:
    return steady(base).step_s * 1e6


@pytest.fixture(scope="module")
def base() -> Base:
    return replace(recorded_passes(), device=TABLE.device)


def test_autocast_gives_products_the_time_of_their_work(base: Base) -> None:
    assert step_us(base) == pytest.approx(6 * KERNEL_US + 4 * UPDATE_US, rel=0.01)
    faster = amp(base, ASKED, TABLE)
    products = select(faster, name="sgemm", on_device=True)
    assert faster.duration_s[products] == pytest.approx(110e-6, rel=0.01)
    casts = select(faster, name="^cast")
    assert casts.sum() == 8, "a weight and a bias of each product, and their gradients"
    assert step_us(faster) == pytest.approx(6 * 110 + 4 * UPDATE_US, rel=0.02)


def test_factors_of_another_device_are_noted_as_assumed(base: Base) -> None:
    here, there = (replace(base, device=name) for name in (H100.device, "NVIDIA A100"))
    for change in (amp, amp_fp16, tf32, fused_adam, batch, accumulate):
        assert change(here, Question()).notes == here.notes
        note, *more = change(there, Question()).notes
        assert note == f"factors on kernels: measured on {H100.device}, assumed for NVIDIA A100"
        assert len(more) == (change in (amp, amp_fp16, tf32))


@pytest.mark.parametrize(
    ("device", "change", "sizes", "fp32_flops_per_s", "flops_per_s"),
    [
        ("Tesla T4", amp_fp16, (4096, 768, 3072), 8.1e12, 65e12),
        ("NVIDIA A100-SXM4-40GB", amp, (4096, 4096, 4096), 19.5e12, 312e12),
        ("NVIDIA A100-SXM4-40GB", tf32, (4096, 4096, 4096), 19.5e12, 156e12),
        ("NVIDIA GeForce RTX 3090", tf32, (4096, 4096, 4096), 35.6e12, 35.6e12),
    ],
)
def test_products_of_another_device_take_a_share_of_their_time(
    base: Base, device, change, sizes, fp32_flops_per_s, flops_per_s
) -> None:
    """Rates are those of the data sheets. They took the H100's seconds: 28 us on the T4."""
    rows, inner, columns = sizes
    dims = ((columns,), (rows, inner), (inner, columns))
    inputs = OpInputs(dims, ("float",) * 3, ("",) * 3)
    operators = tuple(
        replace(one, inputs=inputs) if one.name == "aten::addmm" else one
        for one in base.names.operators
    )
    products = select(base, name="sgemm_nn", on_device=True)
    flops = 2.0 * rows * inner * columns
    recorded_s = np.where(products, flops / fp32_flops_per_s, base.duration_s)
    names = replace(base.names, operators=operators)
    there = replace(base, device=device, names=names, duration_s=recorded_s, recorded_s=recorded_s)
    shares = {
        reading: change(there, Question(reading=reading)).duration_s[: base.ops][products]
        / recorded_s[products]
        for reading in Reading
    }
    in_fp16 = 2 * H100.tf32.expected if change is tf32 else 1.0
    assert shares[Reading.EXPECTED] == pytest.approx(in_fp16 / 3)
    assert shares[Reading.PESSIMISTIC] == pytest.approx(1.0)
    assert (shares[Reading.OPTIMISTIC] < shares[Reading.EXPECTED]).all()
    assert (shares[Reading.PESSIMISTIC] >= fp32_flops_per_s / flops_per_s - 1e-9).all()


def test_precisions_that_a_device_has_no_tensor_cores_for_are_refused(base: Base) -> None:
    for name in ("Tesla V100-DGXS-32GB", "Tesla T4", "Quadro P4000", "NVIDIA GeForce GTX 1080 Ti"):
        old = replace(base, device=name)
        with pytest.raises(InvalidInput, match=f"bfloat16 .* of {name}; ask for amp_fp16"):
            amp(old, ASKED)
        with pytest.raises(InvalidInput, match="TF32 needs tensor cores"):
            tf32(old, ASKED)
        assert amp_fp16(old, ASKED).ops > base.ops
    for name in ("NVIDIA L4", "NVIDIA A10G", "AMD Instinct MI300X", ""):
        assert amp(replace(base, device=name), ASKED).ops >= base.ops


def test_tf32_doubles_all_but_the_fixed_part(base: Base) -> None:
    faster = tf32(base, ASKED, TABLE)
    products = select(faster, name="sgemm", on_device=True)
    assert faster.duration_s[products] == pytest.approx(210e-6, rel=0.01)
    assert faster.ops == base.ops


def test_a_gradient_scaler_makes_the_host_wait(base: Base) -> None:
    plain, scaled = amp(base, ASKED, TABLE), amp_fp16(base, ASKED, TABLE)
    assert step_us(scaled) >= step_us(plain)
    assert select(scaled, name="^unscale$").sum() == 1


def test_without_shapes_the_measured_factor_of_the_class_holds() -> None:
    base = replace(recorded_base(training(5, 400), 0), device=TABLE.device)
    table = replace(TABLE, classes={KernelClass.GEMM: Factor(0.25, 0.2, 0.3, "invented")})
    assert step_us(amp(base, ASKED, table)) == pytest.approx(300, rel=0.02)
    assert step_us(tf32(base, ASKED, table)) == pytest.approx(600, rel=0.02)
    slow = Question(reading=Reading.PESSIMISTIC)
    assert step_us(amp(base, slow, table)) == pytest.approx(360, rel=0.02)


def test_channels_last_removes_changes_of_layout(base: Base) -> None:
    names = list(base.names.ops)
    layout = int(np.flatnonzero(select(base, name="sgemm_nn", on_device=True))[0])
    names[layout] = "void cudnn::nchwToNhwcKernel<float>"
    changed = replace(base, names=replace(base.names, ops=tuple(names)))
    saved = step_us(changed) - step_us(channels_last(changed, ASKED))
    assert saved == pytest.approx(KERNEL_US, rel=0.01)
    with pytest.raises(InvalidInput, match="combine it with autocast"):
        channels_last(base, ASKED)


def test_a_fused_optimizer_takes_its_share_and_no_other_launch(base: Base) -> None:
    fused = fused_adam(base, ASKED, TABLE)
    assert step_us(fused) == pytest.approx(6 * KERNEL_US + 2 * UPDATE_US, rel=0.01)
    assert len(fused.launched) == len(base.launched) - 3


@pytest.mark.parametrize(
    "kernel",
    [
        "void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>"
        ", at::native::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1>>",
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float>>",
    ],
)
def test_a_fused_optimizer_is_not_fused_again(base: Base, kernel: str) -> None:
    is_update = base.on_device & (base.kind == Kind.UPDATE)
    names = [kernel if is_update[op] else name for op, name in enumerate(base.names.ops)]
    fused = replace(base, names=replace(base.names, ops=tuple(names)))
    with pytest.raises(InvalidInput, match="fused already: it launches 'void"):
        fused_adam(fused, ASKED, TABLE)


@pytest.mark.parametrize(
    ("kernel", "precision"),
    [
        ("nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_TNT", Precision.HALF),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", Precision.HALF),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_stages_32x6_nn", Precision.HALF),
        ("volta_h884gemm_128x64_ldg8_tn", Precision.HALF),
        ("Cijk_Alik_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1", Precision.HALF),
        ("Cijk_Ailk_Bljk_SB_MT128x64x16_SN_1LDSB0", None),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3", None),
        ("cutlass_80_tensorop_s1688gemm_128x256_16x3_nn_align4", Precision.TF32),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16", Precision.TF32),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>", None),
        ("ampere_sgemm_128x64_nn", None),
    ],
)
def test_kernels_of_products_state_their_precision(kernel, precision) -> None:
    assert precision_of(kernel) is precision


def test_autocast_from_tf32_reaches_the_time_of_autocast_from_fp32(base: Base) -> None:
    """Without shapes, by the classes of kernels: a trace in TF32 has a part of the gain already."""
    operators = tuple(replace(one, inputs=None) for one in base.names.operators)
    single = replace(base, names=replace(base.names, operators=operators))
    in_tf32 = tf32(single, ASKED, H100)
    faster = in_tf32.duration_s < single.duration_s
    kernel = "cutlass_80_tensorop_s1688gemm_128x256_16x3_nn_align4"
    names = tuple(kernel if faster[op] else name for op, name in enumerate(base.names.ops))
    recorded = replace(in_tf32, precision="", names=replace(in_tf32.names, ops=names))
    assert faster.any()
    after, expected = (amp(one, ASKED, H100) for one in (recorded, single))
    assert after.duration_s[faster] == pytest.approx(expected.duration_s[faster])


def test_a_kernel_for_each_tensor_takes_at_least_its_least_time(base: Base) -> None:
    each = for_each_optimizer(base, ASKED, TABLE)
    assert step_us(each) == pytest.approx(6 * KERNEL_US + 4 * 2 * 150, rel=0.01)
    with pytest.raises(InvalidInput, match="already has kernels for many"):
        foreach_optimizer(base, ASKED, TABLE)


def test_a_batch_scales_all_but_the_fixed_part(base: Base) -> None:
    half = batch(base, Question(amounts={"batch": 0.5}), TABLE)
    assert step_us(half) == pytest.approx(6 * 225 + 4 * UPDATE_US, rel=0.01)
    double = batch(base, ASKED, TABLE)
    assert step_us(double) == pytest.approx(6 * 750 + 4 * UPDATE_US, rel=0.01)
    with pytest.raises(InvalidInput, match="a factor above 0"):
        batch(base, Question(amounts={"batch": 0.0}), TABLE)


def test_accumulation_runs_both_passes_for_each_part(base: Base) -> None:
    two = accumulate(base, ASKED, TABLE)
    added_us = 2 * 150
    expected = 2 * 6 * 225 + added_us + 4 * UPDATE_US
    assert step_us(two) == pytest.approx(expected, rel=0.01)
    three = accumulate(base, Question(amounts={"accumulate": 3.0}), TABLE)
    part_us = 50 + 350 / 3
    expected = 3 * 6 * part_us + 2 * added_us + 4 * UPDATE_US
    assert step_us(three) == pytest.approx(expected, rel=0.01)
    with pytest.raises(InvalidInput, match="2 to 64 parts"):
        accumulate(base, Question(amounts={"accumulate": 1.5}), TABLE)


def test_repeated_blocks_are_found() -> None:
    names = ["embed", *(["norm", "gemm", "gelu", "gemm"] * 4), "head"]
    assert repeated_blocks(names) == Blocks(1, 4, 4)
    assert repeated_blocks(["a", "b", "c", "d"]) is None
    assert repeated_blocks([]) is None


def test_recomputation_adds_the_forward_pass_of_the_blocks() -> None:
    base = recorded_base(training(5, 400, kernels=6), 0)
    names = tuple(name.split("_")[0] if "gemm" in name else name for name in base.names.ops)
    kind = base.kind.copy()
    kind[base.launched[:4]], kind[base.launched[4:]] = Kind.FORWARD, Kind.BACKWARD
    passes = replace(base, names=replace(base.names, ops=names), kind=kind)
    with pytest.raises(InvalidInput, match="needs a backward pass"):
        recompute(passes, ASKED)
    kind[base.launched] = [Kind.FORWARD] * 3 + [Kind.BACKWARD] * 3
    assert step_us(recompute(replace(passes, kind=kind), ASKED)) == pytest.approx(3600, rel=0.01)
    with pytest.raises(InvalidInput, match="equal blocks"):
        recompute(base, ASKED)
    few = recorded_base(training(5, 400, kernels=9), 0)  # three equal kernels of eight
    names = tuple(
        "gemm" if name in ("gemm_1", "gemm_2", "gemm_3") else name for name in few.names.ops
    )
    kind = few.kind.copy()
    kind[few.launched] = [Kind.FORWARD] * 8 + [Kind.BACKWARD]
    with pytest.raises(InvalidInput, match=r"50% of the forward pass's 8 kernels.* has 3;"):
        recompute(replace(few, names=replace(few.names, ops=names), kind=kind), ASKED)


def test_a_recorder_s_wait_and_cost_are_removed() -> None:
    free, waiting = recorded_passes(), recorded_passes(waits=True)
    assert step_us(waiting) > step_us(free)
    nothing = RecordingCost(*(Factor(0.0, 0.0, 0.0, "invented"),) * 2)
    assert step_us(without_recording(waiting, nothing)) == pytest.approx(step_us(free), rel=0.01)
    base = recorded_base(training(300, 10), 0)
    begins, calls = recorded_events(base)
    assert (begins.sum(), calls.sum()) == (4, 3), "the cut divides one operator of three"
    cost = RecordingCost(
        Factor(100e-6, 50e-6, 150e-6, "invented"), Factor(0.0, 0.0, 0.0, "invented")
    )
    assert step_us(without_recording(base, cost)) == pytest.approx(step_us(base) - 400, rel=0.01)


def test_only_a_recording_with_synchronization_can_be_without(base: Base) -> None:
    with pytest.raises(InvalidInput, match="must show a synchronization"):
        alone(base, ASKED)


def test_the_work_of_convolutions_follows_from_their_shapes() -> None:
    values = ("", "", "[1, 1]", "[2, 2]", "[1, 1]", "1")
    inputs = OpInputs(((8, 16, 32, 32), (64, 16, 3, 3), (), (), (), ()), ("",) * 6, values)
    forward = product_work(Operator("aten::cudnn_convolution", (), inputs))
    out = 8 * 64 * 16 * 16
    assert forward == ProductWork(
        KernelClass.CONVOLUTION,
        flops=2.0 * out * 16 * 9,
        elements=float(out + 8 * 16 * 32 * 32 + 64 * 16 * 9),
        layout=float(out + 8 * 16 * 32 * 32),
    )
    dims = ((8, 64, 16, 16), (8, 16, 32, 32), (64, 16, 3, 3), *((),) * 8)
    backward = OpInputs(dims, ("",) * 11, ("",) * 10 + ("[True, True, False]",))
    both = product_work(Operator("aten::convolution_backward", (), backward))
    assert both is not None and both.directions == 2 and both.flops == 2 * forward.flops
    odd = OpInputs(((64, 50257), (50257, 768)), ("float", "float"))
    product = product_work(Operator("aten::mm", (), odd))
    assert product is not None and product.alignment == 1
    assert product_work(Operator("aten::mm", (), OpInputs(((2,),), ("",)))) is None
    assert product_work(Operator("aten::relu", (), odd)) is None


def test_without_ddp_nothing_is_packed_on_a_recorded_gpu() -> None:
    recording = Path(__file__).parents[2] / "datasets/gpu_traces/h100/resnet50.fp32"
    base = recorded_base(read_job([recording]), 0)
    gone = select(base, on_device=True) & (alone(base, ASKED).queue == NONE)
    names = {base.names.ops[op].split("<")[0] for op in np.flatnonzero(gone)}
    parameters, buffers = 161, 3 * 53
    dtypes = 2  # of buffers, each packed by a kernel
    assert gone.sum() == 2 * parameters + buffers + dtypes
    assert any("Memcpy DtoD" in name for name in names)
    before_s, after_s = steady(base).step_s, steady(alone(base, ASKED)).step_s
    assert 0.9 * before_s < after_s < 0.95 * before_s


def test_the_host_does_not_wait_for_a_copy_within_the_device() -> None:
    events = [
        event
        for step in range(3)
        for event in (
            span(f"ProfilerStep#{step}", 1000.0 * step, 900, cat="user_annotation"),
            span("aten::copy_", 1000.0 * step + 5, 60),
            span(
                "cudaMemcpyAsync", 1000.0 * step + 10, 50, cat="cuda_runtime", correlation=step + 1
            ),
            {
                **span(
                    "Memcpy DtoD (Device -> Device)",
                    1000.0 * step + 20,
                    10,
                    7,
                    "gpu_memcpy",
                    stream=7,
                    device=0,
                    correlation=step + 1,
                ),
                "pid": 0,
            },
        )
    ]
    text = json.dumps({"traceEvents": events}).encode()
    base = recorded_base(assemble([read_kineto(BytesIO(text).read, "rank0.json")]), 0)
    assert not (base.on_device[base.parent] & ~base.on_device[base.child]).any()
