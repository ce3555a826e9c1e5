"""How long gloo's binomial tree takes alone: whole tensors, handed on once they are complete, on links that those under way share evenly.

A broadcast's slowest port does not tell that: with two devices on each of two hosts, a root in the first place of its host sends
nothing but what the ports carry, one in the second place has its host wait for what comes back.

| symbol | meaning |
|---|---|
| n | members, counted from the root (so that the root is 0) |
| T | transfers under way |
| P | ports |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.arrays import FloatArray, IntArray

_TOGETHER = 1e-9
"""Transfers of which no larger part is left end together."""


def senders(count: int) -> IntArray:
    """Of each member 1 .. n - 1, who sends to it: the one without its highest bit (gloo/broadcast.cc), shape (n - 1,)."""
    numbers = np.arange(1, count)
    return numbers - (1 << (np.frexp(numbers)[1].astype(np.int64) - 1))


def tree_s_per_byte(paths: Sequence[tuple[int, ...]], s_per_byte: FloatArray) -> float:
    """Seconds per byte of the tensor until the last member has it.

    `paths`: of each member 1 .. n - 1, the one or two ports that the transfer to it loads. `s_per_byte` (P,): of every port.
    """
    source = senders(len(paths) + 1)
    nowhere = len(s_per_byte)  # the second port of a transfer that loads only one
    loads = np.array([(*ports, nowhere)[:2] for ports in paths], dtype=np.int64)
    bytes_per_s = np.append(1.0 / s_per_byte, np.inf)
    left = np.ones(len(paths))
    under_way = source == 0
    now_s = 0.0
    while under_way.any():
        active = np.flatnonzero(under_way)
        rate = _shared(loads[active], bytes_per_s)
        step_s = float((left[active] / rate).min())
        now_s += step_s
        left[active] -= rate * step_s
        ended = active[left[active] <= _TOGETHER]
        under_way[ended] = False
        under_way |= np.isin(source, ended + 1) & (left > _TOGETHER)
    return now_s


def _shared(loads: IntArray, bytes_per_s: FloatArray) -> FloatArray:
    """Max-min fair rates of the transfers, bytes per second, shape (T,); `loads` (T, 2): the ports of each; `bytes_per_s` (P + 1,)."""
    rate = np.full(len(loads), np.inf)
    free = bytes_per_s.copy()
    waiting = np.ones(len(loads), dtype=np.bool_)
    while waiting.any():
        users = np.bincount(loads[waiting].ravel(), minlength=len(free))
        share = np.divide(free, users, out=np.full(len(free), np.inf), where=users > 0)
        port = int(share.argmin())
        settled = waiting & (loads == port).any(axis=1)
        rate[settled] = share[port]
        taken = np.bincount(loads[settled].ravel(), minlength=len(free))
        free = free - taken * share[port]
        waiting &= ~settled
    return rate
