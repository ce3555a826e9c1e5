"""Makes a recorded testbed, and removes one. The caller holds the lock (`States.locked`)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from autotune.canonical import canonical_json
from autotune.errors import EmulationError, InvalidInput
from autotune.testbed.build import add_namespace, delete_namespace, network_commands
from autotune.testbed.forwarding import paths_of
from autotune.testbed.layout import Layout, Method
from autotune.testbed.namespaces import inode, words_inside
from autotune.testbed.processes import Process, end_all_inside
from autotune.testbed.relay import Orders
from autotune.testbed.shell import PATIENCE_S, attempt, run
from autotune.testbed.state import Recorded, States


def refuse_names_in_use(states: States, layout: Layout) -> None:
    """Raises `InvalidInput` if the testbed's name or one of its namespaces is taken; leftovers are removed already."""
    if (other := states.read(layout.name)) is not None:
        whose = f"belongs to process {other.maker.pid}" if other.owned else "is up"
        raise InvalidInput(f"a testbed {layout.name!r} {whose}; choose another --name, or end it by `autotune testbed down {layout.name}`")
    for namespace in layout.namespaces:
        if inode(namespace) is not None:
            raise InvalidInput(
                f"the namespace {namespace!r} exists, but no record in {states.directory} names it, so it is left alone; "
                f"choose another --name, or remove it by `ip netns delete {namespace}`"
            )


def make(states: States, record: Recorded) -> None:
    """Record, then make; what was made before a failure or an interrupt is removed again."""
    states.write(record)
    try:
        _make(states, record)
    except BaseException:
        kept = states.read(record.layout.name)
        assert kept is not None, "the record is written before anything is made"
        remove(states, kept)
        raise


def remove(states: States, record: Recorded) -> None:
    """End the processes inside (the relay is one), delete the namespaces with their devices, then the record."""
    end_all_inside(record.inodes)
    for namespace in record.namespaces:
        if namespace.ours is not None:
            run(delete_namespace(namespace.name))
    states.remove(record.layout.name)


def remove_leftovers(states: States) -> tuple[str, ...]:
    """Remove the testbeds whose owner has died; their names."""
    left = [record for record in states.all() if record.left_over]
    for record in left:
        remove(states, record)
    return tuple(record.layout.name for record in left)


def _make(states: States, record: Recorded) -> None:
    layout = record.layout
    for number, namespace in enumerate(layout.namespaces):
        tried = attempt(add_namespace(namespace))
        if tried.reason:
            # It may be somebody's who made it since it was looked for: it and those not tried yet are not ours to remove.
            states.write(record.not_made(frozenset(layout.namespaces[number:])))
            raise EmulationError(f"the namespace {namespace} could not be made: {tried.reason}")
        record = record.made(namespace)
        states.write(record)
    if layout.method is Method.RELAY:
        record = replace(record, relay=_start_relay(states, record))
        states.write(record)
    for command in network_commands(layout):
        run(command)
    states.write(replace(record, complete=True))


def _start_relay(states: States, record: Recorded) -> Process:
    """Start the relay inside the switch's namespace; its devices are there when this returns."""
    layout = record.layout
    orders = canonical_json(Orders(paths_of(layout), record.maker if record.owned else None))
    command = [*words_inside(layout.switch), sys.executable, "-m", "autotune.testbed.relay"]
    log = states.log(layout.name)
    try:
        with log.open("w") as words:
            # A session of its own: Ctrl-C is for the owner, who takes the relay down when it is no longer needed.
            started = subprocess.run(
                command, input=orders, stdout=subprocess.PIPE, stderr=words, text=True, timeout=PATIENCE_S, start_new_session=True
            )
        return Process.of(int(started.stdout))
    except (ValueError, ProcessLookupError, subprocess.TimeoutExpired) as error:
        told = log.read_text().strip().splitlines() or [str(error)]
        raise EmulationError(f"the relay of testbed {layout.name!r} did not start: {told[-1]}") from error
