"""The slices of variables of which a message consists."""

from __future__ import annotations

import tensorflow as tf

from autotune.strategy_space.plan import Message, TensorSlice
from runtime_rewriter.tensorflow.node_writing import GraphWriter
from runtime_rewriter.tensorflow.training_graph import TrainingGraph


class MessageSlices:
    """Shapes of slices, and the nodes that cut a message into them."""

    def __init__(self, training: TrainingGraph, writer: GraphWriter) -> None:
        self.training, self.writer = training, writer

    def shape(self, part: TensorSlice) -> list[int]:
        shape = list(self.training.by_name[part.variable].shape)
        if part.axis is not None:
            shape[part.axis] = part.stop - part.start
        return shape

    def split(self, message: Message, tensor: str, wire: tf.DType) -> list[str]:
        """Return the slices of a message, each in its shape."""
        dtype = tf.as_dtype(message.dtype)
        sizes = [part.elements for part in message.slices]
        flat = self.writer.split(self.writer.cast(tensor, wire, dtype), sizes, 0, dtype)
        return [
            self.writer.reshape(one, self.shape(part), dtype)
            for one, part in zip(flat, message.slices, strict=True)
        ]
