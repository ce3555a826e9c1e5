"""Residuals and starts of PowerSGD, which the messages of a plan keep from step to step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import tensorflow as tf

from autotune.strategy_space.plan import Message, Plan, TensorSlice
from runtime_rewriter.tensorflow.compressed import Start
from runtime_rewriter.tensorflow.kept_state import KeptTensor
from runtime_rewriter.tensorflow.kept_writing import KeptWriter
from runtime_rewriter.tensorflow.message_slices import MessageSlices


@dataclass
class ResidualTensors:
    """The residuals of a message, flat, before and after it, of the ranks that have them.

    None: zeros.
    """

    before: dict[int, str] = field(default_factory=dict)
    after: dict[int, str] = field(default_factory=dict)


class MessageResiduals:
    """Writes the reads and the replacements of what a plan's messages keep.

    `waiting`: variables of which a rank has not sent everything under an earlier plan.
    """

    def __init__(
        self,
        plan: Plan,
        slices: MessageSlices,
        devices: tuple[str, ...],
        kept: KeptWriter,
        waiting: frozenset[str],
    ) -> None:
        self.plan, self.slices, self.devices = plan, slices, devices
        self.training, self.writer = slices.training, slices.writer
        self.kept, self.waiting = kept, waiting
        self._tensors: dict[int, ResidualTensors] = {}
        """By the number of the message."""

    def read(
        self, number: int, message: Message, members: Collection[int], dtype: tf.DType
    ) -> dict[int, KeptTensor]:
        """The residual of each rank that may have one before or after this message.

        `members`: the ranks that compress it.
        """
        ranks: set[int] = set()
        if any(part.variable in self.waiting for part in message.slices):
            ranks = set(range(len(self.devices)))
        elif message.compressor.error_feedback:
            ranks = set(members) if len(members) > 1 else set()
        return {
            rank: self.kept.residual(rank, self.devices[rank], number, message.slices, dtype)
            for rank in sorted(ranks)
        }

    def replace(
        self,
        number: int,
        message: Message,
        residuals: Mapping[int, KeptTensor],
        unsent: Mapping[int, str],
    ) -> None:
        """Replace the residuals of a message by what it has not sent, which is nothing else."""
        assert unsent.keys() <= residuals.keys()
        if not residuals:
            return
        self._tensors[number] = ResidualTensors(
            {rank: residual.value for rank, residual in residuals.items()}, dict(unsent)
        )
        for rank, residual in residuals.items():
            device = self.devices[rank]
            if rank in unsent:
                self.kept.replace(residual, device, unsent[rank])
                continue
            with self.writer.at(device, f"{self.kept.scope}/message_{number}/rank_{rank}"):
                zeros = self.writer.zeros([message.elements], tf.as_dtype(residual.dtype))
            self.kept.replace(residual, device, zeros)

    def of_variable(self, variable: str, rank: int, after: bool) -> str | None:
        """A rank's residual of a whole variable before or after the step; None if it has none."""
        dtype = tf.as_dtype(self.training.by_name[variable].dtype)
        pieces: list[tuple[int, str]] = []
        axis, any_whole = None, False
        for number, message in enumerate(self.plan.messages):
            parts = [part for part in message.slices if part.variable == variable]
            if not parts:
                continue
            of_message = self._tensors.get(number, ResidualTensors())
            whole = (of_message.after if after else of_message.before).get(rank)
            any_whole |= whole is not None
            tensors = self.slices.split(message, whole, dtype) if whole is not None else None
            for place, part in enumerate(message.slices):
                if part.variable == variable:
                    axis = part.axis
                    shape = self.slices.shape(part)
                    value = tensors[place] if tensors else self.writer.zeros(shape, dtype)
                    pieces.append((part.start, value))
        if not any_whole:
            return None
        return self.writer.concat([one for _, one in sorted(pieces)], axis or 0, dtype)

    def start(self, rank: int, part: TensorSlice) -> Start:
        device, k = self.devices[rank], self._rank_of[part]
        dtype = tf.as_dtype(self.training.by_name[part.variable].dtype)
        start = self.kept.start(rank, device, part, self.slices.shape(part), k, dtype)
        return Start(start.value, lambda tensor: self.kept.replace(start, device, tensor))

    @cached_property
    def _rank_of(self) -> dict[TensorSlice, int]:
        """PowerSGD's rank of each slice."""
        return {
            part: message.rank
            for message in self.plan.messages
            for part in message.slices
            if message.rank is not None
        }
