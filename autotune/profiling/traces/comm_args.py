"""What events say about collectives: of record_param_comms, of NCCL and RCCL kernels, of gloo's annotations and of this package's own."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from autotune.profiling.traces.rank_trace import MISSING, Category, Comm

MESSAGE = "autotune.message#"
"""An annotation that begins so is a message of its own kind; its transaction id follows."""

PARAM_COMMS = "record_param_comms"
"""The op in which a process group says what a collective is: to Kineto as arguments, to an execution trace as inputs."""

_ELEMENT_BYTES = {
    **dict.fromkeys(
        (
            "byte",
            "char",
            "bool",
            "int8",
            "uint8",
            "signed char",
            "unsigned char",
            "float8_e4m3fn",
            "float8_e5m2",
        ),
        1,
    ),
    **dict.fromkeys(("half", "bfloat16", "short", "int16", "float16"), 2),
    **dict.fromkeys(("float", "int", "float32", "int32"), 4),
    **dict.fromkeys(("double", "long", "long int", "int64", "float64", "complexfloat"), 8),
}
_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allreduce_sparse": "all_reduce",
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_all_gather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "all_to_allv": "all_to_all",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "_reduce_oop": "reduce",
    "_broadcast_oop": "broadcast",
    "coalesced": "coalesced",
}
COLLECTIVES = frozenset(
    {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "barrier",
        "send",
        "recv",
        "coalesced",
    }
)
MUTUAL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Of these no rank can end before every rank has begun."""

_KERNEL = re.compile(
    r"(?:nccl|rccl)(?:\w*?_)?(AllReduce|AllGather|AllToAll|ReduceScatter|Broadcast|Reduce|SendRecv|Generic)(?![a-z])"
)
"""Oldest first: `ncclAllReduceRingLLKernel_sum_f32`, `ncclKernel_AllReduce_...`, `ncclDevKernel_AllReduce_...`, `ncclSymkDevKernel_...`."""
_UNTOLD_KERNEL = re.compile(r"rccl_main_kernel|mscclKernel_")
"""Of RCCL: one kernel for all kinds, which the host's events tell."""
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
_BACKEND = re.compile(r"(nccl|gloo|ucc|mpi):(\w+)")


def collective_name(name: str) -> str:
    """One name per kind of collective, whatever a backend calls it."""
    plain = name.strip().rstrip("_").lower()
    return _NAMES.get(plain, plain)


def backend_collective(name: str) -> str:
    """What `gloo:all_reduce` and the like are, "" for any other name and for a mere `wait`."""
    match = _BACKEND.match(name)
    plain = collective_name(match.group(2)) if match else ""
    return plain if plain in COLLECTIVES else ""


def comm_of(name: str, category: Category, args: Mapping[str, Any]) -> Comm | None:
    """The collective that the event belongs to, None for an ordinary event and for a mere `wait`."""
    given = args.get("Collective name")
    if isinstance(given, str):
        return _from_args(collective_name(given), args)
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
    return Comm("") if _UNTOLD_KERNEL.match(plain) else None


def _from_args(name: str, args: Mapping[str, Any]) -> Comm | None:
    if name not in COLLECTIVES:
        return None
    dtype = str(args.get("dtype", ""))
    elements = max(_count(args.get("In msg nelems")), _count(args.get("Out msg nelems")))
    return Comm(
        name,
        float(elements * element_bytes(dtype)),
        dtype,
        str(args.get("Process Group Name", ""))[:80],
        _ranks(args.get("Process Group Ranks"), args),
        _count(args.get("Seq"), MISSING),
        _count(args.get("Root Rank"), MISSING),
        transaction=_transaction(_own(args)),
        peer=_count(args.get("Dst Rank", args.get("Src Rank")), MISSING),
        queued_s=_queued_s(_own(args)),
    )


def _own(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """What this package's recorder says."""
    said = args.get("autotune")
    return said if isinstance(said, dict) else {}


def _transaction(own: Mapping[str, Any]) -> str:
    said = own.get("transaction")
    return str(said)[:200] if said is not None else ""


def _queued_s(own: Mapping[str, Any]) -> float:
    """`queue_us` is the span's start less `issued_us`, whose clock is that of the whole file and not of one event."""
    said = own.get("queue_us")
    if isinstance(said, int | float) and not isinstance(said, bool) and 0 <= said < 1e12:
        return float(said) * 1e-6
    return 0.0


def element_bytes(dtype: str) -> int:
    """Bytes per element of a dtype as profilers write it (`Float`, `c10::BFloat16`, `long int`); 0 for one that is unknown."""
    plain = dtype.lower().removeprefix("c10::").removeprefix("torch.")
    return _ELEMENT_BYTES.get(plain, 0)


def _dims_bytes(args: Mapping[str, Any]) -> float:
    """Bytes of the first tensor in `Input Dims` and `Input type`."""
    dims = args.get("Input Dims")
    first = dims[0] if isinstance(dims, list) and dims else None
    if isinstance(first, list) and all(isinstance(d, int) and d >= 0 for d in first) and first:
        return float(math.prod(first) * element_bytes(_dtype(args)))
    return 0.0


def _dtype(args: Mapping[str, Any]) -> str:
    types = args.get("Input type")
    return str(types[0])[:40] if isinstance(types, list) and types else ""


def _ranks(text: Any, args: Mapping[str, Any]) -> tuple[int, ...]:
    """From "[0, 1, 2]"; long lists are cut off by the profiler ("[0, 1, ...]"), then from start, stride and size."""
    size = _count(args.get("Group size"))
    found = (
        tuple(int(number) for number in re.findall(r"\d+", text)) if isinstance(text, str) else ()
    )
    if size and len(found) != size:
        first, stride = (
            _count(args.get("Global rank start"), MISSING),
            _count(args.get("Global rank stride"), MISSING),
        )
        found = (
            tuple(range(first, first + size * stride, stride))
            if first >= 0 and stride > 0 and size <= 10**6
            else ()
        )
    return found


def _count(value: Any, default: int = 0) -> int:
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
        else default
    )
