"""Starts Horovod between the ranks of a script, and starts it again with other settings.

Horovod reads its environment at `init`. Two variables are set there:

- HOROVOD_DISABLE_GROUP_FUSION=1: a grouped operation is executed by itself, even one of a single
  tensor, whatever the fusion threshold (`EnqueueTensorAllreduces` in operations.cc, and
  `Controller::ComputeResponseList`). Only groups are concerned: a script without groups of its own
  is executed as before, so its present setup and all plans share one setting. So do those of a
  script with groups: Horovod 0.28.1 never unsets what it has read once, not even when it starts
  again (`SetBoolFromEnv` in env_parser.cc).
- HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, while tuning, unless the user has set it: the limit of
  `stalls`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from autotune.errors import InvalidInput, LaunchError
from runtime_rewriter.horovod.hostname import call_on_interface
from runtime_rewriter.horovod.own_autotuner import check_own_autotuner
from runtime_rewriter.horovod.own_world import Broadcast, OwnWorld
from runtime_rewriter.horovod.places import Place, address_of
from runtime_rewriter.horovod.rendezvous import rendezvous_server
from runtime_rewriter.horovod.stalls import StallWatch, set_stall_limit, stall_limit_s

GROUPS_ALONE = "HOROVOD_DISABLE_GROUP_FUSION"
_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_TORCH_INTERFACE, _INTERFACE = "GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"


class HorovodConnection:
    """Horovod in this process, through `horovod`, its module for a framework before it is changed.

    `broadcast` is an operation of that module. `stall_s`: the longest wait for another rank; None:
    the user's own. `timeout_s`: the longest wait for another rank in our process groups.
    """

    def __init__(
        self, horovod: Any, broadcast: Broadcast, *, timeout_s: float, stall_s: float | None = None
    ) -> None:
        self._init, self._shutdown = horovod.init, horovod.shutdown
        self._rank, self._size = horovod.rank, horovod.size
        self._is_initialized = horovod.is_initialized
        basics = horovod.mpi_ops._basics
        self._process_sets = basics._get_process_set_ids_and_ranks
        self._broadcast = broadcast
        self._stall_s, self._timeout_s = stall_s, timeout_s
        self._place: Place | None = None
        self._world: OwnWorld | None = None
        self._store: Any = None
        self._address = ""  # rank 0's; empty on the others
        self._connections = 0
        # `horovod.shutdown` of PyTorch forgets the handles that are awaited.
        self.stalls = StallWatch(basics.shutdown)
        """Limits waits for Horovod's own operations."""
        self.restarts = 0
        """How often Horovod was started again so that it executes groups alone."""

    @property
    def world(self) -> OwnWorld:
        """Our process groups of all ranks."""
        if self._world is None:
            raise InvalidInput("the script must call hvd.init() before it uses Horovod")
        return self._world

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Implements `hvd.init`. Collective, unless Horovod is initialized."""
        if self._world is not None and self._is_initialized():
            self._init(*args, **kwargs)  # it connects nobody: not every rank may call it
            return
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise InvalidInput(ELASTIC_REFUSAL)
        check_own_autotuner(os.environ)
        self._set_defaults()
        if self._world is not None:  # the script has called hvd.shutdown()
            with self.connecting():
                self._initialize(*args, **kwargs)
            return
        self._place = Place.of(os.environ)
        place = self._place
        if place is not None:
            self._store = place.store()
        with nullcontext(0) if place is None else place.served(self._store) as port:
            if place is not None:
                os.environ |= place.meet(port, self._store)
            self._initialize(*args, **kwargs)
            check_size(self._size(), os.environ)
            self._build_world()
            self.world.barrier()  # all ranks have found each other

    def adopt(self) -> None:
        """Use the Horovod that the script has started, with groups executed alone. Collective.

        Horovod starts again unless it executes them so. Raises `InvalidInput` if this would end
        process sets of the script.
        """
        check_own_autotuner(os.environ)
        alone = os.environ.get(GROUPS_ALONE) == "1"
        if not alone and len(self._process_sets()) > 1:  # one is of all ranks
            raise InvalidInput(
                f"Horovod must execute each group alone, but {GROUPS_ALONE} is not 1, and a "
                "restart would end the process sets of the script; set it before hvd.init()"
            )
        self._share_interface()
        self._build_world()
        if not alone:
            self._shutdown()
            os.environ[GROUPS_ALONE] = "1"
            with self.connecting():
                self._initialize()
            self.restarts += 1

    def _build_world(self) -> None:
        rank, size = self._rank(), self._size()
        self._address = self._own_address() if rank == 0 else ""
        self._world = OwnWorld(rank, size, self._address, self._broadcast, self._timeout_s)

    def _initialize(self, *args: Any, **kwargs: Any) -> None:
        call_on_interface(os.environ.get(_INTERFACE, ""), partial(self._init, *args, **kwargs))

    def _own_address(self) -> str:
        if self._place is not None:
            return self._place.address
        return address_of(os.environ.get(_INTERFACE, ""))

    def _set_defaults(self) -> None:
        environment = os.environ
        environment[GROUPS_ALONE] = "1"
        if self._stall_s is not None:
            set_stall_limit(self._stall_s)
        self.stalls.limit_s = stall_limit_s(environment)
        self._share_interface()

    @staticmethod
    def _share_interface() -> None:
        """Let Horovod and our process groups use the same interface."""
        environment = os.environ
        for name, other in ((_TORCH_INTERFACE, _INTERFACE), (_INTERFACE, _TORCH_INTERFACE)):
            if other in environment:
                environment.setdefault(name, environment[other])

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Let ranks find each other inside, once more. Collective.

        They use a new server. That of horovodrun keeps the addresses of the last time, and gloo
        aborts the process of a rank that reads one (`connect: Connection refused`).
        """
        self._connections += 1
        world = self.world
        with rendezvous_server(self._address) if self._address else nullcontext(0) as port:
            place = world.agree_on(f"rendezvous/{self._connections}", f"{self._address} {port}")
            os.environ[_ADDRESS], os.environ[_PORT] = place.split()
            yield
            world.barrier()


def check_size(size: int, environment: Mapping[str, str]) -> None:
    """Raise `LaunchError` if the launcher started more ranks than Horovod has connected."""
    for launcher, name in (("the launcher", "WORLD_SIZE"), ("mpirun", "OMPI_COMM_WORLD_SIZE")):
        started = environment.get(name, str(size))
        if started != str(size) and "HOROVOD_SIZE" not in environment:
            raise LaunchError(
                f"{launcher} started {started} ranks ({name}), but Horovod connected {size}, so "
                "each would train alone; start the script with horovodrun or torchrun (a Horovod "
                "that was built without MPI cannot connect the ranks of mpirun)"
            )


ELASTIC_REFUSAL = (
    "elastic Horovod cannot be controlled: its ranks change during the trials, and its rendezvous "
    "unpickles what anyone on the network sends; start the script by horovodrun with a fixed -np"
)
