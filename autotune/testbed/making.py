"""Makes a recorded testbed, and removes one. The caller holds the lock (`States.locked`)."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace

from autotune.canonical import canonical_json
from autotune.errors import EmulationError, InvalidInput
from autotune.testbed.build import add_namespace, delete_namespace, network_commands
from autotune.testbed.forwarding import paths_of
from autotune.testbed.layout import Layout, Method
from autotune.testbed.namespaces import inode, words_inside
from autotune.testbed.processes import Process, end_all_inside, inside
from autotune.testbed.relay import Orders
from autotune.testbed.scratch import make_scratch, remove_scratch
from autotune.testbed.shell import PATIENCE_S, attempt, run
from autotune.testbed.state import Namespace, Recorded, States

log = logging.getLogger(__name__)


def refuse_names_in_use(states: States, layout: Layout) -> None:
    """Raises `InvalidInput` if the testbed's name or one of its namespaces is taken; leftovers are removed already."""
    if (other := states.read(layout.name)) is not None:
        whose = f"belongs to process {other.maker.pid}" if other.owned else "is up"
        raise InvalidInput(
            f"a testbed {layout.name!r} {whose}; choose another --name, or end it by `autotune testbed down {layout.name}`"
        )
    for namespace in layout.namespaces:
        if inode(namespace) is not None:
            raise InvalidInput(
                f"the namespace {namespace!r} exists, but no record in {states.directory} names it, so it is left alone; "
                f"choose another --name, or remove it by `ip netns delete {namespace}`"
            )


def make(states: States, record: Recorded) -> None:
    """Record, then make; what was made before a failure or an interrupt is removed again."""
    try:
        states.write(record)
        _make(states, record)
    except BaseException:
        if (kept := states.read(record.layout.name)) is not None:
            remove(states, kept)
        raise


def remove(states: States, record: Recorded) -> None:
    """End the processes inside (the relay is one), delete the namespaces with their devices and the scratch directory, then the record."""
    end_all_inside(record.inodes)
    for namespace in record.namespaces:
        if namespace.ours is not None or _deserted(namespace):
            run(delete_namespace(namespace.name))
    if record.scratch is not None:
        remove_scratch(record.scratch)
    states.remove(record.layout.name)


def _deserted(namespace: Namespace) -> bool:
    """A namespace that is ours or somebody else's is taken for ours if nothing runs inside; otherwise it is left alone, and reported."""
    if (found := namespace.undecided) is None:
        return False
    if processes := inside({found}):
        log.warning(
            "the namespace %s is left alone: it may be somebody else's, and processes run inside (%s); if it is not needed, end them "
            "and remove it by `ip netns delete %s`",
            namespace.name,
            ", ".join(map(str, sorted(processes))),
            namespace.name,
        )
    return not processes


def remove_leftovers(states: States) -> tuple[str, ...]:
    """Remove the testbeds whose owner has died; their names."""
    left = [record for record in states.all() if record.left_over]
    for record in left:
        remove(states, record)
    return tuple(record.layout.name for record in left)


def _make(states: States, record: Recorded) -> None:
    layout = record.layout
    if record.scratch is not None and (reason := make_scratch(record.scratch)):
        states.write(replace(record, scratch=None))  # whatever is there is not ours to remove
        raise EmulationError(f"the directory {record.scratch} could not be made: {reason}")
    for namespace in layout.namespaces:
        record = record.making(namespace)
        states.write(record)
        tried = attempt(add_namespace(namespace))
        if tried.reason:
            states.write(
                record.not_made(namespace)
            )  # it may be somebody's who made it since it was looked for
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
    command = [
        *words_inside(layout.switch),
        sys.executable,
        "-P",
        "-m",
        "autotune.testbed.relay",
    ]  # -P: not from the user's directory
    told_in = states.log(layout.name)
    try:
        with told_in.open("w") as words:
            # A session of its own: Ctrl-C is for the owner, who takes the relay down when it is no longer needed.
            started = subprocess.run(
                command,
                input=orders,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
                timeout=PATIENCE_S,
                start_new_session=True,
            )
        return Process.of(int(started.stdout))
    except (ValueError, ProcessLookupError, subprocess.TimeoutExpired) as error:
        told = told_in.read_text().strip().splitlines() or [str(error)]
        raise EmulationError(
            f"the relay of testbed {layout.name!r} did not start: {told[-1]}"
        ) from error
