"""Starts Horovod between the ranks of a script, and starts it again with other settings.

Horovod reads its environment at `init`. Two variables are set there unless the user has set them:

- HOROVOD_DISABLE_GROUP_FUSION=1: a grouped operation is executed by itself, even one of a single
  tensor, whatever the fusion threshold (`EnqueueTensorAllreduces` in operations.cc, and
  `Controller::ComputeResponseList`). Only groups are concerned: a script without groups of its own
  is executed as before, so its present setup and all plans share one setting.
- HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, while tuning: the limit of `stalls`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from autotune.errors import InvalidInput, LaunchError
from runtime_rewriter.horovod.hostname import call_on_interface
from runtime_rewriter.horovod.own_world import Broadcast, OwnWorld
from runtime_rewriter.horovod.places import Place, address_of
from runtime_rewriter.horovod.rendezvous import rendezvous_server
from runtime_rewriter.horovod.stalls import StallWatch, set_stall_limit, stall_limit_s

GROUPS_ALONE = "HOROVOD_DISABLE_GROUP_FUSION"
_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_TORCH_INTERFACE, _INTERFACE = "GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"


class HorovodConnection:
    """Horovod in this process. `stall_s`: the longest wait for another rank; None: the user's own.

    `init`, `shutdown` and `broadcast` are Horovod's own functions for one framework. `stop` shuts
    down while operations are under way (default: `shutdown`).
    """

    def __init__(
        self,
        init: Callable[..., object],
        shutdown: Callable[[], object],
        ranks: Callable[[], tuple[int, int]],
        broadcast: Broadcast,
        *,
        stall_s: float | None,
        timeout_s: float,
        stop: Callable[[], object] | None = None,
    ) -> None:
        self._init, self._shutdown, self._ranks = init, shutdown, ranks
        self._broadcast = broadcast
        self._stall_s, self._timeout_s = stall_s, timeout_s
        self._place: Place | None = None
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._world: OwnWorld | None = None
        self._store: Any = None
        self._address = ""  # rank 0's; empty on the others
        self._connections = 0
        self._own_setting: str | None = None  # the user's, of GROUPS_ALONE
        self.stalls = StallWatch(stop or shutdown)
        """Limits waits for Horovod's own operations."""
        self.restarts = 0
        """How often Horovod was shut down and started again for a plan."""

    @property
    def world(self) -> OwnWorld:
        """Our process groups of all ranks."""
        if self._world is None:
            raise InvalidInput("the script must call hvd.init() before it uses Horovod")
        return self._world

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Implements `hvd.init`. Collective."""
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise InvalidInput(ELASTIC_REFUSAL)
        self._arguments = args, kwargs
        self._set_defaults()
        if self._world is not None:  # the script has called hvd.shutdown()
            with self.connecting():
                self._initialize()
            return
        self._place = Place.of(os.environ)
        place = self._place
        if place is not None:
            self._store = place.store()
        with nullcontext(0) if place is None else place.served(self._store) as port:
            if place is not None:
                os.environ |= place.meet(port, self._store)
            self._initialize()
            rank, size = self._ranks()
            check_size(size, os.environ)
            self._address = self._own_address() if rank == 0 else ""
            self._world = OwnWorld(rank, size, self._address, self._broadcast, self._timeout_s)
            self._world.barrier()  # all ranks have found each other

    def adopt(self, process_sets: int) -> None:
        """Use the Horovod that the script has started, with groups executed alone. Collective.

        `process_sets`: the script's own, which a restart would end.
        """
        if os.environ.get(GROUPS_ALONE) != "1" and process_sets:
            raise InvalidInput(
                f"Horovod must execute each group alone, but {GROUPS_ALONE} is not 1, and a "
                "restart would end the process sets of the script; set it before hvd.init()"
            )
        self._share_interface()
        rank, size = self._ranks()
        self._address = self._own_address() if rank == 0 else ""
        self._world = OwnWorld(rank, size, self._address, self._broadcast, self._timeout_s)
        self.execute_groups_alone(True)

    def _initialize(self) -> None:
        args, kwargs = self._arguments
        call_on_interface(os.environ.get(_INTERFACE, ""), partial(self._init, *args, **kwargs))

    def _own_address(self) -> str:
        if self._place is not None:
            return self._place.address
        return address_of(os.environ.get(_INTERFACE, ""))

    def _set_defaults(self) -> None:
        environment = os.environ
        if self._world is None:
            self._own_setting = environment.get(GROUPS_ALONE)
        environment.setdefault(GROUPS_ALONE, "1")
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

    def execute_groups_alone(self, alone: bool) -> None:
        """Execute every grouped operation by itself, or as the user has set it. Collective."""
        self._restart({GROUPS_ALONE: "1" if alone else self._own_setting or "0"})

    def _restart(self, variables: Mapping[str, str]) -> None:
        """Start Horovod again with these variables, unless it has them. Collective.

        Nothing may be under way.
        """
        if all(os.environ.get(name) == value for name, value in variables.items()):
            return
        self._shutdown()
        os.environ |= variables
        with self.connecting():
            self._initialize()
        self.restarts += 1


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
