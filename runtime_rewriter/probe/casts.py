"""Times casts between float32 and bfloat16 and those of their gradients, with autograd around."""

from __future__ import annotations

import time

import torch

CHAIN = 8
"""Casts to bfloat16 and back in a chain, which shares the start of the backward pass."""
WARM_UP, MOST_REPEATS = 2, 20
ENOUGH_S = 0.1


def cast_times_s(dims: tuple[int, ...]) -> tuple[float, float]:
    """Seconds of a cast of a tensor of these sizes, and of the node that casts its gradient.

    Means over both directions; of several repeats the shortest, which met the least other work.
    """
    torch.manual_seed(0)
    source = torch.rand(dims, requires_grad=True)
    gradient = torch.rand(dims)
    forward_s, backward_s = [], []
    end_s = time.perf_counter() + ENOUGH_S
    for repeat in range(WARM_UP + MOST_REPEATS):
        begun_s = time.perf_counter()
        cast = source
        for _ in range(CHAIN):
            cast = cast.to(torch.bfloat16).to(torch.float32)
        between_s = time.perf_counter()
        torch.autograd.grad(cast, source, gradient)
        if repeat >= WARM_UP:
            backward_s.append(time.perf_counter() - between_s)
            forward_s.append(between_s - begun_s)
        if forward_s and time.perf_counter() > end_s:
            break
    return min(forward_s) / (2 * CHAIN), min(backward_s) / (2 * CHAIN)
