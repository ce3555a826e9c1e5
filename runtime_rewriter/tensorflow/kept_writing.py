"""Nodes that hold the state of compressors from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from autotune.strategy_space.plan import TensorSlice
from runtime_rewriter.compression import matrix_shape, start_key
from runtime_rewriter.tensorflow.kept_state import KeptTensor
from runtime_rewriter.tensorflow.node_writing import GraphWriter


class KeptWriter:
    """Writes the nodes of kept tensors."""

    def __init__(self, writer: GraphWriter, container: str, scope: str) -> None:
        self.writer, self.container, self.scope = writer, container, scope
        self.kept: list[KeptTensor] = []
        self.assignments: list[str] = []
        """Nodes that a step runs."""

    def residual(
        self, rank: int, device: str, number: int, slices: tuple[TensorSlice, ...], dtype: tf.DType
    ) -> KeptTensor:
        """The residual of message `number` on a rank."""
        name = f"residual_{number}/rank_{rank}"
        shape = [sum(part.elements for part in slices)]
        return self._held(name, rank, device, slices, dtype, shape)

    def start(
        self, rank: int, device: str, part: TensorSlice, shape: Sequence[int], k: int, dtype: Any
    ) -> KeptTensor:
        """PowerSGD's start of a slice of `shape` on a rank."""
        columns = matrix_shape(shape)[1]
        name = f"start_{start_key(part, k).replace('|', '_').replace(':', '_')}/rank_{rank}"
        return self._held(name, rank, device, (part,), dtype, [columns, k], k, columns)

    def replace(self, kept: KeptTensor, device: str, tensor: str) -> None:
        """Let a step end with `tensor` as the new value."""
        with self.writer.at(device, f"{self.scope}/kept"):
            node = self.writer.node(
                "AssignVariableOp",
                "keep",
                [kept.handle, tensor],
                [kept.value.partition(":")[0]],  # read before it is replaced
                dtype=tf.as_dtype(kept.dtype),
            )
        self.assignments.append(node)

    def _held(
        self,
        name: str,
        rank: int,
        device: str,
        slices: tuple[TensorSlice, ...],
        dtype: tf.DType,
        shape: Sequence[int],
        start_rank: int | None = None,
        columns: int = 0,
    ) -> KeptTensor:
        with self.writer.at(device, f"{self.scope}/kept/{name}"):
            handle = self.writer.node(
                "VarHandleOp",
                "variable",
                dtype=dtype,
                shape=tf.TensorShape(shape),
                shared_name=f"{self.scope}/kept/{name}",
                container=self.container,
            )
            placeholder = self.writer.node(
                "Placeholder", "given", dtype=dtype, shape=tf.TensorShape(shape)
            )
            assign = self.writer.node("AssignVariableOp", "set", [handle, placeholder], dtype=dtype)
            value = self.writer.node("ReadVariableOp", "value", [handle], dtype=dtype)
        kept = KeptTensor(
            rank,
            slices,
            handle,
            f"{placeholder}:0",
            assign,
            f"{value}:0",
            dtype.name,
            start_rank,
            columns,
        )
        self.kept.append(kept)
        return kept
