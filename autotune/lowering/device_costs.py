"""The runtime's costs on accelerators: copies are kernels there, and calls only launch them.

The constants of `RuntimeCosts` are those of a rank whose CPU computes. On a GPU, packing a gradient
takes the host a few calls, and the device the time of its memory. The H100's values were measured
by `python -m benchmarks.device_costs` on the recordings of `datasets/gpu_traces/h100`; host times
include the profiler's, so they are upper bounds. Those of other devices are assumed: the H100's,
with costs per byte by the ratio of the memories' rates where a data sheet is known.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from autotune.lowering.costs import ASSUMED, Constant, RuntimeCosts

H100_MEMORY_BYTES_PER_S = 3.35e12
_MEMORIES = (
    ("H200", 4.8e12),
    ("H100 PCIe", 2.0e12),
    ("H100", H100_MEMORY_BYTES_PER_S),
    ("A100.*80GB", 2.04e12),
    ("A100", 1.555e12),
    ("MI300X", 5.3e12),
    ("MI250", 3.2e12),
    ("V100", 0.9e12),
    ("P100", 0.732e12),
    ("A10G?\\b", 0.6e12),
    ("L4\\b", 0.3e12),
    ("T4\\b", 0.32e12),
    ("P4000", 0.243e12),
)
"""Memory rates by data sheet (bytes per second); the first pattern that matches counts."""

_MEASURED = "measured on an H100 (80 GB, HBM3) by `python -m benchmarks.device_costs`, as recorded"
_PASSES = f"{ASSUMED}: passes over the memory at the rate that packing reached on an H100"
_HOST = f"{ASSUMED}: calls of an H100's host, each as long as packing a gradient"
_NO_THREAD = f"{ASSUMED}: NCCL queues a step without a thread, by one such call of an H100's host"
_PYTHON = f"{ASSUMED}: Python of a rank's host, as in `python -m benchmarks.runtime_costs` on CPUs"
PACK_CALLS_S, UNPACK_CALLS_S = 1.7e-05, 1.5e-05
PACK_S_PER_BYTE, UNPACK_S_PER_BYTE = 1 / 2.6e12, 1 / 1.4e12
TRAFFIC_S_PER_BYTE = UNPACK_S_PER_BYTE / 2
"""A byte that is read or written; an unpacked byte is both."""


def _passed(moved_bytes: float) -> Constant:
    return Constant(TRAFFIC_S_PER_BYTE * moved_bytes, _PASSES)


def _called(calls: int) -> Constant:
    return Constant(PACK_CALLS_S * calls, _HOST)


def _as_on_cpus(constant: str) -> Constant:
    return Constant(RuntimeCosts()[constant], _PYTHON)


CONTENTION = Constant(
    1 / (1 - 0.228) - 1,
    "Daydream, sec. 6.5: NCCL's calls took 22.8 % less time behind a synchronization",
)
"""NCCL's kernels compete with others for processors and memory of the device."""
_ON_GPU = {
    "bucket_s": Constant(PACK_CALLS_S, _MEASURED),
    "pack_s_per_byte": Constant(PACK_S_PER_BYTE, _MEASURED),
    "write_s": Constant(UNPACK_CALLS_S, _MEASURED),
    "unpack_s_per_byte": Constant(UNPACK_S_PER_BYTE, _MEASURED),
    "issue_s": Constant(0.00024, _MEASURED),
    "lane_s": replace(_called(1), source=_NO_THREAD),
    "piece_s": replace(_called(1), source=_NO_THREAD),
    "fill_s": _called(1),
    "defer_s": _as_on_cpus("defer_s"),
    "settle_s": _as_on_cpus("settle_s"),
    "buffer_s": _as_on_cpus("buffer_s"),
    "cast_s_per_byte": _passed(1.5),
    "settle_each_s": _called(1),
    "settle_s_per_byte": _passed(5),
    "int8_encode_s": _called(4),
    "int8_encode_s_per_element": _passed(9),
    "int8_decode_s": _called(2),
    "int8_decode_s_per_element": _passed(5),
    "top_k_find_s": _called(4),
    "top_k_find_s_per_element": _passed(32),
    "top_k_add_s": _called(2),
    "top_k_add_s_per_element": _passed(64),
    "rows_take_s": _called(8),
    "rows_take_s_per_byte": _passed(8),
    "rows_add_s": _called(12),
    "rows_add_s_per_byte": _passed(3),
    "rows_write_s": _called(2),
    "rows_write_s_per_byte": _passed(2),
    "sum_s_per_byte": _passed(3),
    "low_rank_s": _called(2),
    "low_rank_s_per_flop": _passed(1),
    "collective_s": Constant(
        2.6e-05, f"{ASSUMED}: as 2 KiB on two A100 of one host (microsoft/vidur's table)"
    ),
}
"""Passes: int8 reads twice and writes once; a radix select reads 8 times; an element that is added
alone moves two sectors of 32 bytes; PowerSGD at rank 4 reads an element for 4 multiplications."""
_ONE_AT_A_TIME = Constant(
    1, "NCCL: the collectives of a communicator follow each other on its stream"
)
_H100 = replace(
    RuntimeCosts(),
    **_ON_GPU,
    contention=CONTENTION,
    lane_first_s=Constant(0.0, "NCCL: lanes have no threads that could sleep"),
    threads=_ONE_AT_A_TIME,
    star_threads=_ONE_AT_A_TIME,
    queued=Constant(1, "NCCL: `runtime_rewriter.pytorch.exchange.lanes` has no threads there"),
)


def costs_of(device: str, name: str = "") -> RuntimeCosts:
    """The costs of a rank that computes on `device`, such as "cpu" or "cuda".

    `name`: the device's, such as "NVIDIA H100 80GB HBM3"; "" if it is unknown.
    """
    return RuntimeCosts() if device.startswith("cpu") else _accelerator(name)


def memory_bytes_per_s(name: str) -> float | None:
    """The rate of a device's memory by data sheet; None for one that is not listed."""
    return next((rate for known, rate in _MEMORIES if re.search(known, name)), None)


@cache
def _accelerator(name: str) -> RuntimeCosts:
    if "H100" in name and "PCIe" not in name:
        return _H100
    rate = memory_bytes_per_s(name)
    ratio = 1.0 if rate is None else H100_MEMORY_BYTES_PER_S / rate
    how = "" if rate is None else ", costs per byte by the ratio of the memories' rates"
    scaled = {}
    for constant, known in _ON_GPU.items():
        per_size = constant.endswith(("_per_byte", "_per_element", "_per_flop"))
        value = known.value * (ratio if per_size else 1.0)
        source = known.source if known.is_assumed else f"{ASSUMED}: as on an H100{how}"
        scaled[constant] = Constant(value, source)
    return replace(_H100, **scaled)
