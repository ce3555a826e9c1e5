"""Testbeds: up, down, and what is there. Every testbed is recorded before it is made (`state`), so a dead owner's can be removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.testbed import making
from autotune.testbed.build import INTERFACE
from autotune.testbed.capabilities import capabilities
from autotune.testbed.layout import Layout, Method, lay_out
from autotune.testbed.namespaces import entered, words_inside
from autotune.testbed.processes import Process, inside
from autotune.testbed.scratch import new_scratch
from autotune.testbed.state import STATE_DIRECTORY, Recorded, States, Unreadable

__all__ = [
    "BedHost",
    "BedStatus",
    "Testbed",
    "Unreadable",
    "down",
    "entered",
    "find",
    "remove_leftovers",
    "running",
    "testbeds",
    "unreadable",
    "up",
    "words_inside",
]


@dataclass(frozen=True)
class BedHost:
    """A host of a testbed: run commands inside `namespace` (`words_inside`), where it has `address`."""

    name: str
    namespace: str
    address: str
    devices: int


@dataclass(frozen=True)
class Testbed:
    """A testbed that is up. `notes`: where it may differ from its cluster file.

    `scratch`: a private directory with a short path, which is removed with the testbed.
    """

    __test__ = False  # not a test class, whatever pytest thinks of the name

    name: str
    hosts: tuple[BedHost, ...]
    scratch: Path
    byte_scale: float = 1.0
    notes: tuple[str, ...] = ()
    interface: str = INTERFACE


@dataclass(frozen=True)
class BedStatus:
    """`processes[host]`: ids of the processes inside. `relay_alive`: None where the testbed needs no relay."""

    layout: Layout
    owner: int | None
    left_over: bool
    complete: bool
    relay_alive: bool | None
    processes: tuple[tuple[int, ...], ...]


def up(
    cluster: Cluster,
    *,
    name: str | None = None,
    owned: bool = False,
    byte_scale: float = 1.0,
    directory: Path = STATE_DIRECTORY,
) -> Testbed:
    """Make a testbed that stands for `cluster`. With `owned` it belongs to this process: it is a leftover once that has died.

    First removes what dead owners left. What it made before a failure or an interrupt is undone.
    Raises `EmulationUnavailable` (this machine cannot), `InvalidInput` (the name is in use, a value breaks a rule), `EmulationError`.
    """
    able = capabilities()
    able.demand()
    layout = lay_out(cluster, able.means, name=name, byte_scale=byte_scale)
    states = States(directory)
    with states.locked():
        making.remove_leftovers(states)
        making.refuse_names_in_use(states, layout)
        recorded = Recorded(layout, Process.current(), owned, scratch=new_scratch())
        making.make(states, recorded)
    return _testbed(recorded)


def down(name: str, *, directory: Path = STATE_DIRECTORY) -> bool:
    """End every process inside and remove the testbed, finished or not; False if there is none of this name."""
    states = States(directory)
    if not states.directory.is_dir():
        return False
    with states.locked():
        recorded = states.read(name)
        if recorded is None:
            return False
        making.remove(states, recorded)
    return True


def remove_leftovers(*, directory: Path = STATE_DIRECTORY) -> tuple[str, ...]:
    """Remove the testbeds whose owner has died, with the processes inside; their names."""
    states = States(directory)
    if not states.directory.is_dir():
        return ()
    with states.locked():
        return making.remove_leftovers(states)


def testbeds(*, directory: Path = STATE_DIRECTORY) -> tuple[BedStatus, ...]:
    """What is recorded, and how it is now. Changes nothing and needs no rights but to read."""
    return tuple(_status(recorded) for recorded in States(directory).all())


def unreadable(*, directory: Path = STATE_DIRECTORY) -> tuple[Unreadable, ...]:
    """Files in place of records that this version cannot read, for example of a newer version. Nothing else is hindered by them."""
    return States(directory).unreadable()


def find(name: str, *, directory: Path = STATE_DIRECTORY) -> Testbed:
    """The testbed of this name; raises `InvalidInput` where there is none that is up."""
    recorded = States(directory).read(name)
    if recorded is None or not recorded.complete:
        known = [item.layout.name for item in States(directory).all() if item.complete]
        raise InvalidInput(
            f"there is no testbed {name!r}; "
            + (f"there are {', '.join(known)}" if known else "make one by `autotune testbed up`")
        )
    return _testbed(recorded)


@contextmanager
def running(
    cluster: Cluster,
    *,
    name: str | None = None,
    byte_scale: float = 1.0,
    directory: Path = STATE_DIRECTORY,
) -> Iterator[Testbed]:
    """An owned testbed for the time of a `with` block; it is taken down however the block ends."""
    bed = up(cluster, name=name, owned=True, byte_scale=byte_scale, directory=directory)
    try:
        yield bed
    finally:
        down(bed.name, directory=directory)


def _testbed(recorded: Recorded) -> Testbed:
    layout = recorded.layout
    hosts = tuple(
        BedHost(host.name, host.namespace, host.address, host.devices) for host in layout.hosts
    )
    assert recorded.scratch is not None  # a testbed whose directory could not be made is none
    return Testbed(layout.name, hosts, recorded.scratch, layout.byte_scale, layout.notes)


def _status(recorded: Recorded) -> BedStatus:
    layout = recorded.layout
    found = inside(recorded.inodes)
    inodes = {
        item.name: item.ours for item in recorded.namespaces
    }  # a testbed that is being made has not all of them yet
    processes = tuple(
        tuple(sorted(pid for pid, where in found.items() if where == inodes.get(host.namespace)))
        for host in layout.hosts
    )
    relay_alive = (
        recorded.relay.alive
        if recorded.relay
        else (False if layout.method is Method.RELAY else None)
    )
    owner = recorded.maker.pid if recorded.owned else None
    return BedStatus(layout, owner, recorded.left_over, recorded.complete, relay_alive, processes)
