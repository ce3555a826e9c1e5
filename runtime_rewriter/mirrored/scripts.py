"""Steers a script that builds a `tf.distribute.MultiWorkerMirroredStrategy`.

TensorFlow starts a server on each worker, which the script finds in `TF_CONFIG`. So a rank of ours
gets a `TF_CONFIG` of its own: from the import of TensorFlow on, with the number of workers and the
task, and from the strategy on with the addresses that the ranks have agreed on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

from autotune.errors import InvalidInput
from runtime_rewriter.horovod.importing import changed_on_import, replace_attribute
from runtime_rewriter.rendezvous import Peers, refuse_lone_ranks

TF_CONFIG = "TF_CONFIG"
_JOB = "worker"
START_S = 300.0
"""Time until all ranks have come to the strategy: each of them may load its data before."""
HEARTBEAT_S = 120.0
"""Silence after which TensorFlow gives up a worker; by default 10 s, which a worker on a busy
machine exceeds. Whoever started the ranks notices one that ends at once."""

Steered = Callable[[ExitStack, Peers], None]


@contextmanager
def mirrored_steered(steered: Steered) -> Iterator[None]:
    """Let the first strategy of `tensorflow`, if the script builds one, be steered.

    `steered` is called once, when the strategy is built, with a stack that is closed at the end,
    and with the lines between the ranks, which all call it. Without a launched world of several
    ranks the strategy is the script's own, unless its launcher started several processes.
    """
    with ExitStack() as until_end:
        steering = _Steering(steered, until_end)
        with changed_on_import({"tensorflow": steering.change}):
            yield


class _Steering:
    def __init__(self, steered: Steered, until_end: ExitStack) -> None:
        self._steered, self._until_end = steered, until_end
        self._built = False

    def change(self, tensorflow: ModuleType, undo: ExitStack) -> None:
        """Let the strategy's class find our workers."""
        from tensorflow.python.distribute import collective_all_reduce_strategy as strategies
        from tensorflow.python.distribute import parameter_server_strategy as v1_servers
        from tensorflow.python.distribute import parameter_server_strategy_v2 as v2_servers
        from tensorflow.python.eager import context

        from runtime_rewriter.tensorflow.servers import RankPlace

        place = RankPlace.of(os.environ)
        extended = strategies.CollectiveAllReduceExtended
        own_start = extended.__init__
        if place is None:
            replace_attribute(extended, "__init__", _refusing_lone_ranks(own_start), undo)
            return
        _set_config(["127.0.0.1:0"] * place.world_size, place.rank)

        @wraps(own_start)
        def start(
            strategy: Any,
            container: Any,
            cluster_resolver: Any,
            communication_options: Any,
            devices: Any = None,
        ) -> None:
            from runtime_rewriter.tensorflow.servers import agree_on_addresses

            if self._built:
                raise InvalidInput(
                    "a script must build one MultiWorkerMirroredStrategy, but builds another one; "
                    "use the first one"
                )
            self._built = True
            peers, addresses = agree_on_addresses(place, START_S)
            _set_config(addresses, place.rank)
            own_start(strategy, container, None, communication_options, devices)
            if len(strategy.worker_devices) != 1:
                raise InvalidInput(
                    "every worker must train on one device, but this one has "
                    f"{', '.join(strategy.worker_devices)}; give each device a rank, with "
                    "CUDA_VISIBLE_DEVICES"
                )
            self._steered(self._until_end, peers)

        own_service = context.Context.configure_coordination_service

        @wraps(own_service)
        def patient_service(here: Any, service_type: str, *values: Any, **settings: Any) -> None:
            settings.setdefault("heartbeat_timeout_in_ms", int(HEARTBEAT_S * 1e3))
            own_service(here, service_type, *values, **settings)

        replace_attribute(extended, "__init__", start, undo)
        for servers in (v1_servers.ParameterServerStrategyV1, v2_servers.ParameterServerStrategyV2):
            replace_attribute(servers, "__init__", _refuse_servers, undo)
        replace_attribute(context.Context, "configure_coordination_service", patient_service, undo)


def _refusing_lone_ranks(own_start: Callable[..., None]) -> Callable[..., None]:
    """Refuse a strategy of one worker in a process that a launcher started among others."""

    @wraps(own_start)
    def start(*arguments: Any, cluster_resolver: Any = None, **keywords: Any) -> None:
        if cluster_resolver is None and TF_CONFIG not in os.environ:
            refuse_lone_ranks(os.environ)
        own_start(*arguments, cluster_resolver=cluster_resolver, **keywords)

    return start


def _refuse_servers(*arguments: Any, **keywords: Any) -> None:
    raise InvalidInput(
        "replicas must train in step, but the servers of tf.distribute.ParameterServerStrategy "
        "take each worker's gradients as they come; train by MultiWorkerMirroredStrategy, or as on "
        "one device by `train_step = autotune.distribute(train_step)`"
    )


def _set_config(addresses: Sequence[str], rank: int) -> None:
    task = {"type": _JOB, "index": rank}
    os.environ[TF_CONFIG] = json.dumps({"cluster": {_JOB: list(addresses)}, "task": task})
