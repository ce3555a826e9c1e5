"""Creates, finds and removes testbeds.

Every testbed is recorded before it is created (`state`), so that a dead owner's can be removed.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.canonical import canonical_json
from autotune.cluster import Cluster
from autotune.errors import EmulationError, InvalidInput
from autotune.testbed.build import INTERFACE, add_namespace, delete_namespace, network_commands
from autotune.testbed.capabilities import capabilities
from autotune.testbed.forwarding import paths_of
from autotune.testbed.layout import Layout, Method, lay_out
from autotune.testbed.machine import (
    COMMAND_TIMEOUT_S,
    Process,
    attempt,
    end_all_inside,
    entered,
    inode,
    inside,
    run,
    words_inside,
)
from autotune.testbed.relay import Orders
from autotune.testbed.state import (
    STATE_DIRECTORY,
    Namespace,
    Recorded,
    States,
    Unreadable,
    make_scratch,
    new_scratch,
    remove_scratch,
)

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

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BedHost:
    """A host of a testbed. Commands run inside its `namespace` (`words_inside`)."""

    name: str
    namespace: str
    address: str
    devices: int


@dataclass(frozen=True)
class Testbed:
    """A running testbed. `notes`: differences from its cluster file.

    `scratch`: a private directory with a short path, which is removed with the testbed.
    """

    __test__ = False  # pytest would take the name for a test class

    name: str
    hosts: tuple[BedHost, ...]
    scratch: Path
    byte_scale: float = 1.0
    notes: tuple[str, ...] = ()
    interface: str = INTERFACE


@dataclass(frozen=True)
class BedStatus:
    """`processes[host]`: ids of the processes inside. `relay_alive`: None if no relay is needed."""

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
    """Create a testbed of `cluster`. If `owned`, it is a leftover once this process has died.

    Testbeds of dead owners are removed first, where they can be. A failure or an interrupt is
    undone. Raises `EmulationUnavailable` (this machine cannot), `InvalidInput` (the name is in use,
    a value breaks a rule), `EmulationError`.
    """
    able = capabilities()
    able.demand()
    layout = lay_out(cluster, able.means, name=name, byte_scale=byte_scale)
    states = States(directory)
    with states.locked():
        _remove_leftovers(states)
        _refuse_names_in_use(states, layout)
        recorded = Recorded(layout, Process.current(), owned, scratch=new_scratch())
        try:
            states.write(recorded)
            _create(states, recorded)
        except BaseException:
            if (partial := states.read(layout.name)) is not None:
                _remove(states, partial)
            raise
    return _testbed(recorded)


def down(name: str, *, directory: Path = STATE_DIRECTORY) -> bool:
    """End every process inside and remove the testbed, complete or not; False if there is none."""
    states = States(directory)
    if not states.directory.is_dir():
        return False
    with states.locked():
        recorded = states.read(name)
        if recorded is not None:
            _remove(states, recorded)
        return recorded is not None


def remove_leftovers(*, directory: Path = STATE_DIRECTORY) -> tuple[str, ...]:
    """Remove the testbeds of dead owners, with the processes inside; return their names."""
    states = States(directory)
    if not states.directory.is_dir():
        return ()
    with states.locked():
        return _remove_leftovers(states)


def testbeds(*, directory: Path = STATE_DIRECTORY) -> tuple[BedStatus, ...]:
    """All recorded testbeds and their present state. Changes nothing and only needs to read."""
    return tuple(_status(recorded) for recorded in States(directory).all())


def unreadable(*, directory: Path = STATE_DIRECTORY) -> tuple[Unreadable, ...]:
    """Records that this version cannot read, for example of a newer version."""
    return States(directory).unreadable()


def find(name: str, *, directory: Path = STATE_DIRECTORY) -> Testbed:
    """The running testbed of this name; raises `InvalidInput` if there is none."""
    recorded = States(directory).read(name)
    if recorded is None or not recorded.complete:
        known = [item.layout.name for item in States(directory).all() if item.complete]
        fix = f"there are {', '.join(known)}" if known else "create one by `autotune testbed up`"
        raise InvalidInput(f"there is no testbed {name!r}; {fix}")
    return _testbed(recorded)


@contextmanager
def running(
    cluster: Cluster,
    *,
    name: str | None = None,
    byte_scale: float = 1.0,
    directory: Path = STATE_DIRECTORY,
) -> Iterator[Testbed]:
    """An owned testbed for a `with` block, removed however the block ends.

    If it cannot be removed, that is a warning: the block's own end counts.
    """
    bed = up(cluster, name=name, owned=True, byte_scale=byte_scale, directory=directory)
    try:
        yield bed
    finally:
        try:
            down(bed.name, directory=directory)
        except EmulationError as error:
            log.warning(
                "the testbed %s could not be removed: %s; the next testbed removes it, or "
                "`autotune testbed down %s`",
                bed.name,
                error,
                bed.name,
            )


def _testbed(recorded: Recorded) -> Testbed:
    layout = recorded.layout
    hosts = tuple(
        BedHost(host.name, host.namespace, host.address, host.devices) for host in layout.hosts
    )
    assert recorded.scratch is not None  # without its directory a testbed does not come up
    return Testbed(layout.name, hosts, recorded.scratch, layout.byte_scale, layout.notes)


def _status(recorded: Recorded) -> BedStatus:
    layout = recorded.layout
    by_pid = inside(recorded.inodes)
    # a testbed that is being created has not all of them yet
    inodes = {namespace.name: namespace.ours for namespace in recorded.namespaces}
    processes = tuple(
        tuple(sorted(pid for pid, inode in by_pid.items() if inode == inodes.get(host.namespace)))
        for host in layout.hosts
    )
    relay_alive = False if layout.method is Method.RELAY else None
    if recorded.relay:
        relay_alive = recorded.relay.alive
    owner = recorded.maker.pid if recorded.owned else None
    return BedStatus(layout, owner, recorded.left_over, recorded.complete, relay_alive, processes)


def _refuse_names_in_use(states: States, layout: Layout) -> None:
    """Raises `InvalidInput` if the testbed's name or one of its namespaces is taken."""
    if (other := states.read(layout.name)) is not None:
        state = f"belongs to process {other.maker.pid}" if other.owned else "is up"
        raise InvalidInput(
            f"a testbed {layout.name!r} {state}; choose another --name, or end it by "
            f"`autotune testbed down {layout.name}`"
        )
    for namespace in layout.namespaces:
        if inode(namespace) is not None:
            raise InvalidInput(
                f"the namespace {namespace!r} exists, but no record in {states.directory} names "
                "it, so it is left alone; choose another --name, or remove it by "
                f"`ip netns delete {namespace}`"
            )


def _remove_leftovers(states: States) -> tuple[str, ...]:
    """Remove what can be removed; the rest stays recorded, with a warning."""
    removed = []
    for recorded in states.all():
        if recorded.left_over:
            name = recorded.layout.name
            try:
                _remove(states, recorded)
            except EmulationError as error:
                log.warning("the testbed %s of a dead process stays: %s", name, error)
            else:
                removed.append(name)
    return tuple(removed)


def _remove(states: States, recorded: Recorded) -> None:
    """End the processes inside (with the relay), remove namespaces and scratch, then the record."""
    end_all_inside(recorded.inodes)
    for namespace in recorded.namespaces:
        if namespace.ours is not None or _deserted(namespace):
            run(delete_namespace(namespace.name))
    if recorded.scratch is not None:
        remove_scratch(recorded.scratch)
    states.remove(recorded.layout.name)


def _deserted(namespace: Namespace) -> bool:
    """Whether an undecided namespace exists and nothing runs inside: then it counts as ours."""
    if (undecided := namespace.undecided) is None:
        return False
    if processes := inside({undecided}):
        log.warning(
            "the namespace %s is left alone: it may be somebody else's, and processes run inside "
            "(%s); if it is not needed, end them and remove it by `ip netns delete %s`",
            namespace.name,
            ", ".join(map(str, sorted(processes))),
            namespace.name,
        )
    return not processes


def _create(states: States, recorded: Recorded) -> None:
    layout = recorded.layout
    if recorded.scratch is not None and (reason := make_scratch(recorded.scratch)):
        states.write(replace(recorded, scratch=None))  # anything there is not ours to remove
        raise EmulationError(f"the directory {recorded.scratch} could not be created: {reason}")
    for namespace in layout.namespaces:
        recorded = recorded.before_creating(namespace)
        states.write(recorded)
        outcome = attempt(add_namespace(namespace))
        if outcome.reason:
            # somebody may have created it since we looked for it
            states.write(recorded.without(namespace))
            raise EmulationError(
                f"the namespace {namespace} could not be created: {outcome.reason}"
            )
        recorded = recorded.created(namespace)
        states.write(recorded)
    if layout.method is Method.RELAY:
        recorded = replace(recorded, relay=_start_relay(states, recorded))
        states.write(recorded)
    for command in network_commands(layout):
        run(command)
    states.write(replace(recorded, complete=True))


def _start_relay(states: States, recorded: Recorded) -> Process:
    """Start the relay inside the switch's namespace; return when its devices exist."""
    layout = recorded.layout
    orders = canonical_json(Orders(paths_of(layout), recorded.maker if recorded.owned else None))
    # -P: import nothing from the user's directory
    relay = [sys.executable, "-P", "-m", "autotune.testbed.relay"]
    log_path = states.log(layout.name)
    try:
        with log_path.open("w") as relay_log:
            done = subprocess.run(
                [*words_inside(layout.switch), *relay],
                input=orders,
                stdout=subprocess.PIPE,
                stderr=relay_log,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                start_new_session=True,  # Ctrl-C is for the owner, which takes the relay down
            )
        return Process.of(int(done.stdout))
    except (ValueError, ProcessLookupError, subprocess.TimeoutExpired) as error:
        lines = log_path.read_text().strip().splitlines() or [str(error)]
        raise EmulationError(
            f"the relay of testbed {layout.name!r} did not start: {lines[-1]}"
        ) from error
