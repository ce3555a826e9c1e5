"""Steers a script that imports `horovod.torch`."""

# mypy: untyped-calls-exclude=torch, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import Any, NoReturn

import torch

from autotune.errors import InvalidInput
from runtime_rewriter.horovod.connection import ELASTIC_REFUSAL, HorovodConnection
from runtime_rewriter.horovod.importing import (
    changed_on_import,
    replace_attribute,
    replace_function,
)
from runtime_rewriter.horovod.joining import check_join
from runtime_rewriter.horovod.modules import module_of
from runtime_rewriter.horovod.process_sets import check_all_ranks
from runtime_rewriter.horovod.torch_synchronizer import HorovodSynchronizer
from runtime_rewriter.horovod.versions import check_horovod
from runtime_rewriter.pytorch.ddp import ModelObserver
from runtime_rewriter.pytorch.exchange.ranks import Timeouts

_ADDRESS_BYTES = 256


@contextmanager
def horovod_steered(session: ModelObserver, waits: Timeouts, tuned: bool) -> Iterator[None]:
    """Let `horovod.torch`, if the script imports it, report its optimizers' models to `session`.

    `tuned`: a rank that waits too long for another one ends.
    """
    steering = _Steering(session, waits, tuned)
    with changed_on_import({"horovod.torch": steering.change}):
        yield


class _Steering:
    def __init__(self, session: ModelObserver, waits: Timeouts, tuned: bool) -> None:
        self._session, self._waits, self._tuned = session, waits, tuned
        self._taken = False
        self._synchronizer: HorovodSynchronizer | None = None

    def change(self, horovod: ModuleType, undo: ExitStack) -> None:
        """Replace functions of `horovod.torch`, whose other modules take them from each other."""
        check_horovod(horovod, "PyTorch")
        own: Any = horovod
        operations, optimizers = own.mpi_ops, own.optimizer
        connection = connection_of(own, self._waits, self._tuned)
        original = own.DistributedOptimizer
        build = wraps(original)(partial(self._build, own, connection, original))
        init = wraps(own.init)(partial(connection.start))
        add = wraps(own.add_process_set)(partial(_add, connection, own.add_process_set))
        for module, name, value in (
            (own, "init", init),
            (operations, "init", init),
            (own, "add_process_set", add),
            (operations, "add_process_set", add),
            (own, "DistributedOptimizer", build),
            (optimizers, "DistributedOptimizer", build),
            (operations, "_grouped_allreduce_async", _asking(operations._grouped_allreduce_async)),
            (own.elastic, "run", _refuse_elastic),
        ):
            replace_attribute(module, name, value, undo)
        for name, limited in (
            ("synchronize", connection.stalls.waiting),
            ("join", partial(self._joining, connection)),
        ):
            waiting = wraps(getattr(operations, name))(
                partial(_inside, limited, getattr(operations, name))
            )
            replace_function("horovod.torch", operations, name, waiting, undo)

    def _build(
        self,
        horovod: Any,
        connection: HorovodConnection,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        optimizer = original(*args, **kwargs)
        if not self._taken:
            self._taken = True
            check_optimizer(horovod, optimizer)
            module = module_of(optimizer._requires_update or optimizer._parameter_names)
            self._synchronizer = HorovodSynchronizer(
                module, optimizer, horovod, connection, self._waits
            )
            self._session.model_built(self._synchronizer)
        return optimizer

    @contextmanager
    def _joining(self, connection: HorovodConnection) -> Iterator[None]:
        """Around `hvd.join()`, which may wait for the other ranks' remaining steps."""
        check_join(self._synchronizer)
        with connection.stalls.unlimited():
            yield


def connection_of(horovod: Any, waits: Timeouts, tuned: bool) -> HorovodConnection:
    """A connection through `horovod`, the module `horovod.torch` before it is changed."""
    return HorovodConnection(
        horovod,
        partial(_broadcast_text, horovod),
        timeout_s=waits.message_s,
        stall_s=waits.message_s if tuned else None,
    )


def check_optimizer(horovod: Any, optimizer: Any) -> None:
    """Raise `InvalidInput` for an optimizer that does not average gradients of all ranks."""
    if not hasattr(optimizer, "_groups"):
        raise InvalidInput(
            "hvd.DistributedOptimizer(op=hvd.Adasum) sends updates, whose combination no plan "
            "describes; use op=hvd.Average"
        )
    check_all_ranks(horovod, "optimizer", optimizer.process_set)


def _add(
    connection: HorovodConnection, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Implements `hvd.add_process_set`, whose ranks find each other once more."""
    with connection.connecting():
        return original(*args, **kwargs)


def _inside(
    context: Callable[[], AbstractContextManager[None]],
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    with context():
        return original(*args, **kwargs)


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ask every tensor of a grouped operation for its type, so that the read is seen. Horovod asks
    the first one only."""

    @wraps(original)
    def call(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        for tensor in tensors:
            tensor.type()
        return original(tensors, *args, **kwargs)

    return call


def _refuse_elastic(*args: object, **kwargs: object) -> NoReturn:
    raise InvalidInput(ELASTIC_REFUSAL)


def _broadcast_text(horovod: Any, text: str) -> str:
    """Rank 0's text on all ranks. Horovod's own function for objects would unpickle them."""
    encoded = text.encode()
    sent = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    sent[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    horovod.broadcast_(sent, root_rank=0, name="autotune.address")
    return bytes(sent.tolist()).rstrip(b"\0").decode()
