"""Reads an event's collective from its name and arguments.

Covers events of record_param_comms, NCCL and RCCL kernels, gloo's annotations and this package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from autotune.limits import MAX_ELEMENTS, MAX_RANKS
from autotune.profiling.formats.limits import limited, limited_rank
from autotune.profiling.formats.rank_trace import MISSING, Category, Comm
from autotune.profiling.formats.stated_numbers import stated_count, stated_whole

MESSAGE = "autotune.message#"
"""An annotation with this prefix is a message of its own kind; its transaction id follows."""

PARAM_COMMS = "record_param_comms"
"""The op by which a process group describes a collective.

Kineto has the description as arguments, an execution trace as inputs."""

_BYTES_OF_TYPES = {
    1: "byte char bool int8 uint8 signed_char unsigned_char float8_e4m3fn float8_e5m2",
    2: "half bfloat16 short int16 float16",
    4: "float int float32 int32",
    8: "double long long_int int64 float64 complexfloat",
}
_ELEMENT_BYTES = {name: size for size, names in _BYTES_OF_TYPES.items() for name in names.split()}
_ALIASES = {
    "all_reduce": "allreduce allreduce_coalesced allreduce_sparse",
    "all_gather": "allgather _allgather_base _all_gather_base all_gather_into_tensor_coalesced "
    "allgather_into_tensor_coalesced",
    "reduce_scatter": "reducescatter _reduce_scatter_base reduce_scatter_tensor_coalesced",
    "all_to_all": "all_to_allv alltoall alltoall_base all_to_all_single",
    "reduce": "_reduce_oop",
    "broadcast": "_broadcast_oop",
}
_NAMES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
MUTUAL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Collectives that no rank can end before every rank has begun."""
COLLECTIVES = MUTUAL | {"broadcast", "reduce", "gather", "scatter", "send", "recv", "coalesced"}

_KERNEL_NAMES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "AllToAll": "all_to_all",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "SendRecv": "send_recv",
    "Generic": "",
}
_KERNEL = re.compile(rf"(?:nccl|rccl)(?:\w*?_)?({'|'.join(_KERNEL_NAMES)})(?![a-z])")
"""Oldest first: `ncclAllReduceRingLLKernel_sum_f32`, `ncclKernel_AllReduce_...`,
`ncclDevKernel_AllReduce_...`, `ncclSymkDevKernel_...`."""
_UNNAMED_KERNEL = re.compile(r"rccl_main_kernel|mscclKernel_")
"""RCCL has one kernel for all kinds; the host's events state the kind."""
_BACKEND = re.compile(r"(nccl|gloo|ucc|mpi|horovod):(\w+)")
_EXECUTING_MARK = re.compile(r"(?:gloo|ucc|mpi|tf|horovod):|autotune\.message#")


def is_executing_mark(name: str) -> bool:
    """Whether an annotation is the collective itself, run by a thread of the backend.

    `nccl:` encloses only a launch.
    """
    return _EXECUTING_MARK.match(name) is not None


def collective_name(name: str) -> str:
    """One name per kind of collective, whatever a backend calls it."""
    plain = name.strip().rstrip("_").lower()
    return _NAMES.get(plain, plain)


def backend_collective(name: str) -> str:
    """The collective of a name such as `gloo:all_reduce`; "" for other names and for `wait`."""
    match = _BACKEND.match(name)
    plain = collective_name(match.group(2)) if match else ""
    return plain if plain in COLLECTIVES else ""


def comm_of(name: str, category: Category, args: Mapping[str, Any]) -> Comm | None:
    """The collective that the event belongs to; None for ordinary events and for `wait`.

    Raises `InvalidInput` for sizes and ranks beyond the limits.
    """
    stated = args.get("Collective name")
    if isinstance(stated, str):
        return _from_args(collective_name(stated), args)
    if category == Category.KERNEL:
        return _from_kernel(name)
    if category == Category.HOST_MARK:
        if name.startswith(MESSAGE):
            return Comm("message", _dims_bytes(args), transaction=name.removeprefix(MESSAGE)[:200])
        if plain := backend_collective(name):
            return Comm(plain, _dims_bytes(args), _dtype(args))
    return None


def _from_kernel(name: str) -> Comm | None:
    plain = name.removeprefix("void ")
    if match := _KERNEL.match(plain):
        return Comm(_KERNEL_NAMES[match.group(1)])
    return Comm("") if _UNNAMED_KERNEL.match(plain) else None


def _from_args(name: str, args: Mapping[str, Any]) -> Comm | None:
    if name not in COLLECTIVES:
        return None
    dtype = str(args.get("dtype", ""))
    sizes = (args.get("In msg nelems"), args.get("Out msg nelems"))
    elements = max(
        limited(stated_count(size), MAX_ELEMENTS, "elements in a message") for size in sizes
    )
    recorded = args.get("autotune")  # by this package's recorder
    recorded = recorded if isinstance(recorded, dict) else {}
    transaction = recorded.get("transaction")
    return Comm(
        name,
        size_bytes=float(elements * element_bytes(dtype)),
        dtype=dtype,
        group=str(args.get("Process Group Name", ""))[:80],
        group_ranks=_ranks(args.get("Process Group Ranks"), args),
        sequence=_count(args.get("Seq"), MISSING),
        root=_count(args.get("Root Rank"), MISSING),
        transaction="" if transaction is None else str(transaction)[:200],
        peer=_count(args.get("Dst Rank", args.get("Src Rank")), MISSING),
        queued_s=_queued_s(recorded.get("queue_us")),
    )


def _queued_s(queue_us: Any) -> float:
    """`queue_us` is the span's start less `issued_us`, which is on the clock of the whole file."""
    number = isinstance(queue_us, int | float) and not isinstance(queue_us, bool)
    return float(queue_us) * 1e-6 if number and 0 <= queue_us < 1e12 else 0.0


def element_bytes(dtype: str) -> int:
    """Bytes per element of a profiler's dtype (`Float`, `c10::BFloat16`, `long int`); else 0."""
    plain = dtype.lower().removeprefix("c10::").removeprefix("torch.").replace(" ", "_")
    return _ELEMENT_BYTES.get(plain, 0)


def _dims_bytes(args: Mapping[str, Any]) -> float:
    """Bytes of the first tensor in `Input Dims` and `Input type`."""
    dims = args.get("Input Dims")
    first = dims[0] if isinstance(dims, list) and dims else None
    if not isinstance(first, list) or not first:
        return 0.0
    if not all(isinstance(extent, int) and extent >= 0 for extent in first):
        return 0.0
    elements = 0 if 0 in first else 1
    for extent in first:  # step by step: the product of a long list may have millions of digits
        elements = limited(elements * extent, MAX_ELEMENTS, "elements in a tensor")
    return float(elements * element_bytes(_dtype(args)))


def _dtype(args: Mapping[str, Any]) -> str:
    types = args.get("Input type")
    return str(types[0])[:40] if isinstance(types, list) and types else ""


def _ranks(text: Any, args: Mapping[str, Any]) -> tuple[int, ...]:
    """Ranks from "[0, 1, 2]"; the profiler cuts long lists off ("[0, 1, ...]").

    Those come from start, stride and size.
    """
    size = limited(stated_count(args.get("Group size")), MAX_RANKS, "ranks in a group")
    numbers = re.findall(r"\d+", text) if isinstance(text, str) else []
    if not size or len(numbers) == size:
        return tuple(limited_rank(int(number[:20])) for number in numbers)
    first = _count(args.get("Global rank start"), MISSING)
    stride = _count(args.get("Global rank stride"), MISSING)
    if first < 0 or stride <= 0:
        return ()
    limited_rank(first + (size - 1) * stride)
    return _strided(first, stride, size)


@lru_cache(maxsize=64)
def _strided(first: int, stride: int, size: int) -> tuple[int, ...]:
    """One tuple for the collectives of a group, which may have 100 000 ranks."""
    return tuple(range(first, first + size * stride, stride))


def _count(value: Any, default: int = 0) -> int:
    number = stated_whole(value)
    return number if 0 <= number < 2**53 else default
