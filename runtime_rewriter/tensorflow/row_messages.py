"""Messages of sparse gradients that travel as rows: values and the indices of their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import tensorflow as tf

from autotune.strategy_space.plan import Message, TensorSlice
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.tensorflow.kept_state import KeptTensor
from runtime_rewriter.tensorflow.message_slices import MessageSlices
from runtime_rewriter.tensorflow.rows import merge_rows, rows_with_values, select_rows

StartMessage = Callable[[int, int, str, tf.DType], str]
"""Lets a tensor be sent on a rank as a message of this number: (rank, number, tensor, dtype)."""


class RowMessages:
    """Writes the messages of a plan that send rows.

    `served`: variables that servers update.
    """

    def __init__(
        self,
        slices: MessageSlices,
        devices: tuple[str, ...],
        local: Callable[[str, int], str],
        served: Collection[str],
        start: StartMessage,
        scope: str,
    ) -> None:
        self.training, self.writer, self.slices = slices.training, slices.writer, slices
        self.devices, self.local, self.served = devices, local, served
        self.start, self.scope = start, scope
        self._received: dict[str, list[list[tuple[str, str]]]] = defaultdict(list)

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables whose gradients travel as rows."""
        return tuple(self._received)

    def write(self, number: int, message: Message, residuals: Mapping[int, KeptTensor]) -> None:
        """Send rows as values and indices: to every rank, or by way of the owner.

        Ranks may send different numbers of rows, so a rank reads those of the others one by one.
        """
        (part,) = message.slices
        dtype = tf.as_dtype(message.dtype)
        wire = tf.as_dtype(message.compressor.description.wire_dtype or message.dtype)
        scope = f"{self.scope}/message_{number}"
        values, indices = [], []
        for rank, device in enumerate(self.devices):
            with self.writer.at(device, f"{scope}/rank_{rank}"):
                rows, places = self._scaled(part, rank, residuals.get(rank), dtype)
                packed = self.writer.cast(rows, dtype, wire)
                values.append(self.start(rank, number, packed, wire))
                indices.append(places)
        received = []
        if message.synchronizer is Synchronizer.PARAMETER_SERVER:
            assert message.owner is not None
            with self.writer.at(self.devices[message.owner], f"{scope}/rank_{message.owner}"):
                rows, places = self._joined(part.variable, values, indices, wire)
                packed = self.writer.cast(rows, dtype, wire)
            if part.variable in self.served:
                self._received[part.variable].append([(rows, places)] * len(self.devices))
                return
            for rank, device in enumerate(self.devices):
                with self.writer.at(device, f"{scope}/rank_{rank}"):
                    received.append((self.writer.cast(packed, wire, dtype), places))
        else:
            for rank, device in enumerate(self.devices):
                with self.writer.at(device, f"{scope}/rank_{rank}"):
                    received.append(self._joined(part.variable, values, indices, wire))
        self._received[part.variable].append(received)

    def _scaled(
        self, part: TensorSlice, rank: int, residual: KeptTensor | None, dtype: tf.DType
    ) -> tuple[str, str]:
        """A rank's rows inside a slice over the number of ranks, and its residual's rows."""
        gradient = self.training.gradient_of[part.variable]
        index_dtype = self.training.index_dtype(gradient)
        rows = self.local(str(gradient.values), rank)
        places = self.local(str(gradient.indices), rank)
        if part.axis is not None:
            between = (part.start, part.stop)
            rows, places = select_rows(self.writer, rows, places, between, dtype, index_dtype)
        rows = self.writer.scale(rows, 1 / len(self.devices), dtype)
        if residual is None:
            return rows, places
        shape = self.slices.shape(part)
        dense = self.writer.reshape(residual.value, shape, dtype)
        unsent, unsent_places = rows_with_values(
            self.writer, dense, part.start, shape, dtype, index_dtype
        )
        return (
            self.writer.concat([rows, unsent], 0, dtype),
            self.writer.concat([places, unsent_places], 0, index_dtype),
        )

    def _joined(
        self, variable: str, values: Sequence[str], indices: Sequence[str], wire: tf.DType
    ) -> tuple[str, str]:
        """Join the rows of all ranks.

        Scaled rows are those of one device with the whole batch. Those of equal index are added up,
        unless the program takes each row for itself.
        """
        index_dtype = self.training.index_dtype(self.training.gradient_of[variable])
        dtype = tf.as_dtype(self.training.by_name[variable].dtype)
        rows = self.writer.cast(self.writer.concat(values, 0, wire), wire, dtype)
        places = self.writer.concat(indices, 0, index_dtype)
        if self.training.row_readers[variable].single is not None:
            return rows, places
        return merge_rows(self.writer, rows, places, dtype, index_dtype)

    def averaged(self, variable: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the averaged rows of a variable on each rank, and their indices."""
        gradient = self.training.gradient_of[variable]
        dtype = tf.as_dtype(self.training.by_name[variable].dtype)
        index_dtype = self.training.index_dtype(gradient)
        values, indices = [], []
        for rank, device in enumerate(self.devices):
            with self.writer.at(device, f"{self.scope}/averaged/rank_{rank}"):
                parts = [received[rank] for received in self._received[variable]]
                values.append(self.writer.concat([rows for rows, _ in parts], 0, dtype))
                indices.append(self.writer.concat([places for _, places in parts], 0, index_dtype))
        return tuple(values), tuple(indices)
