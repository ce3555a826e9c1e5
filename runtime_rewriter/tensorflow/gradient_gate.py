"""The numerics gate of a rewritten graph: averaged gradients against a plain reduction.

The reference is one all-reduce of the local gradients that the replicas compute, with nothing of
the plan. On each rank, and for each variable:

| symbol | meaning |
|---|---|
| w | number of ranks |
| g_r, e_r, e'_r | local gradient; residual of rank r before and after the step, or 0 |
| a, b | averaged gradient by the plan, and the reference: sum over r of g_r / w + e_r - e'_r |
| error | max abs(a - b), elements where b is not finite left out |
| largest | max abs(g_r + w e_r) |
| print | a checksum of the bits of a, which must be the same on all ranks |

A gradient whose rows travel is compared row by row. There `largest` adds up the magnitudes of all
rows of equal index, and the number of such rows is the number of terms of the tolerance's sum
(see `tolerances`). What servers average exists once: rank 0 compares it, and the other ranks take
part in the reference's all-reduce. The nodes are in every graph, and a step that does not fetch
them leaves them out.

Dense gradients are compared in chunks, one after the other: each needs several copies of its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from runtime_rewriter.tensorflow.chunks import chunks
from runtime_rewriter.tensorflow.collectives import Carrier, Flat, Keys
from runtime_rewriter.tensorflow.gate_tensors import ERROR, LARGEST, PRINT, TERMS, GateTensors
from runtime_rewriter.tensorflow.node_writing import GraphWriter
from runtime_rewriter.tensorflow.rows import merge_rows
from runtime_rewriter.tensorflow.synchronization import SCOPE, Synchronization

COMPARED_BYTES = 2**25
"""How many bytes of dense gradients are compared at once."""
_BITS = {tf.float16: tf.int16, tf.bfloat16: tf.int16, tf.float32: tf.int32, tf.float64: tf.int64}


class GateWriter:
    """Writes the gate of a graph whose messages are written."""

    def __init__(
        self,
        synchronization: Synchronization,
        writer: GraphWriter,
        devices: tuple[str, ...],
        compared_bytes: int = COMPARED_BYTES,
    ) -> None:
        self.synchronization, self.writer, self.devices = synchronization, writer, devices
        self.training, self.averaged = synchronization.training, synchronization.averaged()
        self.count, self.compared_bytes = len(devices), compared_bytes
        self.numbers: dict[tuple[str, str, int], str] = {}

    def tensors(self, keys: Keys) -> GateTensors:
        sent = self.synchronization
        rows = set(sent.variables_in_rows)
        dense: dict[str, list[str]] = {}
        for one in self.training.gradients:
            if one.variable not in rows:
                dtype = self.training.by_name[one.variable].dtype
                dense.setdefault(dtype, []).append(one.variable)
        for dtype, of_dtype in dense.items():
            self._compare_chunks(of_dtype, tf.as_dtype(dtype), keys)
        for name in rows:
            for rank in range(self.count):
                with self._at(rank):
                    self._compare_rows(name, rank)
        names = tuple(one.variable for one in self.training.gradients)
        tensors = {}
        for kind in (ERROR, LARGEST, PRINT, TERMS):
            for rank in range(self.count):
                packed = [self.numbers[kind, name, rank] for name in names]
                dtype_of_kind = tf.int64 if kind in (PRINT, TERMS) else tf.float64
                with self._at(rank):
                    node = self.writer.node(
                        "Pack", kind, packed, N=len(names), T=dtype_of_kind, axis=0
                    )
                tensors[f"{kind}/{rank}"] = f"{node}:0"
        dtypes = tuple(self.training.by_name[name].dtype for name in names)
        return GateTensors(names, dtypes, tensors, frozenset(sent.served))

    def _at(self, rank: int) -> Any:
        return self.writer.at(self.devices[rank], f"{SCOPE}/gate/rank_{rank}")

    def _compare_chunks(self, names: Sequence[str], dtype: tf.DType, keys: Keys) -> None:
        sizes_bytes = [math.prod(self.training.by_name[name].shape) * dtype.size for name in names]
        compared: dict[int, list[str]] = {rank: [] for rank in range(self.count)}
        for first, end in chunks(sizes_bytes, self.compared_bytes):
            some = names[first:end]
            self._compare_dense(some, dtype, keys, compared)
            compared = {
                rank: [self.numbers[kind, name, rank] for kind in (ERROR, PRINT) for name in some]
                for rank in range(self.count)
            }

    def _compare_dense(
        self,
        names: Sequence[str],
        dtype: tf.DType,
        keys: Keys,
        compared: Mapping[int, Sequence[str]],
    ) -> None:
        """Compare some variables, on each rank once the nodes `compared` have run there."""
        writer = self.writer
        sizes = [math.prod(self.training.by_name[name].shape) for name in names]
        zero = {}
        sent: dict[int, str] = {}
        for rank in range(self.count):
            with self._at(rank):
                zero[rank] = writer.constant([0], tf.int32, "axis")
                parts = [self._flat_local(name, rank, dtype) for name in names]
                parts[0] = writer.identity(parts[0], dtype, "next", compared[rank])
                local = writer.scale(writer.concat(parts, 0, dtype), 1 / self.count, dtype)
                before = self._residuals(names, rank, sizes, dtype, after=False)
                after = self._residuals(names, rank, sizes, dtype, after=True)
                if before is not None:
                    local = writer.binary("AddV2", local, before, dtype)
                scaled = writer.scale(local, self.count, dtype)
                magnitudes = writer.unary("Abs", scaled, dtype)
                self._reduce(LARGEST, names, rank, magnitudes, sizes, dtype, zero[rank])
                if after is not None:
                    local = writer.binary("Sub", local, after, dtype)
                sent[rank] = local
        carrier = Carrier(
            writer, self.devices, keys, f"{SCOPE}/gate", tuple(() for _ in self.devices)
        )
        reference = carrier.all_reduced(Flat(sent, sum(sizes), dtype))
        for rank in range(self.count):
            with self._at(rank):
                averages = [self._flat_averaged(name, rank, dtype) for name in names]
                present = [place for place, one in enumerate(averages) if one is not None]
                # Every rank must take part in the all-reduce, whether it compares anything or not.
                self._absent(
                    [name for place, name in enumerate(names) if place not in present],
                    rank,
                    [reference[rank]],
                )
                self._terms(names, rank)
                if not present:
                    continue
                # What servers joined is not needed before its reference is there.
                averages[present[0]] = writer.identity(
                    str(averages[present[0]]), dtype, "compared", [reference[rank]]
                )
                b = writer.split(reference[rank], sizes, 0, dtype)
                self._difference(
                    [names[place] for place in present],
                    rank,
                    writer.concat([one for one in averages if one is not None], 0, dtype),
                    writer.concat([b[place] for place in present], 0, dtype),
                    [sizes[place] for place in present],
                    dtype,
                    zero[rank],
                )

    def _difference(
        self,
        names: Sequence[str],
        rank: int,
        a: str,
        b: str,
        sizes: Sequence[int],
        dtype: tf.DType,
        axis: str,
    ) -> None:
        writer = self.writer
        none, infinite = (writer.constant(value, dtype) for value in (0.0, math.inf))
        distance = writer.unary("Abs", writer.binary("Sub", a, b, dtype), dtype)
        distance = writer.where(writer.unary("IsFinite", a, dtype), distance, infinite, dtype)
        distance = writer.where(writer.unary("IsFinite", b, dtype), distance, none, dtype)
        self._reduce(ERROR, names, rank, distance, sizes, dtype, axis)
        bits = writer.cast(writer.bitcast(a, dtype, _BITS[dtype]), _BITS[dtype], tf.int64)
        bounds = [writer.constant(value, tf.int64) for value in (1, 2 * sum(sizes) + 1, 2)]
        weights = writer.node("Range", "weights", bounds, Tidx=tf.int64)
        weighted = writer.binary("Mul", bits, weights, tf.int64)
        self._reduce(PRINT, names, rank, weighted, sizes, tf.int64, axis)

    def _reduce(
        self,
        kind: str,
        names: Sequence[str],
        rank: int,
        flat: str,
        sizes: Sequence[int],
        dtype: tf.DType,
        axis: str,
    ) -> None:
        """Reduce each variable's part of a flat tensor to one number."""
        op, target = ("Sum", tf.int64) if kind == PRINT else ("Max", tf.float64)
        parts = self.writer.split(flat, sizes, 0, dtype)
        for name, part in zip(names, parts, strict=True):
            inputs = [part, axis]
            number = self.writer.node(op, kind, inputs, T=dtype, Tidx=tf.int32, keep_dims=False)
            self.numbers[kind, name, rank] = self.writer.cast(number, dtype, target)

    def _absent(self, names: Sequence[str], rank: int, control: Sequence[str] = ()) -> None:
        """Report no error where nothing is compared, after the nodes `control` have run."""
        writer = self.writer
        for name in names:
            for kind, dtype in ((ERROR, tf.float64), (PRINT, tf.int64)):
                zero = writer.constant(0, dtype, "zero")
                self.numbers[kind, name, rank] = writer.identity(zero, dtype, "nothing", control)

    def _terms(self, names: Sequence[str], rank: int) -> None:
        terms = self.writer.constant(self.count, tf.int64, "terms")
        for name in names:
            self.numbers[TERMS, name, rank] = terms

    def _flat_local(self, name: str, rank: int, dtype: tf.DType) -> str:
        gradient = self.training.gradient_of[name]
        return self.writer.reshape(self.synchronization.dense(gradient, rank, dtype), [-1], dtype)

    def _flat_averaged(self, name: str, rank: int, dtype: tf.DType) -> str | None:
        """What the update reads, or None where rank 0 compares for all."""
        averaged = self.averaged[name]
        if name not in self.synchronization.served:
            return self.writer.reshape(averaged.values[rank], [-1], dtype)
        if rank > 0:
            return None
        whole = averaged.values[0]
        if averaged.parts:
            axis = self.synchronization.served[name].axis or 0
            whole = self.writer.concat(averaged.parts, axis, dtype)
        return self.writer.reshape(whole, [-1], dtype)

    def _residuals(
        self, names: Sequence[str], rank: int, sizes: Sequence[int], dtype: tf.DType, after: bool
    ) -> str | None:
        """The residuals of a rank, one variable behind the other; None if it has none."""
        residuals = {name: self.synchronization.residual_of(name, rank, after) for name in names}
        if all(one is None for one in residuals.values()):
            return None
        parts = [
            self.writer.zeros([size], dtype)
            if (whole := residuals[name]) is None
            else self.writer.reshape(whole, [-1], dtype)
            for name, size in zip(names, sizes, strict=True)
        ]
        return self.writer.concat(parts, 0, dtype)

    def _compare_rows(self, name: str, rank: int) -> None:
        writer, sent = self.writer, self.synchronization
        gradient = self.training.gradient_of[name]
        dtype = tf.as_dtype(self.training.by_name[name].dtype)
        index_dtype = self.training.index_dtype(gradient)
        ranks = range(self.count)
        values = [sent.local(str(gradient.values), of) for of in ranks]
        places = [sent.local(str(gradient.indices), of) for of in ranks]
        scaled = writer.scale(writer.concat(values, 0, dtype), 1 / self.count, dtype)
        indices = writer.concat(places, 0, index_dtype)
        magnitudes, _ = merge_rows(
            writer, writer.unary("Abs", scaled, dtype), indices, dtype, index_dtype
        )
        largest = self._largest_of_rows(magnitudes, dtype)
        factor = writer.constant(self.count, tf.float64, "ranks")
        self.numbers[LARGEST, name, rank] = writer.binary("Mul", largest, factor, tf.float64)
        counted = writer.node(
            "UniqueWithCounts", "counted", [indices], T=index_dtype, out_idx=tf.int64
        )
        one = writer.constant([1], tf.int64, "one")
        counts = writer.concat([f"{counted}:2", one], 0, tf.int64)
        self.numbers[TERMS, name, rank] = writer.reduced("Max", counts, [0], tf.int64)
        averaged = self.averaged[name]
        if name in sent.served and rank > 0:
            self._absent([name], rank)
            return
        rows, indices_of_rows = averaged.values[rank], averaged.indices[rank]
        if self.training.row_readers[name].single is not None:  # they have not been added up
            rows, indices_of_rows = merge_rows(writer, rows, indices_of_rows, dtype, index_dtype)
        both = writer.concat([scaled, writer.unary("Neg", rows, dtype)], 0, dtype)
        both_indices = writer.concat([indices, indices_of_rows], 0, index_dtype)
        distance, _ = merge_rows(writer, both, both_indices, dtype, index_dtype)
        self.numbers[ERROR, name, rank] = self._largest_of_rows(
            writer.unary("Abs", distance, dtype), dtype
        )
        # rows of equal index may be added in another order on each rank
        self.numbers[PRINT, name, rank] = writer.constant(0, tf.int64, "nothing")

    def _largest_of_rows(self, rows: str, dtype: tf.DType) -> str:
        """The largest of any number of elements; 0 if there are none."""
        writer = self.writer
        flat = writer.concat(
            [writer.reshape(rows, [-1], dtype), writer.constant([0], dtype, "none")], 0, dtype
        )
        return writer.cast(writer.reduced("Max", flat, [0], dtype), dtype, tf.float64)
