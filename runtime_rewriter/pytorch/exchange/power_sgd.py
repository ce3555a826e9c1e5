"""PowerSGD: a matrix travels as two thin ones (Vogels, Karimireddy, Jaggi, NeurIPS 2019, Alg. 1 and
2).

| symbol | meaning | shape |
|---|---|---|
| M_r | a slice on rank r with its residual, as a matrix: first dimension by all others | (n, m) |
| k | rank of the approximation | |
| Q | start: the result of the last step, with columns of length 1 | (m, k) |
| P | sum over r of M_r Q; then an orthonormal basis of its columns | (n, k) |
| Q_r, Q' | M_r^T P, and its sum over r | (m, k) |

The sum over all ranks becomes P Q'^T. Rank r has sent P Q_r^T, so its residual is M_r - P Q_r^T
(Alg. 2). Any exchange that gives all ranks the same bits may compute the sums P and Q'. Every rank
computes the rest in the same way.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime_rewriter.compression import gains, initial_start, matrix_shape
from runtime_rewriter.pytorch.exchange.residuals import drop_non_finite_


def start_tensor(name: str, columns: int, rank: int, like: Tensor) -> Tensor:
    """The first Q of a slice (see `initial_start`), with the dtype and device of `like`."""
    result: Tensor = torch.from_numpy(initial_start(name, columns, rank)).to(like)
    return result


@dataclass(frozen=True)
class Factored:
    """A matrix: its slice's number, views of the message and of the two sums."""

    number: int
    matrix: Tensor  # (n, m)
    left: Tensor  # (n, k)
    right: Tensor  # (m, k)


class LowRank:
    """The arithmetic of one message between its two sums.

    `left` and `right` are the flat buffers of the sums, a multiple of `multiple` elements each.
    `left` holds the P of all slices, then the slices that travel whole.
    """

    def __init__(
        self,
        values: Tensor,
        shapes: Sequence[Sequence[int]],
        rank: int,
        multiple: int,
        start_of: Callable[[int], Tensor],
    ) -> None:
        """`values`: flat, the slices of `shapes` one after the other.

        `start_of(i)`: Q of slice i, (m, k), changed in place. It is called at every step, since
        loading a checkpoint replaces Q.
        """
        sizes = [math.prod(shape) for shape in shapes]
        parts = list(values[: sum(sizes)].split(sizes))
        factored = [number for number, shape in enumerate(shapes) if gains(shape, rank)]
        whole = [number for number in range(len(shapes)) if number not in set(factored)]
        sides = [matrix_shape(shapes[number]) for number in factored]
        whole_sizes = [sizes[number] for number in whole]
        left_sizes = [rows * rank for rows, _ in sides]
        right_sizes = [columns * rank for _, columns in sides]
        self.left = _buffer(sum(left_sizes) + sum(whole_sizes), multiple, values)
        self.right = _buffer(sum(right_sizes), multiple, values)
        lefts = self.left[: sum(left_sizes)].split(left_sizes)
        rights = self.right[: sum(right_sizes)].split(right_sizes)
        self._factored = [
            Factored(number, parts[number].view(side), left.view(-1, rank), right.view(-1, rank))
            for number, side, left, right in zip(factored, sides, lefts, rights, strict=True)
        ]
        self._whole = [parts[number] for number in whole]
        end = sum(left_sizes) + sum(whole_sizes)
        self._whole_left = list(self.left[sum(left_sizes) : end].split(whole_sizes))
        self._values = values
        self._start_of = start_of

    def project(self) -> None:
        """Fill `left` for the first sum."""
        for one in self._factored:
            torch.mm(one.matrix, self._start_of(one.number), out=one.left)
        if self._whole:
            torch._foreach_copy_(self._whole_left, self._whole)

    def project_back(self) -> None:
        """Fill `right` for the second sum from the first one in `left`.

        The message then holds this rank's residual.
        """
        for one in self._factored:
            one.left.copy_(torch.linalg.qr(one.left).Q)
            torch.mm(one.matrix.T, one.left, out=one.right)
            one.matrix.addmm_(one.left, one.right.T, alpha=-1)
        if self._whole:
            torch._foreach_zero_(self._whole)
        drop_non_finite_(self._values, self.right)

    def restore(self) -> None:
        """Write the message and the start of the next step from both sums."""
        for one in self._factored:
            torch.mm(one.left, one.right.T, out=one.matrix)
            length = one.right.norm(dim=0)
            # A column of zeros or NaNs would stay so for ever: keep the earlier start there.
            usable = length.isfinite() & (length > 0)
            start = self._start_of(one.number)
            start.copy_(torch.where(usable, one.right / length, start))
        if self._whole:
            torch._foreach_copy_(self._whole, self._whole_left)


def _buffer(elements: int, multiple: int, like: Tensor) -> Tensor:
    return like.new_zeros(-(-elements // multiple) * multiple)
