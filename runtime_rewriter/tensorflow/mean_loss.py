"""Checks before the first step that a batch may be split: its loss must be a mean over rows.

Replicas average the gradients of parts of a batch. That is the gradient of the whole batch if the
loss is a mean over the rows of a batch. A sum is trained with gradients that are too small, and a
loss that compares rows with each other is another loss.

The single-device graph computes gradients on the first rank, and updates nothing. Compared are
linear sketches of them: `SKETCH` numbers per variable, whatever its size.

- A graph without batch statistics, whose random numbers are given one value (`steady`): the
  gradient of some rows must equal the mean of the gradients of their halves.
- Any other graph, in which parts differ by intent: the gradient of rows that are repeated
  `REPEATS` times must not be larger than the gradient of the rows. Batch statistics of repeated
  rows are those of the rows. The gradient of a sum is `REPEATS` times as large, or sqrt(REPEATS)
  times if it is all noise; that of a mean is at most as large.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef

from autotune.errors import InvalidInput
from runtime_rewriter.tensorflow.checkpoints import MOST_BYTES
from runtime_rewriter.tensorflow.chunks import chunks
from runtime_rewriter.tensorflow.randomness import drawing_ops, seed_variables
from runtime_rewriter.tensorflow.running import Target, translated_errors
from runtime_rewriter.tensorflow.steady_numbers import are_steadied, steady
from runtime_rewriter.tensorflow.training_graph import Gradient, TrainingGraph
from runtime_rewriter.tensorflow.updates import Updates

v1 = tf.compat.v1

Batch = Mapping[str, np.ndarray]
Sketches = dict[str, np.ndarray]

SKETCH = 4096
"""Numbers, or rows of a sparse gradient, per variable."""
REPEATS = 4
"""How often rows are repeated. The loss counts as a sum if the squared ratio of the gradients is
above sqrt(REPEATS), the geometric middle between the bounds of a mean and of a sum.
"""
FEWEST_ROWS = 16
"""Rows of all tries together, at least, before the loss counts as a mean: random masks even out."""
MOST_TRIES = 16
"""Tries, each with other rows, until the gradients look like those of a mean."""
TOLERANCES = {False: (1e-2, 1e-3), True: (1e-1, 1e-2)}
"""Relative differences allowed for the gradient of a variable, and for all gradients together: for
float32, and with 16-bit floats.

A mean differs by rounding only; a loss of another kind, by as much as rows differ.
"""
_CONTAINER = "autotune-mean-loss"
_LOW = frozenset({"float16", "bfloat16"})
_RULE = "a batch is split between the ranks, so the loss must be a mean over the rows of the batch"


def refuse_other_losses(
    training: TrainingGraph, target: Target, batch: Batch, timeout_s: float
) -> None:
    """Raise `InvalidInput` if the ranks' mean gradient would not be that of the whole batch.

    `batch`: the value of each feed. A graph without a split feed has nothing to check.
    """
    replicas = len(target.devices)
    rows = [len(batch[feed.name]) for feed in training.feeds if feed.split]
    if replicas < 2 or not rows or min(rows) < replicas:
        return
    draws = drawing_ops(training, training.view.upstream(training.gradient_nodes))
    if are_steadied(draws) and not _has_batch_statistics(training):
        with _Gradients(training, target, batch, timeout_s, steadied=True).opened() as gradients:
            if _compare_halves(gradients, max(1, min(rows) // replicas // 2)) or not draws:
                return
    with _Gradients(training, target, batch, timeout_s).opened() as gradients:
        _compare_repeated(gradients, min(rows), min(rows) // replicas)


def _compare_halves(gradients: _Gradients, half: int) -> bool:
    """Return whether the gradients could be compared."""
    whole = gradients.of(np.arange(2 * half))
    parts = [gradients.of(np.arange(half)), gradients.of(np.arange(half, 2 * half))]
    means = {name: (parts[0][name] + parts[1][name]) / 2 for name in whole}
    if not _are_finite([whole, means]):
        return False
    relative, floor = TOLERANCES[gradients.are_low]
    total = _norm(means.values())
    for name, value in whole.items():
        norm = _norm([means[name]])
        difference = _norm([value - means[name]])
        if difference <= relative * norm + floor * total:
            continue
        raise InvalidInput(
            f"{_RULE}, but {_described(_norm([value]), norm, 2)}: that of {name!r} for {2 * half} "
            f"rows differs from the mean of those for {half} rows each by "
            f"{difference / max(norm, 1e-30):.0%} of it; {_FIX}"
        )
    return True


_FIX = (
    "reduce the loss of each row by tf.reduce_mean, without a fixed batch size, and leave out what "
    "compares or counts rows of the whole batch"
)


def _described(whole: float, part: float, times: float) -> str:
    if whole > math.sqrt(times) * part:
        return "gradients grow with the number of rows, as for a sum or a fixed batch size"
    return "gradients of a batch are not the mean of those of its parts"


def _compare_repeated(gradients: _Gradients, rows: int, of_replica: int) -> None:
    taken = max(2, of_replica // REPEATS)  # a normalized batch of one row is all zeros
    squares = np.zeros(2)
    largest = math.sqrt(REPEATS)
    for number in range(MOST_TRIES):
        gradients.reseed(number)
        some = np.arange(number * taken, (number + 1) * taken) % rows
        both = gradients.of(some), gradients.of(np.tile(some, REPEATS))
        if _are_finite(both):
            squares += [_norm(one.values()) ** 2 for one in both]
        if squares[1] <= largest * squares[0] and (number + 1) * taken >= FEWEST_ROWS:
            return
    if squares[1] > largest * squares[0]:
        once, repeated = np.sqrt(squares)
        raise InvalidInput(
            f"{_RULE}, but {_described(repeated, once, 1)}: those of rows that are repeated "
            f"{REPEATS} times are {repeated / once:.2g} times as large as those of the rows; {_FIX}"
        )


def _are_finite(several: Sequence[Sketches]) -> bool:
    """Loss scaling may begin with a scale at which gradients overflow."""
    return all(np.isfinite(value).all() for one in several for value in one.values())


def _norm(values: Any) -> float:
    return math.sqrt(sum(float(np.square(one, dtype=np.float64).sum()) for one in values))


def _has_batch_statistics(training: TrainingGraph) -> bool:
    """Whether gradients depend on statistics of a batch."""
    view = training.view
    needed = view.upstream(training.gradient_nodes)
    if any(
        view.nodes[name].op.startswith("FusedBatchNorm") and view.nodes[name].attr["is_training"].b
        for name in needed
    ):
        return True
    feeds = {feed.tensor.node for feed in training.feeds if feed.split}
    trained = training.gradient_nodes
    updates = Updates(training)
    for variable in training.variables:
        if not variable.shape or "float" not in variable.dtype:
            continue  # metrics and counts
        before = view.upstream(updates.writers[variable.name], control=False)
        if before & feeds and not before & trained:
            return True
    return False


class _Gradients:
    """Gradients of the single-device graph on the first device, for rows of a batch.

    `steadied`: all its random numbers have one value.
    """

    def __init__(
        self,
        training: TrainingGraph,
        target: Target,
        batch: Batch,
        timeout_s: float,
        steadied: bool = False,
    ) -> None:
        self._training, self._batch, self._target = training, batch, target
        self._options = v1.RunOptions(timeout_in_ms=int(timeout_s * 1e3))
        self.are_low = any(dtype in _LOW for dtype in training.types.dtypes.values())
        self._session: Any = None
        self._seeds = seed_variables(training)
        needed = training.view.upstream(training.gradient_nodes)
        self._variables = [one for one in training.variables if one.name in needed]
        self._feeds = [one for one in training.feeds if one.tensor.node in needed]
        graph_def = GraphDef(
            versions=training.graph_def.versions, library=training.graph_def.library
        )
        for node in training.graph_def.node:
            if node.name in needed:
                copy = graph_def.node.add()
                copy.CopyFrom(node)
                copy.device = target.devices[0]
                if copy.op == "VarHandleOp":
                    copy.attr["container"].s = _CONTAINER.encode()
        if steadied:
            steady(graph_def)
        with tf.Graph().as_default() as self._graph, tf.device(target.devices[0]):
            tf.graph_util.import_graph_def(graph_def, name="")
            self._sketches = {one.variable: self._sketch(one) for one in training.gradients}
            self._assignments = {one.name: self._assignment(one.name) for one in self._variables}
            self._ends = [
                tf.raw_ops.DestroyResourceOp(resource=self._handle(one.name))
                for one in self._variables
            ]

    @contextlib.contextmanager
    def opened(self) -> Iterator[_Gradients]:
        """Within, the gradients can be computed. The variables have their initial values."""
        target = self._target
        with (
            translated_errors(),
            v1.Session(target.target, graph=self._graph, config=target.config) as self._session,
        ):
            values = [(one.name, self._training.initial[one.name]) for one in self._variables]
            for first, end in chunks([value.nbytes for _, value in values], MOST_BYTES):
                self._assign(dict(values[first:end]))
            yield self
            self._session.run(self._ends)

    def of(self, rows: np.ndarray) -> Sketches:
        """The sketches of the gradients of some rows of the batch."""
        fed = {
            str(feed.tensor): self._batch[feed.name][rows] if feed.split else self._batch[feed.name]
            for feed in self._feeds
        }
        sketches: Sketches = self._session.run(self._sketches, fed, options=self._options)
        return sketches

    def reseed(self, number: int) -> None:
        """Let random numbers differ from those of another `number`."""
        changed = {}
        for one in self._variables:
            if one.name in self._seeds:
                value = np.array(self._training.initial[one.name])
                value.reshape(-1)[0] += number
                changed[one.name] = value
        self._assign(changed)

    def _assign(self, values: Batch) -> None:
        some = {name: self._assignments[name] for name in values}
        fed = {placeholder: values[name] for name, (placeholder, _) in some.items()}
        self._session.run([assign for _, assign in some.values()], fed)

    def _handle(self, variable: str) -> Any:
        return self._graph.get_tensor_by_name(f"{variable}:0")

    def _assignment(self, variable: str) -> tuple[Any, Any]:
        dtype = tf.as_dtype(self._training.by_name[variable].dtype)
        given = v1.placeholder(dtype)
        return given, tf.raw_ops.AssignVariableOp(resource=self._handle(variable), value=given)

    def _sketch(self, gradient: Gradient) -> Any:
        """Sums of a gradient's elements, or of its rows if it is sparse."""
        values = self._graph.get_tensor_by_name(str(gradient.values))
        values = tf.cast(values, tf.float64 if values.dtype == tf.float64 else tf.float32)
        if gradient.indices is not None:
            indices = self._graph.get_tensor_by_name(str(gradient.indices))
            return tf.math.unsorted_segment_sum(values, indices % SKETCH, SKETCH)
        flat = tf.reshape(values, [-1])
        padded = tf.pad(flat, [[0, -tf.size(flat) % SKETCH]])
        return tf.reduce_sum(tf.reshape(padded, [-1, SKETCH]), 0)
