"""The place of a rank that our launcher started, under the names that Horovod reads."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import fcntl
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from autotune.errors import LaunchError
from runtime_rewriter.horovod.rendezvous import RendezvousClient, rendezvous_server

START_TIMEOUT_S = 300.0
"""Ranks import their libraries before `hvd.init()`, and many ranks of one machine do so at once."""

_PORT_KEY = "autotune/horovod/port"
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@dataclass(frozen=True)
class Place:
    """A rank's place in the job, as torchrun numbers it, and rank 0's address and port."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: int
    address: str
    port: int
    agent_store: bool
    """Whether torchrun's agent keeps a store at that port."""

    @staticmethod
    def of(environment: Mapping[str, str]) -> Place | None:
        """The place that our launcher or torchrun gave; None if Horovod's own launcher started it.

        Open MPI's ranks have none either.
        """
        names = (*_LAUNCHER, "MASTER_ADDR", "MASTER_PORT")
        if "HOROVOD_RANK" in environment or any(name not in environment for name in names):
            return None
        rank, size, local_rank, local_size, host = (int(environment[name]) for name in _LAUNCHER)
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Place(rank, size, local_rank, local_size, host, address, port, agent)

    def meet(self, port: int, store: dist.TCPStore) -> dict[str, str]:
        """Wait until every rank has come, and return the variables that horovodrun would set.

        Horovod itself waits for at most half a minute.
        """
        client = RendezvousClient(self.address, port, time.monotonic() + START_TIMEOUT_S)
        client.put(str(self.rank), f"{self.host} {self.local_rank}")
        places = [client.wait_for(str(rank)).split() for rank in range(self.size)]
        if self.rank == 0:
            store.delete_key(_PORT_KEY)  # all have read it, and the next start must not
        hosts = [int(host) for host, local_rank in places if int(local_rank) == self.local_rank]
        return {
            "HOROVOD_RANK": str(self.rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(self.local_rank),
            "HOROVOD_LOCAL_SIZE": str(self.local_size),
            "HOROVOD_CROSS_RANK": str(hosts.index(self.host)),
            "HOROVOD_CROSS_SIZE": str(len(hosts)),
            "HOROVOD_HOSTNAME": f"host-{self.host}",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self.address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }

    @contextmanager
    def served(self, store: dist.TCPStore) -> Iterator[int]:
        """Let rank 0 serve the rendezvous inside; yields its port, which the ranks agree on."""
        with rendezvous_server(self.address) if self.rank == 0 else nullcontext() as port:
            if port is not None:
                store.set(_PORT_KEY, str(port))
            yield int(store.get(_PORT_KEY))

    def store(self) -> dist.TCPStore:
        """A store at the master's address, which the script's own world of torch shares.

        Keep it: a rank of the script may be connected to it. Raises `LaunchError` if the port is
        taken.
        """
        try:
            return self._store(timedelta(seconds=START_TIMEOUT_S))
        except RuntimeError as error:
            raise LaunchError(
                f"the ranks meet at {self.address}:{self.port}, but rank {self.rank} cannot: "
                f"{str(error).splitlines()[0]}; give other ports with --master-ports"
            ) from error

    def _store(self, waits: timedelta) -> dist.TCPStore:
        if self.rank > 0 or self.agent_store:
            return dist.TCPStore(self.address, self.port, is_master=False, timeout=waits)
        with closing(socket.socket()) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            descriptor = None
            with suppress(OSError):
                listening.bind((self.address, self.port))
                listening.listen(self.size)
                descriptor = listening.detach()
            return dist.TCPStore(
                self.address,
                self.port,
                is_master=True,
                timeout=waits,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=descriptor,
            )


def address_of(interface: str) -> str:
    """The IPv4 address of an interface, or of this host's name if it is empty."""
    try:
        if not interface:
            return socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            siocgifaddr = 0x8915  # <linux/sockios.h>
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, siocgifaddr, request)[20:24])
    except OSError as error:
        raise LaunchError(
            f"rank 0 needs an address at which the others reach it, but {interface or 'this host'} "
            f"has none: {error.strerror}; name an interface in HOROVOD_GLOO_IFACE"
        ) from error
