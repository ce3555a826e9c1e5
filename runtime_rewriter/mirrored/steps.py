"""The training step of a script: the `tf.function` in which gradients are summed.

Each plan has a trace of its own, so a plan that is used again soon needs no further trace. Other
functions that sum gradients of the same variables keep the script's own messages: they are traced
once, whatever plan is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.eager.backprop import GradientTape
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from autotune.errors import AutotuneError, InvalidInput
from autotune.strategy_space.mirrored import MIRRORED
from autotune.strategy_space.plan import Plan
from autotune.workload import Variable
from runtime_rewriter.mirrored.accelerator import MirroredAccelerator
from runtime_rewriter.mirrored.gate import ComparedSums
from runtime_rewriter.mirrored.kept_traces import KeptTraces
from runtime_rewriter.mirrored.named import described, is_gradient
from runtime_rewriter.mirrored.observed import Observation, Stamps
from runtime_rewriter.mirrored.recorded import RecordedStep
from runtime_rewriter.mirrored.script_sums import ScriptSums
from runtime_rewriter.mirrored.turns import Turns
from runtime_rewriter.tensorflow.batch_kinds import batch_kind
from runtime_rewriter.tensorflow.gradient_marks import marked_gradients

_ONE_CALL = (
    f"a step of {MIRRORED} must be one call of a tf.function from Python: "
    "`for batch in dataset: train_step(batch)`"
)


BeforeCall = Callable[[Any, Sequence[Any], Mapping[str, Any]], None]


def _no_call(function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Nothing comes before the call of a step."""


class StepObserver(Protocol):
    """Steers the steps of a script."""

    def found(self, variables: Sequence[Variable], buckets: Sequence[Sequence[str]]) -> Plan | None:
        """Take what a step sums, in its own messages `buckets`; return the plan to begin with."""

    def between_steps(self, now_s: float, clean: bool) -> None:
        """Between two steps. `clean`: the script called no other `tf.function` since."""

    def stepped(self, observation: Observation | None) -> None:
        """A step has ended, with its `observation` if it was observed."""


class Steps:
    """Finds the step of a script, and runs it by the plan that is loaded.

    `plan`: that of further steps; None: the script's own messages. `observed`: whether they note
    their times. `turns`: lets the first worker compute before the others. `gated`: whether they
    compare the plan's sums with the script's own. `accelerator`: plays them. `before_call` gets the
    function and the arguments of each further step, between the boundary and the call. `marks`:
    those of the gradients, while the script is steered.
    """

    def __init__(self, observer: StepObserver, before_call: BeforeCall = _no_call) -> None:
        self.plan: Plan | None = None
        self.observed = self.gated = False
        self.turns: Turns | None = None
        self.accelerator: MirroredAccelerator | None = None
        self.compared: ComparedSums | None = None
        """Of the gated steps."""
        self.script_sums: ScriptSums | None = None
        """Known from the first step on."""
        self._observer, self._before_call = observer, before_call
        self._step: Any = None
        self._traces = KeptTraces()
        self._inside = False
        self._may_be_step = False  # the present call
        self._others = 0
        self._summed_in: list[Any] = []  # function graphs of the present call
        self._variables: list[Variable] | None = None
        self._stamps: Stamps | None = None
        self._recording: RecordedStep | None = None
        self._problem: AutotuneError | None = None
        self._eager: set[int] = set()

    @contextmanager
    def steered(self) -> Iterator[None]:
        """Within, TensorFlow's functions, tapes and collectives report to these steps."""
        with ExitStack() as undo:
            self.marks = undo.enter_context(marked_gradients())
            for owner, name, substitute in (
                (Function, "__call__", self._call),
                (CollectiveAllReduce, "_all_reduce", self._all_reduce),
                (GradientTape, "gradient", self._gradient),
            ):
                original = getattr(owner, name)
                undo.callback(setattr, owner, name, original)
                setattr(owner, name, _method(partial(substitute, original)))
            yield

    def _call(
        self, original: Callable[..., Any], function: Any, *args: Any, **keywords: Any
    ) -> Any:
        if self._inside or not tf.executing_eagerly():
            return original(function, *args, **keywords)
        if function is not self._step:
            return self._other_call(original, function, args, keywords)
        self._observer.between_steps(time.perf_counter(), not self._others)
        self._others = 0
        self._before_call(function, args, keywords)
        if self.accelerator is not None:
            results = self._played(self.accelerator, original, args, keywords)
            self._observer.stepped(None)
            return results
        kind = (self.observed, bool(self.turns), self.gated)
        trace = self._traces.get(self.plan, kind, self._clone)
        if self.turns is not None:
            self.turns.wait()
        start_s = time.time()
        with self._entered():
            results = original(trace, *args, **keywords)
        observation = None
        if self.observed and self._stamps is not None:
            observation = self._stamps.read(start_s, time.time())
        self._observer.stepped(observation)
        return results

    def _clone(self) -> Any:
        clone = self._step._clone(None)
        clone._omit_frequent_tracing_warning = True  # a trace per plan
        return clone

    def _played(
        self, accelerator: MirroredAccelerator, original: Any, args: Any, keywords: Any
    ) -> Any:
        """Play the step if one of this kind of batch was recorded; else run and record it."""
        kind = batch_kind((args, keywords))
        recorded = accelerator.recorded(kind)
        if recorded is None:
            recorded = RecordedStep()
            self._others += 1  # the step is not one of an emulated accelerator
            self._recording = recorded
            try:
                with self._entered(), recorded.tracing():
                    recorded.results = original(self._clone(), *args, **keywords)
            finally:
                self._recording = None
            accelerator.add(kind, recorded)
            return recorded.results
        with self._entered():
            accelerator.play(recorded, self.plan, self.gated, self._sums)
        return recorded.results

    def _other_call(
        self, original: Callable[..., Any], function: Any, args: Any, keywords: Any
    ) -> Any:
        """A function that may turn out to be the step when it is traced."""
        self._others += 1
        with self._entered(may_be_step=self._step is None):
            results = original(function, *args, **keywords)
        if self._step is None and self._summed_in:
            self._step, self._others = function, 0
            self._traces.put(self.plan, (False, False, False), function)
            self._observer.stepped(None)
        return results

    @contextmanager
    def _entered(self, may_be_step: bool = True) -> Iterator[None]:
        """Within a call. What was refused while it was traced is raised at its end."""
        self._inside, self._may_be_step = True, may_be_step
        self._summed_in.clear()
        try:
            yield
        finally:
            self._inside = False
            if self._problem is not None:
                raise self._problem

    def _gradient(
        self, original: Callable[..., Any], tape: Any, target: Any, *args: Any, **keywords: Any
    ) -> Any:
        if not tf.executing_eagerly() and self.observed:
            self._stamps = Stamps(target, self._stamps)
        results = original(tape, target, *args, **keywords)
        if tf.executing_eagerly():
            self._eager = {id(one) for one in tf.nest.flatten(results)}
        return results

    def _all_reduce(
        self, original: Callable[..., Any], own: Any, operation: Any, value: Any, *rest: Any
    ) -> Any:
        """Sum tensors; gradients of the step by the plan that is loaded."""
        flat = tf.nest.flatten(value)
        if tf.executing_eagerly():
            if self._step is None and any(id(one) in self._eager for one in flat):
                raise InvalidInput(f"{_ONE_CALL}; decorate the function with @tf.function")
            return original(own, operation, value, *rest)
        stepping = self._inside and self._may_be_step
        gradients = (is_gradient(one, self.marks) for one in flat)
        if not stepping or self._problem or not any(gradients):
            return original(own, operation, value, *rest)
        try:
            return self._summed(original, own, operation, value, rest)
        except AutotuneError as problem:  # autograph would change its type and text
            self._problem = problem
            return original(own, operation, value, *rest)

    def _summed(
        self, original: Callable[..., Any], own: Any, operation: Any, value: Any, rest: Any
    ) -> Any:
        flat = tf.nest.flatten(value)
        _refuse_place(tf.compat.v1.get_default_graph(), self._summed_in)
        variables = described(flat, self.marks)
        if self._variables is None:
            self._variables = variables
            self.script_sums = ScriptSums(original, own, operation, rest)
            self.plan = self._observer.found(variables, _own_buckets(variables, rest[-1]))
        elif [one.name for one in variables] != [one.name for one in self._variables]:
            return original(own, operation, value, *rest)  # of another model
        if self.turns is not None:
            flat = self.turns.passed_on(flat)
        gradients = {one.name: tensor for one, tensor in zip(variables, flat, strict=True)}
        if self._recording is not None:
            with self._recording.summing(variables, gradients):
                results = self._sums(gradients)
        else:
            results = self._sums(gradients)
        if self.observed and self._stamps is not None:
            self._stamps.note(gradients, list(results.values()))
        return tf.nest.pack_sequence_as(value, list(results.values()))

    def _sums(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the step that is traced."""
        self._others += 1  # tracing takes time
        assert self.script_sums is not None and self._variables is not None
        results = self.script_sums.sums(self.plan, gradients)
        if self.gated and self.plan is not None:
            self.compared = self.compared or ComparedSums(self._variables)
            self.compared.note(results, self.script_sums.sums(None, gradients))
        return results


def _method(substitute: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **keywords: Any) -> Any:
        return substitute(*args, **keywords)

    return method


def _refuse_place(graph: Any, summed_in: list[Any]) -> None:
    """Raise `InvalidInput` where one call of the step sums several times, or perhaps never."""
    while graph is not None:
        if getattr(graph, "is_control_flow_graph", False):
            raise InvalidInput(
                f"{_ONE_CALL}, but the gradients are summed in a loop or branch inside of one"
            )
        outer = graph.outer_graph
        if outer is None or not getattr(outer, "building_function", False):
            break
        if not getattr(outer, "is_control_flow_graph", False):
            raise InvalidInput(
                f"{_ONE_CALL}, but the gradients are summed in another tf.function inside of one, "
                "which would keep the messages of its first trace; remove the inner @tf.function"
            )
        graph = outer
    if any(graph is other for other in summed_in):
        raise InvalidInput(
            f"{_ONE_CALL}, which sums all gradients at once, but it sums gradients several times"
        )
    summed_in.append(graph)


def _own_buckets(variables: Sequence[Variable], options: Any) -> list[list[str]]:
    """The messages of TensorFlow itself, which packs dense gradients from the last one on."""
    from tensorflow.python.distribute.cross_device_utils import group_by_size

    dense = [one for one in variables if not one.sparse][::-1]
    sized = [tf.TensorSpec(one.shape, one.dtype) for one in dense]
    packs = group_by_size(sized, options.bytes_per_pack)
    names = iter(one.name for one in dense)
    return [[next(names) for _ in pack] for pack in packs]
