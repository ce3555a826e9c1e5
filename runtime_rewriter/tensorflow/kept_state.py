"""What the ranks keep from step to step beside the program's variables: the state of compressors.

A *residual* is what a rank's compressed messages have not sent yet (error feedback), in units of
the averaged gradient. A *start* is the matrix with which PowerSGD begins its next step. Both follow
the rules of `pytorch/exchange/residuals.py`. The graph holds a residual per message, and this
module holds it per variable, so that it outlives a change of plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.strategy_space.plan import TensorSlice
from runtime_rewriter.compression import initial_start, seed_name, start_key


@dataclass(frozen=True)
class KeptTensor:
    """A variable of the runtime on one rank.

    Of a message's residual, flat, `slices` are the message's. Of a start, `start_rank` is the rank
    of PowerSGD's approximation, and the only slice is the start's, with `columns`. The names are as
    in `PlacedVariable`.
    """

    rank: int
    slices: tuple[TensorSlice, ...]
    handle: str
    placeholder: str
    assign: str
    value: str
    dtype: str
    start_rank: int | None = None
    columns: int = 0

    @property
    def initial(self) -> np.ndarray:
        if self.start_rank is None:
            return np.zeros(sum(part.elements for part in self.slices), self.dtype)
        name = seed_name(self.slices[0], self.start_rank)
        return initial_start(name, self.columns, self.start_rank).astype(self.dtype)


@dataclass
class KeptState:
    """The values of kept tensors, by rank: residuals of whole variables, and starts by name."""

    shapes: dict[str, tuple[int, ...]]
    residuals: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    starts: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)

    @property
    def waiting(self) -> frozenset[str]:
        """The variables of which a rank has not sent everything."""
        return frozenset(name for (_, name), value in self.residuals.items() if value.any())

    def forget(self) -> None:
        self.residuals.clear()
        self.starts.clear()

    def given(self, kept: KeptTensor) -> np.ndarray:
        """The value that a graph starts with."""
        if kept.start_rank is not None:
            key = (kept.rank, start_key(kept.slices[0], kept.start_rank))
            return self.starts.get(key, kept.initial)
        parts = [self._part(kept.rank, part) for part in kept.slices]
        dtype = kept.dtype
        return np.concatenate(
            [
                np.zeros(one.elements, dtype) if part is None else part.reshape(-1)
                for one, part in zip(kept.slices, parts, strict=True)
            ]
        )

    def take(self, kept: Sequence[KeptTensor], values: Sequence[np.ndarray]) -> None:
        """Hold the values with which a graph ends; it has held all residuals that waited."""
        self.residuals.clear()
        for one, value in zip(kept, values, strict=True):
            if one.start_rank is not None:
                self.starts[one.rank, start_key(one.slices[0], one.start_rank)] = value
                continue
            end = 0
            for part in one.slices:
                begin, end = end, end + part.elements
                self._set(one.rank, part, value[begin:end])

    def _part(self, rank: int, part: TensorSlice) -> np.ndarray | None:
        whole = self.residuals.get((rank, part.variable))
        return None if whole is None else whole[self._place(part)]

    def _set(self, rank: int, part: TensorSlice, value: np.ndarray) -> None:
        key, shape = (rank, part.variable), self.shapes[part.variable]
        if key not in self.residuals:
            self.residuals[key] = np.zeros(shape, value.dtype)
        place = self._place(part)
        self.residuals[key][place] = value.reshape(self.residuals[key][place].shape)

    def _place(self, part: TensorSlice) -> tuple[slice, ...]:
        axes = [slice(None)] * len(self.shapes[part.variable])
        if part.axis is not None:
            axes[part.axis] = slice(part.start, part.stop)
        return tuple(axes)
