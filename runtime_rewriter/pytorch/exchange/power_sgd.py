"""PowerSGD: a matrix travels as two thin ones (Vogels, Karimireddy, Jaggi, NeurIPS 2019, Alg. 1 and 2).

| symbol | meaning | shape |
|---|---|---|
| M_r | a slice's part on rank r with its residual, first dimension by all others | (n, m) |
| k | rank of the approximation | |
| Q | start: what the last step found, with columns of length 1 | (m, k) |
| P | sum over r of M_r Q; then an orthonormal basis of its columns | (n, k) |
| Q_r, Q' | M_r^T P, and its sum over r | (m, k) |

The sum of all ranks becomes P Q'^T, and P Q_r^T is the share that rank r has sent, so M_r - P Q_r^T stays behind there (Alg. 2).
The sums P and Q' may be made by any exchange that gives all ranks the same bits; the rest every rank computes alike.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime_rewriter.pytorch.exchange.residuals import drop_non_finite_


def gains(shape: Sequence[int], rank: int) -> bool:
    """P and Q together are smaller than the slice; others, all vectors among them, travel as they are."""
    rows, columns = matrix_shape(shape)
    return len(shape) > 1 and rank * (rows + columns) < rows * columns


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(n, m)."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def initial_start(name: str, columns: int, rank: int, like: Tensor) -> Tensor:
    """The first Q of a slice, equal on all ranks: seeded by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    start = torch.randn(columns, rank, generator=generator, dtype=torch.float64, device="cpu")
    result: Tensor = (start / start.norm(dim=0)).to(like)
    return result


@dataclass(frozen=True)
class Factored:
    """A matrix: its slice's number, views of the message and of the two sums."""

    number: int
    matrix: Tensor  # (n, m)
    left: Tensor  # (n, k)
    right: Tensor  # (m, k)


class LowRank:
    """The arithmetic of one message between its sums.

    `left` and `right` are the flat buffers of the two sums, a multiple of `multiple` elements each; what travels as it is
    lies behind the P in the first one.
    """

    def __init__(
        self,
        values: Tensor,
        shapes: Sequence[Sequence[int]],
        rank: int,
        multiple: int,
        start_of: Callable[[int], Tensor],
    ) -> None:
        """`values`: flat, the slices of `shapes` behind each other. `start_of(i)`: Q of slice i, (m, k), changed in place; asked
        for at every step, since a checkpoint may bring another one."""
        sizes = [math.prod(shape) for shape in shapes]
        parts = list(values[: sum(sizes)].split(sizes))
        factored = [number for number, shape in enumerate(shapes) if gains(shape, rank)]
        whole = [number for number in range(len(shapes)) if number not in set(factored)]
        sides = [matrix_shape(shapes[number]) for number in factored]
        behind = sum(rows * rank for rows, _ in sides)
        self.left = _buffer(behind + sum(sizes[number] for number in whole), multiple, values)
        self.right = _buffer(sum(columns * rank for _, columns in sides), multiple, values)
        lefts = self.left[:behind].split([rows * rank for rows, _ in sides])
        rights = self.right[: sum(columns * rank for _, columns in sides)].split(
            [columns * rank for _, columns in sides]
        )
        self._factored = [
            Factored(number, parts[number].view(side), left.view(-1, rank), right.view(-1, rank))
            for number, side, left, right in zip(factored, sides, lefts, rights, strict=True)
        ]
        self._whole = [parts[number] for number in whole]
        self._whole_left = list(
            self.left[behind : behind + sum(sizes[number] for number in whole)].split(
                [sizes[n] for n in whole]
            )
        )
        self._values, self._start_of = values, start_of

    def project(self) -> None:
        """Fill `left` for the first sum."""
        for one in self._factored:
            torch.mm(one.matrix, self._start_of(one.number), out=one.left)
        if self._whole:
            torch._foreach_copy_(self._whole_left, self._whole)

    def project_back(self) -> None:
        """With the first sum in `left`: fill `right` for the second one, and leave in the message what this rank does not send."""
        for one in self._factored:
            one.left.copy_(torch.linalg.qr(one.left).Q)
            torch.mm(one.matrix.T, one.left, out=one.right)
            one.matrix.addmm_(one.left, one.right.T, alpha=-1)
        if self._whole:
            torch._foreach_zero_(self._whole)
        drop_non_finite_(self._values, self.right)

    def restore(self) -> None:
        """With both sums: the message, and the start of the next step."""
        for one in self._factored:
            torch.mm(one.left, one.right.T, out=one.matrix)
            length = one.right.norm(dim=0)
            # A column of zeros would stay zeros for ever, and NaN would stay NaN: there the earlier start is kept.
            usable = length.isfinite() & (length > 0)
            start = self._start_of(one.number)
            start.copy_(torch.where(usable, one.right / length, start))
        if self._whole:
            torch._foreach_copy_(self._whole, self._whole_left)


def _buffer(elements: int, multiple: int, like: Tensor) -> Tensor:
    return like.new_zeros(-(-elements // multiple) * multiple)
