"""The time of gloo's binomial tree: ranks pass on complete tensors; transfers share links evenly.

The slowest port of a broadcast does not decide its time. Take two hosts with two devices each: if
the root is the second device of its host, that host waits for a tensor that comes back.

| symbol | meaning |
|---|---|
| n | members, counted from the root (so that the root is 0) |
| T | transfers in flight |
| P | ports |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.arrays import FloatArray, IntArray

_TOGETHER = 1e-9
"""A transfer ends if at most this share of it is left: close transfers end together."""


def senders(count: int) -> IntArray:
    """Senders to members 1 .. n - 1: their numbers without the highest bit (gloo/broadcast.cc)."""
    numbers = np.arange(1, count)
    return numbers - (1 << (np.frexp(numbers)[1].astype(np.int64) - 1))


def tree_s_per_byte(paths: Sequence[tuple[int, ...]], s_per_byte: FloatArray) -> float:
    """Seconds per byte of the tensor until the last member has it.

    `paths`: the one or two ports of the transfer to each member 1 .. n - 1. `s_per_byte` (P,).
    """
    source = senders(len(paths) + 1)
    no_port = len(s_per_byte)  # the second port of a transfer with only one
    loads = np.array([(*ports, no_port)[:2] for ports in paths], dtype=np.int64)
    bytes_per_s = np.append(1.0 / s_per_byte, np.inf)
    left = np.ones(len(paths))
    in_flight = source == 0
    now_s = 0.0
    while in_flight.any():
        active = np.flatnonzero(in_flight)
        rate = _shared(loads[active], bytes_per_s)
        step_s = float((left[active] / rate).min())
        now_s += step_s
        left[active] -= rate * step_s
        ended = active[left[active] <= _TOGETHER]
        in_flight[ended] = False
        in_flight |= np.isin(source, ended + 1) & (left > _TOGETHER)
    return now_s


def _shared(loads: IntArray, bytes_per_s: FloatArray) -> FloatArray:
    """Max-min fair rates in bytes per second, shape (T,).

    `loads` (T, 2): ports of the transfers. `bytes_per_s` (P + 1,): rates of the ports.
    """
    rate = np.full(len(loads), np.inf)
    free = bytes_per_s.copy()
    waiting = np.ones(len(loads), dtype=np.bool_)
    while waiting.any():
        users = np.bincount(loads[waiting].ravel(), minlength=len(free))
        share = np.divide(free, users, out=np.full(len(free), np.inf), where=users > 0)
        port = int(share.argmin())
        limited = waiting & (loads == port).any(axis=1)
        rate[limited] = share[port]
        taken = np.bincount(loads[limited].ravel(), minlength=len(free))
        free = free - taken * share[port]
        waiting &= ~limited
    return rate
