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

import torch.distributed as dist

from autotune.errors import InvalidInput
from runtime_rewriter.horovod.connection import HorovodConnection
from runtime_rewriter.horovod.importing import changed_on_import, replace_attribute
from runtime_rewriter.horovod.tensorflow_refusals import (
    check_tape,
    check_threads,
    refuse_elastic,
    refuse_optimizer,
    refuse_optimizers,
)
from runtime_rewriter.pytorch.ddp import ModelObserver
from runtime_rewriter.pytorch.exchange.ranks import Timeouts

if TYPE_CHECKING:
    from runtime_rewriter.horovod.tensorflow_synchronizer import (
        Switches,
        TapeSettings,
        TensorflowSynchronizer,
    )

_ADDRESS_BYTES = 256


@contextmanager
def tensorflow_horovod_steered(
    session: ModelObserver, waits: Timeouts, tuned: bool
) -> Iterator[None]:
    """Let `horovod.tensorflow`, if the script imports it, report the first tape's variables to
    `session`.

    `tuned`: a rank that waits too long for another one ends.
    """
    steering = _Steering(session, waits, tuned)
    optimizers = {
        "horovod.tensorflow.keras": partial(refuse_optimizers, "horovod.tensorflow.keras"),
        "horovod.keras": partial(refuse_optimizers, "horovod.keras"),
    }
    with changed_on_import({"horovod.tensorflow": steering.change, **optimizers}):
        yield


class _Steering:
    def __init__(self, session: ModelObserver, waits: Timeouts, tuned: bool) -> None:
        self._session, self._waits, self._tuned = session, waits, tuned
        self._horovod: Any = None
        self._connection: HorovodConnection
        self._synchronizer: TensorflowSynchronizer | None = None
        self._switches: Switches | None = None
        self._positions: dict[Any, int] = {}
        self._steps: WeakSet[Any] = WeakSet()  # functions of TensorFlow that compute gradients
        self._called = threading.local()
        self._failure: Exception | None = None
        self._started = False

    def change(self, horovod: ModuleType, undo: ExitStack) -> None:
        """Replace functions of `horovod.tensorflow`, and where TensorFlow begins a step."""
        import tensorflow as tf
        from tensorflow.python.eager.polymorphic_function import polymorphic_function

        own: Any = horovod
        self._horovod = own
        self._connection = HorovodConnection(
            own.init,
            own.shutdown,
            lambda: (own.rank(), own.size()),
            partial(_broadcast_text, own),
            stall_s=self._waits.message_s if self._tuned else None,
            timeout_s=self._waits.message_s,
        )
        tape = own.DistributedGradientTape
        function: Any = polymorphic_function.Function
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
            (function, "__call__", self._calling(function.__call__)),
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

    # -- steps

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Implements calls of a `tf.function`."""

        @wraps(original)
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._called, "function", None) is not None:
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

    def _step(
        self, function: Any, run: Callable[[], Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a `tf.function`, or let a recorder run or an emulated accelerator play it."""
        if function not in self._steps:
            return run()
        self._start()
        synchronizer = self._synchronizer
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

    # -- tapes

    def _tape(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Implements `hvd.DistributedGradientTape`."""
        from runtime_rewriter.horovod.tensorflow_synchronizer import TapeSettings
        from runtime_rewriter.horovod.tensorflow_variables import check_variables

        tape = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        settings = TapeSettings(
            options["op"],
            options["process_set"],
            options["sparse_as_dense"],
            bool(options["groups"] or options["num_groups"]),
        )
        if settings.grouped and self._synchronizer is None:
            self._connection.execute_groups_alone(False)
        own, gradient = tape._allreduce_grads, tape.gradient
        target: list[Any] = []

        def noting_target(loss: Any, sources: Any, *rest: Any, **named: Any) -> Any:
            target[:] = [loss]
            check_variables(sources)
            return gradient(loss, sources, *rest, **named)

        def averages(gradients: Any, variables: Any, generic_names: bool = False) -> Any:
            return self._averages(
                settings, list(gradients), list(variables), target[0], generic_names, own
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
            try:
                return function(*given, *args, **kwargs)
            except Exception as error:
                self._failure = error
                raise

        unconverted: Callable[..., Any] = call
        return unconverted

    def _averages(
        self,
        settings: TapeSettings,
        gradients: list[Any],
        variables: list[Any],
        target: Any,
        generic_names: bool,
        own: Callable[..., Any],
    ) -> Any:
        """Implements the averaging of a tape's gradients."""
        import tensorflow as tf

        from runtime_rewriter.horovod import tensorflow_tape as tapes

        if settings.sparse_as_dense:
            gradients = [
                tf.convert_to_tensor(one) if isinstance(one, tf.IndexedSlices) else one
                for one in gradients
            ]
        eager = tf.executing_eagerly()
        graph = None if eager else tapes.outermost_graph()
        if self._synchronizer is None:
            self._synchronizer = self._built(settings, gradients, variables)
        synchronizer = self._synchronizer
        if synchronizer.graph_recorder is not None and synchronizer.graph_recorder.capturing:
            return own(gradients, variables, generic_names)
        known = [number for number, one in enumerate(variables) if one.ref() in self._positions]
        if not known:
            return own(gradients, variables, generic_names)  # another model's
        positions = [self._positions[variables[number].ref()] for number in known]
        self._check_complete(positions, gradients, known)
        self._start()

        def horovods(local: list[Any]) -> list[Any]:
            """Horovod's own averages of gradients in the order of `known`."""
            whole: list[Any] = [None] * len(variables)
            for number, gradient in zip(known, local, strict=True):
                whole[number] = gradient
            results = own(whole, variables, generic_names)
            return [results[number] for number in known]

        local = [gradients[number] for number in known]
        if eager:
            averages = self._averaged_eagerly(synchronizer, positions, local, horovods)
        else:
            synchronizer.mark_unclean()  # tracing takes time
            self._steps.add(self._called.function)
            synchronizer.graphs.add(graph)
            synchronizer.own_averages = lambda by_position: horovods(
                [by_position[position] for position in positions]
            )
            averages = tapes.averaged_in_graph(
                synchronizer, positions, local, target, partial(horovods, local)
            )
        results: list[Any] = [None] * len(gradients)
        for number, average in zip(known, averages, strict=True):
            results[number] = average
        return results

    def _check_complete(
        self, positions: Sequence[int], gradients: Sequence[Any], known: Sequence[int]
    ) -> None:
        """Raise `InvalidInput` unless these are the gradients of exactly the tuned variables."""
        others = [one for n, one in enumerate(gradients) if n not in known and one is not None]
        if others or sorted(positions) != list(range(len(self._positions))):
            raise InvalidInput(
                f"each step must compute the gradients of the same {len(self._positions)} "
                f"variables, but one computes those of {len(positions)} of them and of "
                f"{len(others)} others; compute all in one tape.gradient()"
            )

    def _averaged_eagerly(
        self,
        synchronizer: TensorflowSynchronizer,
        positions: Sequence[int],
        gradients: list[Any],
        own: Callable[[list[Any]], list[Any]],
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
        return averaged_eagerly(synchronizer, positions, gradients)

    def _built(
        self, settings: TapeSettings, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> TensorflowSynchronizer:
        """The synchronizer of the variables that have a gradient on any rank. Collective."""
        import tensorflow as tf

        from runtime_rewriter.horovod.tensorflow_emulation import TensorflowAccelerator
        from runtime_rewriter.horovod.tensorflow_synchronizer import TensorflowSynchronizer
        from runtime_rewriter.horovod.tensorflow_variables import TensorflowStep, unique_names

        check_tape(self._horovod, settings)
        check_threads()
        names = unique_names(variables)
        world = self._connection.world
        present = [(one is not None, isinstance(one, tf.IndexedSlices)) for one in gradients]
        everywhere: list[Any] = [None] * self._horovod.size()
        with world.as_default():
            dist.all_gather_object(everywhere, dict(zip(names, present, strict=True)))
        chosen = []
        for name, variable in zip(names, variables, strict=True):
            of_ranks = [of_rank.get(name, (False, False)) for of_rank in everywhere]
            if any(has for has, _ in of_ranks):
                chosen.append((name, variable, any(sparse for _, sparse in of_ranks)))
        if not chosen:
            raise InvalidInput("tape.gradient() gave no gradient of any variable on any rank")
        self._positions = {one.ref(): position for position, (_, one, _) in enumerate(chosen)}
        assert self._switches is not None, "hvd.init() has found the world"
        synchronizer = TensorflowSynchronizer(
            TensorflowStep(chosen),
            settings,
            self._horovod,
            self._connection,
            self._switches,
            self._waits,
        )
        synchronizer.accelerator_of = TensorflowAccelerator
        absent = {name for name, (has, _) in zip(names, present, strict=True) if not has}
        synchronizer.missing = frozenset(
            position for position, (name, _, _) in enumerate(chosen) if name in absent
        )
        self._session.model_built(synchronizer)
        return synchronizer


def _broadcast_text(horovod: Any, text: str) -> str:
    """Rank 0's text on all ranks. Horovod's own function for objects would unpickle them."""
    import numpy as np
    import tensorflow as tf

    encoded = np.zeros(_ADDRESS_BYTES, np.uint8)
    encoded[: len(text)] = list(text.encode())
    with tf.device("CPU:0"):
        sent = horovod.broadcast(tf.constant(encoded), root_rank=0, name="autotune.address")
    return bytes(sent.numpy().tolist()).rstrip(b"\0").decode()
