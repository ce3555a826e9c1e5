"""Precision: autocast to 16 bit (Daydream, Alg. 3 and sec. 5.1), TF32, and channels last."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.changes.recomputation import RECOMPUTED
from autotune.whatif.kernels.factors import FactorTable
from autotune.whatif.kernels.h100_factors import H100
from autotune.whatif.kernels.kernel_classes import KernelClass, kernel_classes
from autotune.whatif.kernels.operator_work import ProductWork, product_work
from autotune.whatif.kernels.parameters import gradient_bytes, parameter_shapes
from autotune.whatif.kernels.precisions import (
    UNKNOWN_MEMORY,
    Precision,
    precision_of,
    refuse_precision,
)
from autotune.whatif.kernels.situations import update_runs
from autotune.whatif.primitives import connect, insert, remove, select
from autotune.whatif.question import Question, Reading
from autotune.whatif.registry import what_if

Shape = tuple[int, ...]
PRODUCTS = (KernelClass.CONVOLUTION, KernelClass.GEMM)
LAYOUT_KERNEL = "nchwToNhwc and back (predicted)"
KEPT_KERNELS = 2
"""Kernels per direction that a product still has on tensor cores; the others go."""
BEFORE_AMPERE = re.compile(r"\b(?:[KMP]\d+|V100S?|T4G?|GTX|TITAN|RTX 20\d\d|Quadro RTX)\b")
"""Names of NVIDIA's devices below compute capability 8.0, whose tensor cores take float16 at most
(CUDA C++ Programming Guide, "Compute Capabilities")."""


@what_if(
    "amp",
    title="autocast to bfloat16",
    source="Daydream, Alg. 3 and sec. 5.1, with measured factors",
    enact='with torch.autocast("cuda", torch.bfloat16): loss = ...',
    memory_unknown=UNKNOWN_MEMORY,
)
def amp(base: Base, question: Question, table: FactorTable = H100) -> Base:
    """Products run on tensor cores in 16 bit; other kernels move fewer bytes or stay in fp32.

    - Products and convolutions take the time of their arithmetic and traffic, with the efficiency
      that the table's device has reached, and changes of layout where convolutions need them.
      Without recorded shapes the measured factor of their class holds. On other devices they take a
      third of their time, as in the paper: at best the measured factor, at worst all of it.
    - Other kernels take their class's measured share of the time. The paper halves all of them, but
      normalizations, pooling and the optimizer stay as slow as they were.
    - Parameters are cast to 16 bit before their first use and their gradients back, and inputs of
      matrix products are cast in models with layer normalization, which stays in fp32.
    """
    _require_ampere(base, "bfloat16", "ask for amp_fp16")
    return _in_16_bit(base, question, table)


def _in_16_bit(base: Base, question: Question, table: FactorTable) -> Base:
    base, table = _for_device(base, table)
    _require_fp32(base, "autocast speeds up", Precision.HALF)
    classes = kernel_classes(base)
    faster = _scaled(base, classes, table, question.reading)
    faster = _products(faster, base, table, 1.0, question.reading)
    faster = replace(faster, precision=Precision.HALF)
    return _casts(faster, base, table, question.reading)


@what_if(
    "amp_fp16",
    title="autocast to float16, with a gradient scaler",
    source="Daydream, Alg. 3 and sec. 5.1, with measured factors; Micikevicius et al. 2018",
    enact='with torch.autocast("cuda", torch.float16): ...; scaler = torch.amp.GradScaler("cuda")',
    memory_unknown=UNKNOWN_MEMORY,
)
def amp_fp16(base: Base, question: Question, table: FactorTable = H100) -> Base:
    """As `amp`, and the scaler reads every gradient once before each update.

    Then the host waits for the device, because infinite gradients skip the update.
    """
    base, table = _for_device(base, table)
    faster = _in_16_bit(base, question, table)
    ends: list[tuple[int, int]] = []  # the last op of a backward pass, and the update behind it
    for update in update_runs(faster):
        before = faster.launched[: int(np.flatnonzero(faster.launched == update[0])[0])]
        backward = before[faster.kind[before] == Kind.BACKWARD]
        ends += [(int(backward[-1]), int(update[0]))] if len(backward) else []
    if not ends:
        raise InvalidInput(
            "a gradient scaler acts between the backward pass and the update, but the trace does "
            "not tell their kernels from others"
        )
    read_bytes = float(gradient_bytes(base, question).sum()) * 2
    seconds = np.full(len(ends), read_bytes / table.cast_bytes_per_s / len(ends))
    after = np.array([backward for backward, _ in ends])
    grown = insert(faster, after, seconds, ["unscale"] * len(ends), Kind.BACKWARD)
    for place, (_, first_launched) in enumerate(ends):
        grown = connect(grown, faster.ops + place, int(faster.launch[first_launched]))
    return grown


@what_if(
    "tf32",
    title="TF32 for products of fp32",
    source="Daydream, Alg. 3, for the precision of NVIDIA's Ampere and later",
    enact='torch.set_float32_matmul_precision("high")',
)
def tf32(base: Base, question: Question, table: FactorTable = H100) -> Base:
    """Products and convolutions run on tensor cores at half the rate of 16 bit; the rest stays.

    - Arithmetic and traffic take twice as long as in bf16, times a measured factor. The fixed part
      of a kernel's time does not grow. On devices other than the table's, as in `amp`, times two.
    - Memory-efficient attention in fp32 stays as it is: its kernels emulate fp32 in any case.
    """
    _require_ampere(base, "TF32", "fp32 stays as it is there")
    base, table = _for_device(base, table)
    _require_fp32(base, "TF32 speeds up", Precision.HALF, Precision.TF32)
    factor = 2 * table.tf32.at(question.reading)
    faster = _without_shapes(base, table, factor, question.reading)
    faster = _products(faster, base, table, factor, question.reading)
    return replace(faster, precision=Precision.TF32)


def _for_device(base: Base, table: FactorTable) -> tuple[Base, FactorTable]:
    """The table for the base's device, and the base with notes of what is assumed for it."""
    known = table.on(base.device)
    if known is table:
        return base, table
    base = table.noted(base)
    note = "products: a third of their time (Daydream, Alg. 3), at worst all of it"
    return replace(base, notes=tuple(dict.fromkeys((*base.notes, note)))), known


def _require_ampere(base: Base, precision: str, otherwise: str) -> None:
    if BEFORE_AMPERE.search(base.device):
        raise InvalidInput(
            f"{precision} needs tensor cores of NVIDIA's Ampere or later, but the trace is of "
            f"{base.device}; {otherwise}"
        )


@what_if(
    "channels_last",
    title="channels last",
    source="Daydream, sec. 4.3 (remove)",
    enact="model.to(memory_format=torch.channels_last), and the same for its inputs",
)
def channels_last(base: Base, question: Question) -> Base:
    """No kernel changes the layout of a tensor before or after a convolution on tensor cores.

    All other kernels take as long as on the other layout. On it, cuDNN's fp32 convolutions without
    tensor cores change no layout, so combine it with `amp` or `tf32`.
    """
    layout = np.array([one is KernelClass.LAYOUT for one in kernel_classes(base)])
    if not layout.any():
        none = "channels last saves changes of layout, but the trace shows none"
        if base.precision:
            where = f"with shapes, and on {H100.device}"
            raise InvalidInput(f"{none}; those of {base.precision} are predicted only {where}")
        raise InvalidInput(f"{none}; combine it with autocast, as in amp+channels_last")
    return remove(base, layout)


def _require_fp32(base: Base, speeds_up: str, *refused: Precision) -> None:
    """Raise `InvalidInput` without products, or if most of them have a refused precision."""
    products = np.array([one in PRODUCTS for one in kernel_classes(base)], dtype=np.bool_)
    products &= base.on_device
    if not products.any():
        raise InvalidInput(
            f"{speeds_up} matrix products and convolutions on a device, but the trace shows no "
            "kernel of one"
        )
    refuse_precision(base, products, *refused)
    if any(name.startswith(RECOMPUTED) for name in base.names.ops):
        raise InvalidInput(
            "recomputed blocks take the time of the forward pass as it then is; name the precision "
            "first, as in amp+recompute"
        )


def _scaled(base: Base, classes: np.ndarray, table: FactorTable, reading: Reading) -> Base:
    """Kernels take the factor of their class. Products in TF32 already have a part of it."""
    factors = {one: table.factor(one, reading) for one in KernelClass}
    factor = np.array([1.0 if one is None else factors[one] for one in classes])
    for op, one in enumerate(classes):
        if one in PRODUCTS and precision_of(base.names.ops[op]) is Precision.TF32:
            factor[op] /= min(1.0, 2 * table.tf32.at(reading) * factor[op])
    return replace(base, duration_s=base.duration_s * factor)


@dataclass(frozen=True)
class ProductCall:
    """One product: its device ops in order of launch, on one stream first."""

    work: ProductWork
    ops: IntArray


def product_calls(base: Base) -> list[ProductCall]:
    """The recorded products of a step whose work is known, without those of the optimizer.

    What-ifs may have added kernels of an operator since: passes that repeat, and casts.
    """
    works = [product_work(operator) for operator in base.names.operators]
    ops_of: dict[int, list[int]] = {}
    for op in base.launched.tolist():
        call = int(base.operator[op])
        recorded = base.event[op] != NONE and base.kind[op] != Kind.UPDATE
        if call != NONE and works[call] is not None and recorded:
            ops_of.setdefault(call, []).append(op)
    return [
        ProductCall(work, np.array(ops, dtype=np.int64))
        for call, ops in ops_of.items()
        if (work := works[call]) is not None
    ]


def _products(
    faster: Base, base: Base, table: FactorTable, factor: float, reading: Reading
) -> Base:
    """Let products take `factor` of their time in 16 bit; `base` has the times of before.

    What-ifs named before may have changed these: a batch, a faster device. Their factor on the
    recorded time stays. Kernels that they repeat change as the recorded ones do.
    """
    added = _added(base)
    duration_s = faster.duration_s.copy()
    gone = np.zeros(base.ops, dtype=np.bool_)
    behind: list[int] = []
    layout_s: list[float] = []
    for call in product_calls(base):
        roofline = table.products.get(call.work.kind)
        if roofline is None:
            continue  # the factor of its class holds
        seconds = roofline.seconds(call.work, factor) * roofline.spread.at(reading)
        before_s = max(float(base.duration_s[call.ops].sum()), 1e-12)
        seconds *= before_s / max(float(base.recorded_s[call.ops].sum()), 1e-12)
        names = {base.names.ops[op] for op in call.ops.tolist()}
        repeated = [
            op
            for op in added.get(int(base.operator[call.ops[0]]), ())
            if base.names.ops[op] in names
        ]
        duration_s[repeated] = base.duration_s[repeated] * (seconds / before_s)
        kept = _kept(base, call)
        gone[call.ops] = True
        gone[kept] = False
        share = base.duration_s[kept] / max(float(base.duration_s[kept].sum()), 1e-12)
        duration_s[kept] = seconds * share
        if call.work.layout:
            behind.append(int(kept[-1]))
            layout_s.append(table.layout_seconds(call.work, factor))
    faster = remove(replace(faster, duration_s=duration_s), gone)
    if not behind:
        return faster
    return _insert(faster, behind, np.array(layout_s), LAYOUT_KERNEL)


def _added(base: Base) -> dict[int, list[int]]:
    """Call of an operator -> device ops that what-ifs have added to it."""
    added: dict[int, list[int]] = {}
    chosen = base.on_device & (base.event == NONE) & (base.operator != NONE)
    for op in np.flatnonzero(chosen).tolist():
        added.setdefault(int(base.operator[op]), []).append(op)
    return added


def _insert(base: Base, after: list[int], duration_s: FloatArray, name: str) -> Base:
    """Insert device ops of one name behind those of `after`, of their kinds."""
    grown = insert(base, np.array(after), duration_s, [name] * len(after), Kind.OTHER)
    kind = grown.kind.copy()
    kind[base.ops : base.ops + len(after)] = base.kind[after]
    return replace(grown, kind=kind)


def _without_shapes(base: Base, table: FactorTable, factor: float, reading: Reading) -> Base:
    """Products take `factor` of their class's time in 16 bit; those with shapes are set later."""
    ops = np.array([one in PRODUCTS for one in kernel_classes(base)]) & (base.kind != Kind.UPDATE)
    share = np.array(
        [
            min(1.0, factor * table.factor(one, reading)) if product else 1.0
            for one, product in zip(kernel_classes(base), ops, strict=True)
        ]
    )
    return replace(base, duration_s=base.duration_s * share)


def _kept(base: Base, call: ProductCall) -> IntArray:
    """The longest device ops of the stream that does most of the call's work."""
    queues = base.queue[call.ops]
    busy_s = {queue: base.duration_s[call.ops[queues == queue]].sum() for queue in set(queues)}
    ops = call.ops[queues == max(busy_s, key=lambda queue: float(busy_s[queue]))]
    longest = np.argsort(-base.duration_s[ops], kind="stable")
    kept: IntArray = np.sort(ops[longest[: KEPT_KERNELS * call.work.directions]])
    return kept


def _casts(faster: Base, base: Base, table: FactorTable, reading: Reading) -> Base:
    """Insert the casts of weights, biases and inputs behind the products that need them."""
    layer_norm = bool(select(base, name=r"layer_?norm|LayerNorm|rms_?norm|RMSNorm").any())
    shapes = parameter_shapes(base)
    casts = [
        (int(_kept(base, call)[-1]), _cast_elements(base, call, layer_norm, shapes))
        for call in product_calls(base)
    ]
    for one in range(max((len(elements) for _, elements in casts), default=0)):
        places = [place for place, elements in casts if len(elements) > one]
        sizes = [elements[one] for _, elements in casts if len(elements) > one]
        faster = _insert_casts(faster, places, sizes, table, reading)
    return faster


def _cast_elements(
    base: Base, call: ProductCall, layer_norm: bool, shapes: set[Shape]
) -> list[float]:
    """Elements of the tensors that are cast around a product with parameters."""
    operator = base.names.operators[base.operator[call.ops[0]]]
    assert operator.inputs is not None
    dims = operator.inputs.dims
    if "convolution" in operator.name:
        return [float(prod(dims[2 if "backward" in operator.name else 1]))]
    if call.work.kind is not KernelClass.GEMM:
        return []
    first = 1 if operator.name == "aten::addmm" else 0
    one, two = dims[first], dims[first + 1]
    if base.kind[call.ops[0]] == Kind.FORWARD:
        if not shapes.isdisjoint((two, two[::-1])):
            bias = [float(prod(dims[0]))] if first else []
            return [float(prod(two)), *bias, *([float(prod(one))] if layer_norm else [])]
        return []
    out = (one[0], two[-1])
    if not shapes.isdisjoint((out, out[::-1])):
        return [float(prod(out)), float(max(out))]  # gradients of the weight and of the bias
    return [float(prod(out))] if layer_norm else []


def _insert_casts(
    base: Base, after: list[int], elements: list[float], table: FactorTable, reading: Reading
) -> Base:
    duration_s = np.array(elements) * 6 / table.cast_bytes_per_s + table.cast_s
    grown = _insert(base, after, duration_s, "cast (predicted)")
    host_s = grown.duration_s.copy()
    host_s[base.ops + len(after) :] += table.cast_host_s.at(reading)
    return replace(grown, duration_s=host_s)
