"""Steers a script that imports `horovod.tensorflow`.

A step begins with the call of the `tf.function` that computes its gradients, or with the first tape
of an eager step. There the driver's instructions are carried out, outside of any graph.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-calls

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from autotune.errors import InvalidInput
from runtime_rewriter.horovod.connection import HorovodConnection
from runtime_rewriter.horovod.importing import changed_on_import, replace_attribute
from runtime_rewriter.horovod.joining import check_join
from runtime_rewriter.horovod.tensorflow_refusals import (
    CONCRETE_REFUSAL,
    check_complete,
    check_dense,
    refuse_elastic,
    refuse_optimizer,
    refuse_optimizers,
)
from runtime_rewriter.horovod.versions import check_horovod
from runtime_rewriter.pytorch.ddp import ModelObserver
from runtime_rewriter.pytorch.exchange.ranks import Timeouts

if TYPE_CHECKING:
    from runtime_rewriter.horovod.tensorflow_building import TunedVariables
    from runtime_rewriter.horovod.tensorflow_synchronizer import (
        Switches,
        TapeSettings,
        TensorflowSynchronizer,
    )
    from runtime_rewriter.horovod.tensorflow_tape import AveragedGraphs


@contextmanager
def tensorflow_horovod_steered(session: ModelObserver, waits: Timeouts) -> Iterator[None]:
    """Let `horovod.tensorflow`, if the script imports it, report the first tape's variables to
    `session`.

    `waits` limits the messages of plans. Waits for Horovod's own operations are not limited.
    """
    steering = _Steering(session, waits)
    optimizers = {
        "horovod.tensorflow.keras": partial(refuse_optimizers, "horovod.tensorflow.keras"),
        "horovod.keras": partial(refuse_optimizers, "horovod.keras"),
    }
    with changed_on_import({"horovod.tensorflow": steering.change, **optimizers}):
        yield


class _Steering:
    def __init__(self, session: ModelObserver, waits: Timeouts) -> None:
        self._session, self._waits = session, waits
        self._horovod: Any = None
        self._connection: HorovodConnection
        self._synchronizer: TensorflowSynchronizer | None = None
        self._switches: Switches | None = None
        self._tuned_variables: TunedVariables
        self._averaged: AveragedGraphs
        self._steps: WeakSet[Any] = WeakSet()  # functions of TensorFlow that compute gradients
        self._called = threading.local()
        self._failure: Exception | None = None
        self._started = False

    def change(self, horovod: ModuleType, undo: ExitStack) -> None:
        """Replace functions of `horovod.tensorflow`, and where TensorFlow begins a step."""
        check_horovod(horovod, "TensorFlow")
        import tensorflow as tf
        from tensorflow.python.eager.polymorphic_function import (
            concrete_function,
            polymorphic_function,
        )

        from runtime_rewriter.horovod.tensorflow_building import broadcast_text
        from runtime_rewriter.horovod.tensorflow_tape import AveragedGraphs

        self._averaged = AveragedGraphs()
        own: Any = horovod
        self._horovod = own
        self._connection = HorovodConnection(
            own, partial(broadcast_text, own), timeout_s=self._waits.message_s
        )
        tape = own.DistributedGradientTape
        function: Any = polymorphic_function.Function
        concrete: Any = concrete_function.ConcreteFunction
        places: tuple[tuple[Any, str, Any], ...] = (
            (own, "init", self._initializing(own.init)),
            (own.mpi_ops, "init", self._initializing(own.init)),
            (own, "add_process_set", self._adding(own.add_process_set)),
            (own.mpi_ops, "add_process_set", self._adding(own.add_process_set)),
            (own, "DistributedGradientTape", wraps(tape)(self._unconverted(self._tape, tape))),
            (
                own,
                "DistributedOptimizer",
                partial(refuse_optimizer, "horovod.tensorflow.DistributedOptimizer"),
            ),
            (own.elastic, "run", refuse_elastic),
            (own, "join", self._joining(own.join)),
            (own.mpi_ops, "join", self._joining(own.join)),
            (function, "__call__", self._calling(function.__call__)),
            (function, "get_concrete_function", self._tracing(function.get_concrete_function)),
            (concrete, "__call__", self._calling_concrete(concrete.__call__)),
            (tf.GradientTape, "__enter__", self._entering(tf.GradientTape.__enter__)),
        )
        for module, name, value in places:
            replace_attribute(module, name, value, undo)

    def _initializing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def init(*args: Any, **kwargs: Any) -> None:
            from runtime_rewriter.horovod.tensorflow_synchronizer import Switches

            self._connection.start(*args, **kwargs)
            if self._switches is None:
                self._switches = Switches.created()

        return init

    def _adding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def add_process_set(*args: Any, **kwargs: Any) -> Any:
            with self._connection.connecting():  # the ranks find each other once more
                return original(*args, **kwargs)

        return add_process_set

    def _joining(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def join() -> Any:
            check_join(self._synchronizer)
            return original()

        return join

    # -- steps

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Implements calls of a `tf.function`."""

        @wraps(original)
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._called, "function", None) is not None:
                if function in self._steps:  # it may have been traced before
                    with self._noted_failure():
                        self._note_step()
                return original(function, *args, **kwargs)
            self._called.function = function
            try:
                run = partial(original, function, *args, **kwargs)
                results = self._step(function, run, args, kwargs)
                if function in self._steps:  # tracing may have shown it
                    self._end()
                return results
            except Exception as error:  # noqa: BLE001 - it is raised again, or its cause is
                raise self._cause(error) from None
            finally:
                self._called.function = None

        return call

    def _tracing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Implements a trace without a call, which may turn out to be a step's."""

        @wraps(original)
        def trace(function: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._called, "function", None) is not None:
                return original(function, *args, **kwargs)
            try:
                return original(function, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - it is raised again, or its cause is
                raise self._cause(error) from None

        return trace

    def _calling_concrete(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(concrete: Any, *args: Any, **kwargs: Any) -> Any:
            synchronizer = self._synchronizer
            if synchronizer is not None and concrete.graph in synchronizer.graphs:
                with self._noted_failure():
                    raise InvalidInput(CONCRETE_REFUSAL)
            return original(concrete, *args, **kwargs)

        return call

    def _note_step(self) -> None:
        """Note the function under call as a step. Raises `InvalidInput` if it cannot be one."""
        import tensorflow as tf

        from runtime_rewriter.horovod.tensorflow_tape import outermost_graph

        assert self._synchronizer is not None
        recorder = self._synchronizer.graph_recorder
        if tf.executing_eagerly() or (recorder is not None and recorder.capturing):
            return
        graph, function = outermost_graph(), getattr(self._called, "function", None)
        if function is None:
            raise InvalidInput(CONCRETE_REFUSAL)
        self._steps.add(function)
        self._synchronizer.graphs.add(graph)

    def _step(
        self, function: Any, run: Callable[[], Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a `tf.function`, or let a recorder run or an emulated accelerator play it."""
        if function not in self._steps:
            return run()
        self._start()
        synchronizer = self._synchronizer
        if synchronizer is not None:
            synchronizer.gradients_are_due()
        if synchronizer is not None and synchronizer.graph_recorder is not None:
            return synchronizer.graph_recorder.run_step(function, args, kwargs)
        accelerator: Any = synchronizer and synchronizer.accelerator
        if accelerator is None:
            return run()
        return accelerator.run_step(function, run, (args, kwargs))

    def _entering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Implements the start of a tape's recording."""

        @wraps(original)
        def enter(tape: Any) -> Any:
            if getattr(self._called, "function", None) is None:
                self._start()
            return original(tape)

        return enter

    def _start(self) -> None:
        """Start a step of the tuned variables, unless one has started."""
        if self._synchronizer is not None and not self._started:
            self._started = True
            self._synchronizer.step_starts()

    def _end(self) -> None:
        if self._synchronizer is not None and self._started:
            self._started = False
            self._synchronizer.step_ended()

    def _cause(self, error: Exception) -> BaseException:
        """What was raised inside our functions, which TensorFlow wraps in errors of its own."""
        failure: BaseException | None = self._failure
        self._failure = None
        if self._synchronizer is not None and self._synchronizer.failure is not None:
            failure, self._synchronizer.failure = self._synchronizer.failure, None
        return failure or error

    @contextmanager
    def _noted_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    # -- tapes

    def _tape(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Implements `hvd.DistributedGradientTape`."""
        from runtime_rewriter.horovod.tensorflow_synchronizer import TapeSettings
        from runtime_rewriter.horovod.tensorflow_variables import check_variables

        tape = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        settings = TapeSettings(options["op"], options["process_set"], options["sparse_as_dense"])
        own, gradient = tape._allreduce_grads, tape.gradient
        alone = own
        # Horovod fails where a group has no gradients.
        if options["groups"] or options["num_groups"]:
            ungrouped = original(**{**options, "groups": None, "num_groups": 0})
            alone = ungrouped._allreduce_grads
        target: list[Any] = []

        def noting_target(loss: Any, sources: Any, *rest: Any, **named: Any) -> Any:
            target[:] = [loss]
            check_variables(sources)
            return gradient(loss, sources, *rest, **named)

        def averages(gradients: Any, variables: Any, generic_names: bool = False) -> Any:
            return self._averages(
                settings,
                list(gradients),
                list(variables),
                target[0],
                partial(own, use_generic_names=generic_names),
                partial(alone, use_generic_names=generic_names),
            )

        tape.gradient = wraps(gradient)(self._unconverted(noting_target))
        tape._allreduce_grads = averages
        return tape

    def _unconverted(self, function: Callable[..., Any], *given: Any) -> Callable[..., Any]:
        """The function as it is: AutoGraph would rewrite what a `tf.function` calls, and change
        what it raises."""
        import tensorflow as tf

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._noted_failure():
                return function(*given, *args, **kwargs)

        unconverted: Callable[..., Any] = call
        return unconverted

    def _averages(
        self,
        settings: TapeSettings,
        gradients: list[Any],
        variables: list[Any],
        target: Any,
        own: Callable[[list[Any], list[Any]], Any],
        alone: Callable[[list[Any], list[Any]], Any],
    ) -> Any:
        """Implements the averaging of a tape's gradients.

        `own`: Horovod's own averages of gradients of variables; `alone`: without groups.
        """
        import tensorflow as tf

        from runtime_rewriter.horovod.tensorflow_tape import outermost_graph

        if settings.sparse_as_dense:
            gradients = _densified(gradients)
        eager = tf.executing_eagerly()
        if not eager:
            outermost_graph()  # refuses loops before any rank waits for another
        synchronizer = self._synchronizer
        if synchronizer is None:
            synchronizer = self._build(settings, gradients, variables)
        if synchronizer.graph_recorder is not None and synchronizer.graph_recorder.capturing:
            return own(gradients, variables)
        positions_of, with_rows = self._tuned_variables.positions, self._tuned_variables.in_rows
        known = [number for number, one in enumerate(variables) if one.ref() in positions_of]
        if not known:
            return own(gradients, variables)  # another model's
        in_rows = [
            number
            for number, (one, gradient) in enumerate(zip(variables, gradients, strict=True))
            if one.ref() in with_rows and gradient is not None
        ]
        positions = [positions_of[variables[number].ref()] for number in known]
        check_complete(len(positions_of), positions, gradients, [*known, *in_rows])
        local, rows = ([gradients[number] for number in some] for some in (known, in_rows))
        check_dense([synchronizer.names[position] for position in positions], local)
        self._start()

        def averaged(average: Any, numbers: list[int], some: list[Any]) -> list[Any]:
            results = average(_placed(some, numbers, len(variables)), variables)
            return [results[number] for number in numbers]

        def horovods(local: list[Any]) -> list[Any]:
            """Horovod's own averages of gradients in the order of `known`, and of rows."""
            return averaged(own, [*known, *in_rows], [*local, *rows])

        def of_rows() -> list[Any]:
            return averaged(alone, in_rows, rows) if in_rows else []

        if eager:
            averages = self._averaged_eagerly(synchronizer, positions, local, horovods, of_rows)
        else:
            averages = self._averaged_in_graph(
                synchronizer, positions, local, target, horovods, of_rows
            )
        return _placed(averages, [*known, *in_rows], len(gradients))

    def _build(
        self, settings: TapeSettings, gradients: list[Any], variables: list[Any]
    ) -> TensorflowSynchronizer:
        """Build the synchronizer of the first tape's variables. Collective."""
        from runtime_rewriter.horovod.tensorflow_building import SynchronizerBuilder

        assert self._switches is not None, "hvd.init() has found the world"
        build = SynchronizerBuilder(
            self._horovod, self._connection, self._switches, self._waits, settings
        )
        self._tuned_variables, self._synchronizer = build(gradients, variables)
        self._session.model_built(self._synchronizer)
        return self._synchronizer

    def _averaged_in_graph(
        self,
        synchronizer: TensorflowSynchronizer,
        positions: Sequence[int],
        gradients: list[Any],
        target: Any,
        own: Callable[[list[Any]], list[Any]],
        rows: Callable[[], list[Any]],
    ) -> list[Any]:
        from runtime_rewriter.horovod.tensorflow_tape import averaged_in_graph

        synchronizer.mark_unclean()  # tracing takes time
        self._note_step()
        self._averaged.note()
        synchronizer.own_averages = lambda by_position: own(
            [by_position[position] for position in positions]
        )
        return averaged_in_graph(
            synchronizer, positions, gradients, target, partial(own, gradients), rows
        )

    def _averaged_eagerly(
        self,
        synchronizer: TensorflowSynchronizer,
        positions: Sequence[int],
        gradients: list[Any],
        own: Callable[[list[Any]], list[Any]],
        rows: Callable[[], list[Any]],
    ) -> list[Any]:
        from runtime_rewriter.horovod.tensorflow_tape import EAGER_REFUSAL, averaged_eagerly

        if synchronizer.graph_recorder is not None:
            raise InvalidInput(EAGER_REFUSAL.format(what="the step cannot be recorded"))
        if synchronizer.accelerator is not None:
            raise InvalidInput(EAGER_REFUSAL.format(what="accelerators cannot be emulated"))
        if synchronizer.plan is None:
            averages = own(gradients)
            self._end()
            return averages
        self._started = False
        of_rows = rows()
        return [*averaged_eagerly(synchronizer, positions, gradients), *of_rows]


def _densified(gradients: Sequence[Any]) -> list[Any]:
    """The gradients, with those that are rows as dense tensors."""
    import tensorflow as tf

    return [
        tf.convert_to_tensor(one) if isinstance(one, tf.IndexedSlices) else one for one in gradients
    ]


def _placed(values: Sequence[Any], numbers: Sequence[int], count: int) -> list[Any]:
    """A list of `count` with the values at these numbers, and None elsewhere."""
    placed: list[Any] = [None] * count
    for number, value in zip(numbers, values, strict=True):
        placed[number] = value
    return placed
