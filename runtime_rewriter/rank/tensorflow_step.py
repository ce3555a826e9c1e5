"""Implements `autotune.distribute(step)`, the one line in a TensorFlow training script."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from tensorflow.python.util import nest

from autotune.errors import InvalidInput
from autotune.export import Export, read_export
from runtime_rewriter.active import Session, current_session
from runtime_rewriter.control import ControlClosed, ControlLine
from runtime_rewriter.failures import kind_of_exception
from runtime_rewriter.protocol import RankFailed, ScriptFinished, encode
from runtime_rewriter.pytorch.exchange.ranks import TRAINING_TIMEOUTS
from runtime_rewriter.rank.ending import describe, exit_now
from runtime_rewriter.rank.exported import ExportSession, agree_on_plan
from runtime_rewriter.rank.following import follow
from runtime_rewriter.rank.session import TuningSession
from runtime_rewriter.rank.tensorflow_model import TensorflowModel
from runtime_rewriter.recording.session import RecordingSession
from runtime_rewriter.rendezvous import refuse_lone_ranks
from runtime_rewriter.software import software_versions
from runtime_rewriter.tensorflow.batch_updates import refuse_updates_by_batch
from runtime_rewriter.tensorflow.capture import CapturedStep, capture_step, is_compiled, untraced
from runtime_rewriter.tensorflow.local_device import LocalDevice
from runtime_rewriter.tensorflow.mean_loss import refuse_other_losses
from runtime_rewriter.tensorflow.program_variables import ProgramVariables
from runtime_rewriter.tensorflow.running import Combine, RunningGraph, Target
from runtime_rewriter.tensorflow.script_recorder import ScriptRecorder
from runtime_rewriter.tensorflow.servers import RankPlace, Servers, start_servers

START_S = 300.0
"""Time until all ranks have come to `distribute`: each of them may load its data before."""
UNCOMPILED = (
    "XLA compiles the script's own step (jit_compile), but not the graphs of ranks, also in the "
    "current setup; a plan may make kernels of sets of ops"
)
_log = logging.getLogger("autotune")


def distribute(step: Any, strategy: str | Path | None) -> Any:
    """See `autotune.distribute`."""
    place = RankPlace.of(os.environ)
    session = current_session()
    recording = session if isinstance(session, RecordingSession) else None
    if place is None:
        refuse_lone_ranks(os.environ)
        if recording is None:
            return step
    _refuse_untraced(step)
    if place is not None:
        return _joined(place, strategy)(step)
    return DistributedStep(step, LocalDevice(), (), recording)


def _refuse_untraced(step: Any) -> None:
    """Raise `InvalidInput` for a step that runs as Python every time, unlike its trace."""
    traced = step.func if isinstance(step, partial) else step
    if not hasattr(traced, "get_concrete_function"):
        name = getattr(traced, "__name__", type(traced).__name__)
        raise InvalidInput(
            f"a distributed step must be a tf.function, whose Python runs once, but {name} is "
            "none; decorate it with @tf.function, and keep in tensors or variables what changes "
            "from step to step"
        )


def distributed_fit(model: Any, own: Any) -> Any:
    """Return what stands for the `train_function` of a Keras model, whose own one is `own`."""
    from runtime_rewriter.rank.keras_step import KerasStep, combined

    place = RankPlace.of(os.environ)
    assert place is not None, "a model is fitted on all ranks where a launcher has started them"
    distributed = _joined(place, None, combined, compiled=bool(model.jit_compile))
    return KerasStep(model, own, place.world_size, distributed)


def is_distributing() -> bool:
    """Whether the ranks already train a step of this script together."""
    return bool(_STARTED)


_STARTED: list[Servers] = []


def _joined(
    place: RankPlace,
    strategy: str | Path | None,
    combine: Combine | None = None,
    compiled: bool = False,
) -> Callable[[Any], DistributedStep]:
    """Start the servers of all ranks; return what distributes a step. Only rank 0 returns: the
    processes of the others end with its script."""
    session = current_session()
    recording = session if isinstance(session, RecordingSession) else None
    servers = start_servers(place, START_S)
    export = agree_on_plan(servers.peers, lambda: _own_export(session, strategy), START_S)
    tuning = session if isinstance(session, TuningSession) else None
    if place.rank > 0:
        _follow_to_the_end(servers.peers.lines[0], tuning, recording)
    if tuning is not None and strategy is not None:
        _log.warning("%s is not used: the tuner chooses the strategy", strategy)
    atexit.register(_say_goodbye, servers.peers.lines)
    if recording is not None:
        recording.at_end.callback(_say_goodbye, servers.peers.lines)
    _STARTED.append(servers)
    lines, hosts = servers.peers.lines, _hosts(servers)
    steering = recording or tuning
    applied = session.applied_in_graph if isinstance(session, ExportSession) else _not_reported
    return lambda step: DistributedStep(
        step,
        servers,
        lines,
        steering,
        export,
        hosts,
        combine=combine,
        compiled=compiled,
        applied=applied,
    )


def _follow_to_the_end(
    leader: ControlLine, tuning: TuningSession | None, recording: RecordingSession | None
) -> NoReturn:
    """Serve rank 0 until its script ends, and end this process there.

    Its script has not trained. Nothing of it may run any more: a `finally` would save variables
    that no step has updated over those that rank 0 has saved.
    """
    with contextlib.suppress(ValueError):  # another thread than the main one
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides, and may save after it
    failure: RankFailed | None = None
    try:
        follow(leader, tuning.line if tuning else None)
    except BaseException as error:  # noqa: BLE001 - reported, like any end of a script
        failure = RankFailed(kind_of_exception(error), describe(error))
        traceback.print_exc()
        if recording is not None:
            recording.report(error, failure.message)
    if tuning is not None:
        with contextlib.suppress(ControlClosed):
            tuning.finish(failure)
    if recording is not None:
        recording.at_end.close()
    exit_now(1 if failure else 0)


def _not_reported() -> None:
    """Nobody waits to hear that an export was applied."""


def _own_export(session: Session | None, strategy: str | Path | None) -> Export | None:
    """Return the export to train by; None under a tuner, which loads the plans of its trials."""
    if isinstance(session, ExportSession):
        return session.export
    if strategy is None or isinstance(session, TuningSession):
        return None
    return read_export(Path(strategy))


def _hosts(servers: Servers) -> dict[str, str]:
    """Task of a server -> its host: this one, or the address by which rank 0 sees it."""
    tasks = [device.rpartition("/device:")[0] for device in servers.devices]
    if servers.place.one_host:
        return dict.fromkeys(tasks, socket.gethostname())
    return dict(zip(tasks, servers.peers.addresses, strict=True))


def _say_goodbye(followers: Sequence[ControlLine]) -> None:
    for line in followers:
        with contextlib.suppress(ControlClosed):
            line.send(encode(ScriptFinished(0)))


class DistributedStep:
    """A training step on the servers of all ranks; only rank 0 has one.

    It takes the arguments of the script's own step and returns its results: those of the first
    replica, or what `combine` makes of all (see `RunningGraph`). `compiled`: whether XLA compiles
    the script's own step, as far as `step` itself does not show it. `applied` is called once the
    step trains by the export.
    """

    def __init__(
        self,
        step: Any,
        target: Target,
        followers: Sequence[ControlLine],
        session: TuningSession | RecordingSession | None,
        export: Export | None = None,
        hosts: Mapping[str, str] = {},
        combine: Combine | None = None,
        compiled: bool = False,
        applied: Callable[[], None] = _not_reported,
    ) -> None:
        self._applied = applied
        self._combine, self._compiled = combine, compiled or is_compiled(step)
        self._step, self._target, self._followers = step, target, followers
        self._session, self._export, self._hosts = session, export, hosts
        self._specs: Sequence[Any] | None = None
        self._captured: CapturedStep | None = None
        self._model: TensorflowModel | None = None
        self._program: ProgramVariables | None = None
        self._stepped = False
        self._under_way = False  # also after a step that has failed: servers may be gone
        self._until_closed = contextlib.ExitStack()

    def close(self) -> None:
        """Stop to keep the script's own variables up to date; they keep their last values.

        A script may save them in an exit handler of its own, which runs after ours.
        """
        try:
            if self._program is not None and not self._under_way:
                self._program.use_all()
        finally:
            self._until_closed.close()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if keywords:
            raise InvalidInput(
                "a distributed step takes positional arguments, but got "
                f"{', '.join(sorted(keywords))} by name"
            )
        if self._specs is None:
            self._specs = nest.flatten(signature_of(arguments, self._step))
        flat = arrays_of(arguments, self._specs)
        if self._model is None:
            self._model = self._built(arguments, flat)
        assert self._captured is not None and self._program is not None
        used = self._program.send_changes()
        if self._session is not None and self._stepped:
            self._session.on_boundary(time.perf_counter(), clean=not used)
        self._stepped = True
        needed = {feed.name for feed in self._model.running.training.feeds}
        pairs = zip(self._captured.arguments, flat, strict=True)
        self._under_way = True
        results = self._model.step({name: value for name, value in pairs if name in needed})
        self._program.stepped()
        self._under_way = False
        return self._captured.packed(list(results.values()))

    def _built(self, arguments: tuple[Any, ...], flat: Sequence[np.ndarray]) -> TensorflowModel:
        self._captured = capture_step(untraced(self._step), signature_of(arguments, self._step))
        waits = TRAINING_TIMEOUTS if self._session is None else self._session.timeouts
        training = self._captured.training
        batch = dict(zip(self._captured.arguments, flat, strict=True))
        refuse_updates_by_batch(training, len(self._target.devices))
        refuse_other_losses(training, self._target, batch, waits.message_s)
        running = RunningGraph(training, self._target, waits.message_s, self._combine)
        model = TensorflowModel(running, getattr(self._step, "__name__", "train_step"))
        if self._compiled:
            model.note = UNCOMPILED
            _log.warning("%s", UNCOMPILED)
        self._program = ProgramVariables(self._captured.variables, running)
        self._until_closed.enter_context(self._program.watched())
        atexit.register(self.close)
        if self._export is not None:
            model.load_export(self._export)
            self._applied()
        if isinstance(self._session, RecordingSession):
            self._record(self._session, model)
        elif self._session is not None:
            self._session.tune(model, self._followers)
        return model

    def _record(self, session: RecordingSession, model: TensorflowModel) -> None:
        settings = session.settings
        model.recorder = ScriptRecorder(
            model.running,
            model.name,
            self._hosts,
            folder=Path(settings.folder),
            asked_steps=settings.steps,
            warmup=settings.warmup,
            command=settings.command,
            software=software_versions() | model.software,
        )
        session.graph_built(model.recorder)


def signature_of(arguments: tuple[Any, ...], step: Any) -> Sequence[Any]:
    """The step's own input signature, or that of its first arguments.

    The first dimension of the first array is the batch; arrays that share it are split between the
    replicas, and all else is copied.
    """
    signature: Sequence[Any] | None = getattr(step, "input_signature", None)
    if signature is not None:
        return signature
    _refuse_values(arguments)
    arrays = [_array(value) for value in nest.flatten(arguments)]
    batch = next((array.shape[0] for array in arrays if array.ndim), None)
    if batch is None:
        raise InvalidInput(
            "a distributed step splits its batch between the replicas, but none of its "
            f"{len(arrays)} arguments is an array; pass the batch as an argument"
        )
    specs = [
        tf.TensorSpec(
            [None, *array.shape[1:]] if array.shape[:1] == (batch,) else array.shape, array.dtype
        )
        for array in arrays
    ]
    packed: Sequence[Any] = nest.pack_sequence_as(arguments, specs)
    return packed


def arrays_of(arguments: tuple[Any, ...], specs: Sequence[Any]) -> list[np.ndarray]:
    """The flat arguments as arrays of the traced `specs`, or raise `InvalidInput`."""
    arrays = [np.asarray(value) for value in nest.flatten(arguments)]
    for number, (array, spec) in enumerate(zip(arrays, specs, strict=True), start=1):
        if isinstance(spec, tf.TensorSpec) and not spec.shape.is_compatible_with(array.shape):
            raise InvalidInput(
                f"array {number} of a distributed step must have the shape {spec.shape} that was "
                f"traced, None for any extent, but has {array.shape}; give the step an "
                "input_signature with None where batches differ, such as @tf.function("
                f"input_signature=[tf.TensorSpec({[None] * array.ndim}, tf.{spec.dtype.name})]), "
                "or pad batches to one shape"
            )
    return arrays


def _array(value: Any) -> np.ndarray:
    """An argument with the dtype that TensorFlow gives it; numpy has float64 for Python's."""
    if isinstance(value, float | int) and not isinstance(value, np.generic):
        return np.asarray(value, "float32" if isinstance(value, float) else "int32")
    return np.asarray(value)


def _refuse_values(arguments: tuple[Any, ...]) -> None:
    """Raise `InvalidInput` for a value that a step reads in Python, while it is traced."""
    for number, argument in enumerate(arguments, 1):
        for value in nest.flatten(argument):
            if value is None or isinstance(value, bool | str | bytes):
                raise InvalidInput(
                    f"arguments of a distributed step are arrays and numbers, but argument "
                    f"{number} is or holds {value!r}; bind it by functools.partial before: "
                    "autotune.distribute(functools.partial(train_step, name=value))"
                )
