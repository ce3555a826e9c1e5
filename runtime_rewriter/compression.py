"""What compressors mean in every framework: which parts, shapes and starts they work on.

The arithmetic is each framework's own. int8 cuts a message into blocks with one scale each, top-k
sends a number of elements, and PowerSGD treats a slice as a matrix and starts from columns that its
name determines.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.strategy_space.compressors import INT8_BLOCK
from autotune.strategy_space.plan import TensorSlice

LEVELS = 127
"""int8: a block's largest magnitude is this many of its scales."""


@dataclass(frozen=True)
class RowLayout:
    """How int8 cuts a message into rows of equal length; the last ones may extend beyond its
    end."""

    rows: int
    blocks: int
    block: int

    @staticmethod
    def of(elements: int, rows: int) -> RowLayout:
        length = max(1, -(-elements // rows))
        blocks = -(-length // INT8_BLOCK)
        return RowLayout(rows, blocks, -(-length // blocks))

    @property
    def row_elements(self) -> int:
        return self.blocks * self.block

    @property
    def elements(self) -> int:
        """Elements of all rows, with the padding."""
        return self.rows * self.row_elements

    def with_rows(self, rows: int) -> RowLayout:
        return RowLayout(rows, self.blocks, self.block)


def picked(elements: int, ratio: float) -> int:
    """How many elements top-k sends, as in `Message.wire_bytes`."""
    return math.ceil(elements * ratio)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The matrix that PowerSGD makes of a slice: first dimension by all others."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def gains(shape: Sequence[int], rank: int) -> bool:
    """Whether PowerSGD's two factors together are smaller than the slice. Others, such as vectors,
    travel whole."""
    rows, columns = matrix_shape(shape)
    return len(shape) > 1 and rank * (rows + columns) < rows * columns


def initial_start(name: str, columns: int, rank: int) -> NDArray[np.float64]:
    """The first Q of a slice, (columns, rank), with columns of length 1.

    Seeded by the slice's `name`, and therefore equal on all ranks and in every framework.
    """
    start = np.random.default_rng(zlib.crc32(name.encode())).standard_normal((columns, rank))
    normal: NDArray[np.float64] = start / np.linalg.norm(start, axis=0)
    return normal


def seed_name(part: TensorSlice, rank: int) -> str:
    """The name of a slice in `initial_start`."""
    return f"{part.variable}|{part.axis}|{part.start}|{rank}"


def start_key(part: TensorSlice, rank: int) -> str:
    """The name under which a rank keeps PowerSGD's start of a slice from step to step."""
    return f"{part.variable}|{part.axis}|{part.start}|{part.stop}|{rank}"
