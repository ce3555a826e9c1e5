"""Classes of device ops by what limits them, from the names of kernels and of their operators.

Names of kernels are those of cuDNN, cuBLAS, CUTLASS, PyTorch and NCCL, and of their counterparts on
ROCm. A convolution or a matrix product is often several kernels: transforms, the product, a
reduction. All kernels of such an operator are of its class, except for changes of layout.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autotune.dfg.graph import NONE, Kind
from autotune.whatif.base import Base


class KernelClass(Enum):
    """What a kernel does. The first ones are limited by arithmetic, the others by memory."""

    CONVOLUTION = "convolution"
    GEMM = "matrix product"
    ATTENTION = "attention"
    LAYOUT = "change of layout"
    BATCH_NORM = "batch normalization"
    LAYER_NORM = "layer normalization"
    SOFTMAX = "softmax and loss"
    POOLING = "pooling"
    EMBEDDING = "embedding and sorting"
    REDUCTION = "reduction"
    COPY = "copy or cast"
    ELEMENTWISE = "elementwise"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"
    OTHER = "other"


_NAMES: tuple[tuple[KernelClass, str], ...] = (
    (KernelClass.COMMUNICATION, r"nccl|rccl"),
    (KernelClass.OPTIMIZER, r"[Aa]dam|[Ss]gd|multi_tensor_apply"),
    (KernelClass.ATTENTION, r"fmha|flash|sdpa|[Aa]ttention|cudnn::fusion::co"),
    (KernelClass.LAYOUT, r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|batched_transpose"),
    (KernelClass.BATCH_NORM, r"batch_?norm|BatchNorm|\bbn_"),
    (KernelClass.LAYER_NORM, r"layer_?norm|LayerNorm|GammaBeta|RowwiseMoments|group_?norm"
     r"|GroupNorm|rms_?norm|RMSNorm"),
    (KernelClass.POOLING, r"pool|adaptive_average"),
    (KernelClass.CONVOLUTION, r"[fdw](?:prop|grad)|conv|winograd|fft2d|flip_filter|cf32cf32"
     r"|scudnn|cudnn::cnn|scalePackedTensor|Conv2d"),
    (KernelClass.GEMM, r"gemm|nvjet|splitK|cublasLt|gemv|cutlass.*Kernel|\bCijk_|\bscal_kernel"),
    (KernelClass.SOFTMAX, r"[Ss]oft[Mm]ax|nll_loss|cross_entropy"),
    (KernelClass.EMBEDDING, r"embedding|grad_weight|segment|radix_sort|RadixSort|cub::|gather"
     r"|scatter|index|unique|sort"),
    (KernelClass.REDUCTION, r"reduce_kernel|[Rr]educe"),
    (KernelClass.COPY, r"copy|Copy|Memcpy|CatArray|transpose"),
    (KernelClass.ELEMENTWISE, r"elementwise|dropout|Fill|Memset|philox|triton_poi"),
)  # fmt: skip
_COMPILED = [(one, re.compile(pattern)) for one, pattern in _NAMES]
_OPERATORS: tuple[tuple[KernelClass, str], ...] = (
    (KernelClass.CONVOLUTION, r"aten::(?:\w*convolution\w*|conv\dd\w*)$"),
    (KernelClass.GEMM, r"aten::(?:mm|addmm|bmm|baddbmm|linear|matmul|_addmm_activation)$"),
    (KernelClass.ATTENTION, r"aten::\w*attention\w*$"),
    (KernelClass.BATCH_NORM, r"aten::\w*batch_norm\w*$"),
    (KernelClass.LAYER_NORM, r"aten::\w*(?:layer|group)_norm\w*$"),
)
_COMPILED_OPERATORS = [(one, re.compile(pattern)) for one, pattern in _OPERATORS]


@lru_cache(maxsize=100_000)
def class_of(kernel: str, operator: str = "") -> KernelClass:
    """The class of a device op by its name and by that of its operator, "" if unknown."""
    by_name = next((one for one, name in _COMPILED if name.search(kernel)), KernelClass.OTHER)
    if by_name in (KernelClass.LAYOUT, KernelClass.COMMUNICATION):
        return by_name
    by_operator = (one for one, name in _COMPILED_OPERATORS if name.match(operator))
    return next(by_operator, by_name)


def kernel_classes(base: Base) -> NDArray[np.object_]:
    """(N,) the `KernelClass` of each device op, None for ops of the host.

    Every device op of an update is of the optimizer.
    """
    classes = np.full(base.ops, None, dtype=object)
    for op in np.flatnonzero(base.on_device).tolist():
        call = int(base.operator[op])
        operator = "" if call == NONE else base.names.operators[call].name
        kernel_class = class_of(base.names.ops[op], operator)
        updates = base.kind[op] == Kind.UPDATE and kernel_class is not KernelClass.COMMUNICATION
        classes[op] = KernelClass.OPTIMIZER if updates else kernel_class
    return classes
