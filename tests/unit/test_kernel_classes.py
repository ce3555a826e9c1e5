"""Kernels of cuDNN, cuBLAS, PyTorch and NCCL belong to classes."""

from __future__ import annotations

import pytest

from autotune.whatif.kernels.kernel_classes import KernelClass, class_of

CONV, GEMM = KernelClass.CONVOLUTION, KernelClass.GEMM
KERNELS = {
    "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize32x32x8_cudnn": CONV,
    "void cudnn::winograd_nonfused::winogradWgradData4x4<float, float>(int)": CONV,
    "void fft2d_r2c_32x32<float, false, 0u, false>(float2*, float const*)": CONV,
    "void cudnn::cnn::wgrad_alg1_engine<float, float, 128, 6, 7, 3, 3, 5, false>(int)": CONV,
    "sm80_xmma_gemm_cf32cf32_f32f32_cf32_nt_n_tilesize64x32x8_cublas": CONV,
    "volta_scudnn_128x64_relu_interior_nn_v1": CONV,
    "volta_sgemm_128x64_nn": GEMM,
    "nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT": GEMM,
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(int)": GEMM,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(int)": GEMM,
    "Cijk_Ailk_Bljk_SB_MT128x64x16": GEMM,
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(Params)": KernelClass.ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": KernelClass.ATTENTION,
    "void cudnn::engines_precompiled::nchwToNhwcKernel<float>(int)": KernelClass.LAYOUT,
    "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(int)": KernelClass.BATCH_NORM,
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)": (
        KernelClass.LAYER_NORM
    ),
    "void at::native::batch_norm_collect_statistics_kernel<float>(int)": KernelClass.BATCH_NORM,
    "void at::native::max_pool_forward_nchw<float, int>(int)": KernelClass.POOLING,
    "void (anonymous namespace)::softmax_warp_forward<float, float, 10>(int)": KernelClass.SOFTMAX,
    "void at::native::vectorized_gather_kernel<16, long>(char*)": KernelClass.EMBEDDING,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(int)": (
        KernelClass.REDUCTION
    ),
    "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda>": (
        KernelClass.COPY
    ),
    "Memcpy DtoD (Device -> Device)": KernelClass.COPY,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": (
        KernelClass.ELEMENTWISE
    ),
    "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float>(int)": (
        KernelClass.ELEMENTWISE
    ),
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<float>(int)": (
        KernelClass.OPTIMIZER
    ),
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)": KernelClass.COMMUNICATION,
    "a kernel of the user": KernelClass.OTHER,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_classed_by_its_name(name: str) -> None:
    assert class_of(name) is KERNELS[name]


def test_all_kernels_of_an_operator_are_of_its_class_but_for_changes_of_layout() -> None:
    product = "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8_cublas"
    assert class_of(product, "aten::convolution_backward") is CONV
    assert class_of(product, "aten::addmm") is GEMM
    layout = "void cudnn::engines_precompiled::nhwcToNchwKernel<float>(int)"
    assert class_of(layout, "aten::cudnn_convolution") is KernelClass.LAYOUT
    assert class_of(product, "aten::add_") is GEMM
