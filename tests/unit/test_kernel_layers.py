"""Layers and passes of kernels whose operators are unknown, by the sequence of their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.dfg.graph import NONE, Kind
from autotune.profiling.traces.job import read_job
from autotune.whatif.kernels.kernel_layers import named_kernels, with_kernel_layers
from autotune.whatif.recording.recorded import recorded_base

H100 = Path(__file__).parents[2] / "datasets" / "gpu_traces" / "h100"
CONVOLUTION = ["Memset (Device)", "cudnn::nchwToNhwcKernel", "xmma_fprop_implicit_gemm"]
NORM, RELU = "cudnn::bn_fw_tr_1C11_kernel", "vectorized_elementwise_kernel<launch_clamp_scalar>"
FORWARD = [*CONVOLUTION, NORM, RELU, *CONVOLUTION, NORM, "sm80_xmma_gemm_tn", "softmax_forward"]
BACKWARD = [
    *("softmax_warp_backward", "sm80_xmma_gemm_nn", "sm80_xmma_gemm_nt", "cublasLt::splitKreduce"),
    *("reduce_kernel<512>", "cudnn::bn_bw_1C11_kernel", "xmma_dgrad", "Memset (Device)"),
    *("wgrad_alg0_engine", "elementwise_kernel<AUnary mul>", "elementwise<threshold_kernel>"),
    *("cudnn::bn_bw_1C11_kernel", "wgrad_alg0_engine"),
]
UPDATE = ["multi_tensor_apply_kernel<lerp>", "multi_tensor_apply_kernel<addcdiv>"]


def test_the_backward_pass_takes_the_layers_of_the_forward_pass() -> None:
    found = named_kernels([*FORWARD, *BACKWARD, *UPDATE])
    assert found is not None
    assert found.names == ("conv_0", "batch_norm_0", "conv_1", "batch_norm_1", "linear_0")
    layers = [found.names[layer] if layer != NONE else "" for layer in found.layer]
    assert layers[: len(FORWARD)] == [
        *["conv_0"] * 3,
        *["batch_norm_0"] * 2,
        *["conv_1"] * 3,
        "batch_norm_1",
        *["linear_0"] * 2,
    ]
    assert layers[len(FORWARD) : -2] == [
        *["linear_0"] * 5,
        "batch_norm_1",
        *["conv_1"] * 4,
        *["batch_norm_0"] * 2,
        "conv_0",
    ]
    kinds = [Kind.FORWARD] * len(FORWARD) + [Kind.BACKWARD] * len(BACKWARD) + [Kind.UPDATE] * 2
    assert found.kind.tolist() == kinds


def test_passes_that_do_not_match_have_no_layers() -> None:
    assert named_kernels(FORWARD) is None
    assert named_kernels([NORM, *BACKWARD]) is None


@pytest.mark.parametrize("name", ["vgg19.fp32"])
def test_a_recording_without_operators_has_the_layers_of_one_with_them(name: str) -> None:
    base = recorded_base(read_job([H100 / name]), 0)
    assert with_kernel_layers(base) is base
    kernels = base.on_device & (base.kind != Kind.COLLECTIVE)
    nothing = np.full(base.ops, NONE, dtype=np.int32)
    kind = np.where(kernels, Kind.OTHER, base.kind).astype(np.int32)
    names = replace(base.names, layers=())
    found = with_kernel_layers(
        replace(base, operator=nothing, layer=nothing, kind=kind, names=names)
    )
    known = kernels & (base.layer != NONE)
    stated = np.array([*base.names.layers, ""])[base.layer[known]]
    named = np.array([*found.names.layers, ""])[found.layer[known]]
    seconds = base.duration_s[known]
    assert seconds[stated == named].sum() > 0.99 * seconds.sum()
    same = kernels & (found.kind == base.kind)
    assert base.duration_s[same].sum() > 0.99 * base.duration_s[kernels].sum()
