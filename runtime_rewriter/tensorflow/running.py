"""Runs the distributed graph of one plan after another on the same servers.

Variables keep their values when the plan changes. Each graph has keys of its own for its
collectives, because servers remember those that they have seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from autotune.errors import InvalidInput, InvalidStrategy, SynchronizationError
from autotune.strategy_space.plan import Plan
from runtime_rewriter.tensorflow.checkpoints import gather, gather_kept, scatter, scatter_kept
from runtime_rewriter.tensorflow.collectives import Keys
from runtime_rewriter.tensorflow.distribute import distribute
from runtime_rewriter.tensorflow.distributed_graph import DistributedGraph
from runtime_rewriter.tensorflow.gate_tensors import GraphGate
from runtime_rewriter.tensorflow.kept_state import KeptState
from runtime_rewriter.tensorflow.synchronization import Circumstances
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

v1 = tf.compat.v1

_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
_LATE = (tf.errors.DeadlineExceededError,)
_COLLECTIVE = ("collective", "socket closed", "rendezvous", "recvtensor", "recvbuf")


Combine = Callable[[str, list[np.ndarray]], np.ndarray]
Distribute = Callable[..., DistributedGraph]
"""`distribute`, or a function of the same arguments."""


class Target(Protocol):
    """What a session connects to: `target`, its configuration, and a device per rank.

    `hosts`: the ranks of each host; empty if it is not known which ranks share one.
    """

    @property
    def target(self) -> str: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    @property
    def config(self) -> Any: ...
    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]: ...


class RunningGraph:
    """A training graph on servers under a plan. Only rank 0 has one: it is the only client.

    A step fails after `step_timeout_s`. `combine`: makes a fetch, given its name, of those of all
    replicas; None: the first replica's counts. `first_key`: the first collective key that the
    servers have not seen. `distribute` writes the graph of a plan.
    """

    def __init__(
        self,
        training: TrainingGraph,
        servers: Target,
        step_timeout_s: float,
        combine: Combine | None = None,
        first_key: int = 1,
        distribute: Distribute = distribute,
    ) -> None:
        self.combine, self._distribute = combine, distribute
        self.training, self.servers = training, servers
        self._options = v1.RunOptions(timeout_in_ms=int(step_timeout_s * 1e3))
        self._next_key = first_key
        self._values: Mapping[str, np.ndarray] = training.initial
        self._kept = _nothing_kept(training)
        self._drained: frozenset[str] = frozenset()
        self._session: Any = None
        self.graph: DistributedGraph | None = None

    def load(self, plan: Plan, training: TrainingGraph | None = None) -> None:
        """Let further steps enact `plan`, with the present values of the variables.

        `training`: another graph from now on, with its initial values. Raises `InvalidStrategy` if
        the plan cannot be enacted; the earlier one then stays.
        """
        waiting: frozenset[str] = frozenset() if training is not None else self._waiting()
        try:
            graph = self._distribute(
                training or self.training,
                plan,
                self.servers.devices,
                self._next_key,
                Circumstances(self.servers.hosts, waiting),
                gated=True,
            )
        except InvalidInput as error:
            if isinstance(error, InvalidStrategy):
                raise
            raise InvalidStrategy(str(error)) from error
        self.close()
        if training is not None:
            self.training, self._values = training, training.initial
            self._kept = _nothing_kept(training)
        self.graph, self._next_key = graph, graph.next_key
        with tf.Graph().as_default() as built:
            tf.graph_util.import_graph_def(graph.graph_def, name="")
        self._session = v1.Session(self.servers.target, graph=built, config=self.servers.config)
        with translated_errors():
            scatter(self._session, graph, self._values)
            scatter_kept(self._session, graph, self._kept)
        sent_whole = {
            part.variable
            for message in plan.messages
            if not message.compressor.error_feedback
            for part in message.slices
        }
        self._drained = waiting & sent_whole

    def step(self, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Train one step with the global batch; return the fetches."""
        fetches, _ = self.observed_step(values, None)
        return fetches

    def observed_step(
        self,
        values: Mapping[str, np.ndarray],
        metadata: Any,
        fetches: Mapping[str, str] = {},
        options: Any = None,
    ) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Train one step, and return the values of further tensors `fetches` by name.

        `options`: RunOptions that state what the RunMetadata `metadata` gets; the time limit is
        set here. None for both: nothing is recorded.
        """
        graph = self._loaded
        given = v1.RunOptions()
        given.CopyFrom(options or self._options)
        given.timeout_in_ms = self._options.timeout_in_ms
        own_fetches = {
            name: [of_replica(tensor, rank) for rank in range(self._fetched_replicas)]
            for name, tensor in graph.fetches.items()
        }
        wanted = (own_fetches, dict(fetches), list(graph.targets))
        with translated_errors():
            own, further, _ = self._session.run(
                wanted, graph.feed_dict(values), options=given, run_metadata=metadata
            )
        if self._drained:
            # A message without feedback has sent what an earlier plan had left. Further steps have
            # nothing to add, so a graph without these residuals takes over.
            self._drained = frozenset()
            self.load(graph.plan)
        combine = self.combine or (lambda name, values: values[0])
        return [combine(name, values) for name, values in own.items()], further

    @property
    def _fetched_replicas(self) -> int:
        return 1 if self.combine is None else len(self.servers.devices)

    def only(self, targets: list[str], values: Mapping[str, np.ndarray], metadata: Any) -> None:
        """Run nodes of the graph that change no variable, and trace them into `metadata`."""
        options = v1.RunOptions(
            trace_level=v1.RunOptions.FULL_TRACE, timeout_in_ms=self._options.timeout_in_ms
        )
        with translated_errors():
            self._session.run(
                targets, self._loaded.feed_dict(values), options=options, run_metadata=metadata
            )

    def values_of(
        self, tensors: Sequence[str], values: Mapping[str, np.ndarray]
    ) -> list[np.ndarray]:
        """The first replica's values of tensors of the training graph, which change no variable."""
        names = [f"replica_0/{tensor}" for tensor in tensors]
        with translated_errors():
            fetched: list[np.ndarray] = self._session.run(
                names, self._loaded.feed_dict(values), options=self._options
            )
        return fetched

    @property
    def _loaded(self) -> DistributedGraph:
        assert self.graph is not None, "a plan must be loaded before a step"
        return self.graph

    def values(self) -> Mapping[str, np.ndarray]:
        """The values of all variables, by their names in the training graph."""
        if self._session is not None:
            with translated_errors():
                self._values = gather(self._session, self._loaded)
        return self._values

    def fetch(self, names: Set[str]) -> dict[str, np.ndarray]:
        """The values of some variables, as far as the graph has them."""
        with translated_errors():
            return gather(self._session, _part(self._loaded, names))

    def send(self, values: Mapping[str, np.ndarray]) -> None:
        """Replace the values of some variables on all ranks."""
        with translated_errors():
            scatter(self._session, _part(self._loaded, values.keys()), values)

    @contextlib.contextmanager
    def further_keys(self) -> Iterator[Keys]:
        """Hand out collective keys for other graphs on the same servers."""
        keys = Keys(self._next_key)
        try:
            yield keys
        finally:
            self._next_key = keys.next_key

    def forget_residuals(self) -> None:
        """Drop what compressed messages have not sent, and PowerSGD's starts."""
        self._kept.forget()
        if self._session is not None:
            with translated_errors():
                scatter_kept(self._session, self._loaded, self._kept)

    def gate(self) -> GraphGate:
        """A numerics gate of the loaded graph."""
        tensors = self._loaded.gate
        assert tensors is not None
        return GraphGate(tensors, self._loaded.plan)

    def _waiting(self) -> frozenset[str]:
        """The variables of which a rank has not sent everything."""
        if self._session is not None:
            with translated_errors():
                gather_kept(self._session, self._loaded, self._kept)
        return self._kept.waiting

    def close(self) -> None:
        """End the session; the values stay here, and the servers forget theirs."""
        if self._session is None:
            return
        self.values()
        self._waiting()
        destroy = _destroying(self._session.graph, self._loaded)
        with contextlib.suppress(tf.errors.OpError):  # they end with the servers, too
            self._session.run(destroy)
        self._session.close()
        self._session = self.graph = None


def of_replica(tensor: str, rank: int) -> str:
    """The name in a replica of a tensor of the first one."""
    return tensor.replace("replica_0/", f"replica_{rank}/", 1)


def _nothing_kept(training: TrainingGraph) -> KeptState:
    return KeptState({one.name: one.shape for one in training.variables})


def _part(graph: DistributedGraph, names: Set[str]) -> DistributedGraph:
    part = tuple(one for one in graph.variables if one.variable in names)
    return replace(graph, variables=part, kept=())


def _destroying(built: Any, graph: DistributedGraph) -> list[Any]:
    """Ops that free the memory of the graph's variables."""
    with built.as_default():
        operations = []
        held = [(one.rank, one.handle) for one in graph.variables]
        for rank, name in [*held, *((one.rank, one.handle) for one in graph.kept)]:
            with tf.device(graph.devices[rank]):
                handle = built.get_tensor_by_name(f"{name}:0")
                operations.append(
                    tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
                )
        return operations


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Name the cause of errors of the connections; others are the script's own."""
    try:
        yield
    except _LATE as error:
        raise SynchronizationError(
            "a step did not end in time: a server has ended or hangs, or the network is too slow "
            f"for --step-timeout ({_line(error)})"
        ) from TimeoutError(_line(error))
    except (*_LOST, tf.errors.InternalError) as error:
        if not any(word in error.message.lower() for word in _COLLECTIVE):
            raise
        raise SynchronizationError(
            "a message between the servers was aborted, after which they take no further one: "
            f"they start anew with the next trial ({_line(error)})"
        ) from error


def _line(error: Any) -> str:
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    described = [line for line in lines if any(word in line.lower() for word in _COLLECTIVE)]
    line: str = (described or lines or [type(error).__name__])[0]
    return line[:300]
