"""`autotune testbed`: create, inspect and remove emulated clusters by hand."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from autotune.canonical import to_data
from autotune.cluster_file import read_cluster
from autotune.commands.render.tables import table_text
from autotune.errors import EmulationError, InvalidInput
from autotune.jobs.signals import terminable
from autotune.testbed import bed
from autotune.testbed.capabilities import capabilities
from autotune.testbed.layout import HostLayout, Lane, Layout
from autotune.units import format_rate, format_seconds

Result = tuple[dict[str, Any], str]
Run = Callable[[argparse.Namespace], Result]
STATE = Path("/run/autotune-testbeds")
HOST_COLUMNS = (
    *("host", "address", "devices", "rate", "added latency", "inside", "processes"),
    "namespace",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the result as one JSON object on stdout",
    )
    shared.add_argument(
        "--state-directory",
        type=Path,
        default=STATE,
        metavar="DIRECTORY",
        help=f"where testbeds are recorded (default {STATE})",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

    def action(name: str, run: Run, summary: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, parents=[shared], help=summary)
        added.set_defaults(action=run)
        return added

    action("check", check, "what this machine can emulate")
    creating = action("up", up, "create the network of a cluster file")
    creating.add_argument("cluster_file", type=Path, metavar="CLUSTER", help="cluster.yaml")
    creating.add_argument("--name", help="default: the cluster's")
    creating.add_argument(
        "--byte-scale",
        type=float,
        default=1.0,
        metavar="K",
        help="divide every rate by K (default 1)",
    )
    action("status", status, "list the testbeds with their rates, latencies and processes")
    removing = action("down", down, "remove a testbed, with every process inside")
    removing.add_argument(
        "name",
        nargs="?",
        help="default: leftovers of dead owners, and the testbed of `up` if it is the only one",
    )
    removing.add_argument("--all", action="store_true", help="all testbeds, also those in use")
    inside = action("exec", execute, "run a command inside: autotune testbed exec NAME HOST -- ...")
    inside.add_argument("name", help="name of the testbed")
    inside.add_argument("host", help="name of the host in the cluster file")


def run(options: argparse.Namespace) -> Result:
    result: Result = options.action(options)
    return result


def check(options: argparse.Namespace) -> Result:
    """Show what this machine can emulate; exit status 2 if no testbed is possible."""
    able = capabilities()
    table = Table("capability", "needed", "for", "present")
    for item in able.tried:
        cells = (item.name, "yes" if item.needed else "no", item.gives, item.reason or "yes")
        table.add_row(*cells)
    data = {
        "possible": able.possible,
        "message": able.message,
        "capabilities": [{**to_data(item), "present": item.present} for item in able.tried],
        "exit_status": 0 if able.possible else 2,
    }
    return data, table_text(table) + able.message


def up(options: argparse.Namespace) -> Result:
    """Create a testbed that stays until `down`; Ctrl-C and SIGTERM undo a partial one."""
    directory = options.state_directory
    cluster = read_cluster(options.cluster_file)
    with terminable():
        layout = bed.up(
            cluster, name=options.name, byte_scale=options.byte_scale, directory=directory
        )
    testbeds = bed.testbeds(directory=directory)
    created = next(item for item in testbeds if item.layout.name == layout.name)
    return _data(created), _text(created) + f"end it by `autotune testbed down {layout.name}`"


def status(options: argparse.Namespace) -> Result:
    """Show every recorded testbed and the records that cannot be read."""
    testbeds = bed.testbeds(directory=options.state_directory)
    unreadable = bed.unreadable(directory=options.state_directory)
    lines = ["".join(_text(item) for item in testbeds).rstrip() or "no testbed is up"]
    lines += [f"{item.name}: its record cannot be read: {item.reason}" for item in unreadable]
    data = {"testbeds": [_data(item) for item in testbeds], "unreadable": to_data(unreadable)}
    return data, "\n".join(lines)


def down(options: argparse.Namespace) -> Result:
    """Remove the named testbed, or all. After SIGTERM or Ctrl-C, another `down` continues."""
    with terminable():
        removed = _remove(options)
    text = f"removed {', '.join(removed)}" if removed else "nothing to remove"
    return {"removed": list(removed)}, text


def _remove(options: argparse.Namespace) -> tuple[str, ...]:
    directory = options.state_directory
    if options.all and options.name:
        raise InvalidInput(f"give a name or --all, but not both ({options.name!r} and --all)")
    if options.all:
        names = tuple(item.layout.name for item in bed.testbeds(directory=directory))
        return tuple(name for name in names if bed.down(name, directory=directory))
    if options.name:
        return (options.name,) if bed.down(options.name, directory=directory) else ()
    # Without a name: leftovers, and the only testbed of `up`. A living process uses the others.
    removed = bed.remove_leftovers(directory=directory)
    by_hand = [
        item.layout.name
        for item in bed.testbeds(directory=directory)
        if item.owner is None and item.complete
    ]
    if len(by_hand) > 1:
        raise InvalidInput(
            f"several testbeds are up ({', '.join(by_hand)}); give the name of one, or --all"
        )
    return removed + tuple(name for name in by_hand if bed.down(name, directory=directory))


def execute(options: argparse.Namespace) -> Result:
    """Replace this process by the command inside a host: same output, signals and exit status."""
    layout = bed.find(options.name, directory=options.state_directory)
    host = next((item for item in layout.hosts if item.name == options.host), None)
    if host is None:
        hosts = ", ".join(item.name for item in layout.hosts)
        raise InvalidInput(
            f"testbed {layout.name!r} has no host {options.host!r}; its hosts: {hosts}"
        )
    if not options.command:
        raise InvalidInput(
            f"nothing to run: autotune testbed exec {layout.name} {host.name} -- COMMAND"
        )
    words = [*bed.words_inside(host.namespace), *options.command]
    try:
        os.execvp(words[0], words)
    except OSError as error:
        problem = f"{words[0]} cannot be run: {error.strerror}; install iproute2"
        raise EmulationError(problem) from error


def _data(item: bed.BedStatus) -> dict[str, Any]:
    data: dict[str, Any] = to_data(item)
    return {"name": item.layout.name, "state": _state(item), **data}


def _state(item: bed.BedStatus) -> str:
    if item.left_over:
        return "left over by an owner that died; the next `up` or `down` removes it"
    if not item.complete:
        return "being created"
    if item.relay_alive is False:
        return "broken: its relay has ended; take it down"
    return f"up, owned by process {item.owner}" if item.owner is not None else "up"


def _text(item: bed.BedStatus) -> str:
    """A line about the testbed, its notes, and a table of its hosts."""
    layout = item.layout
    scale = f", rates and bytes divided by {layout.byte_scale:g}" if layout.byte_scale != 1 else ""
    cluster = f"cluster {layout.cluster!r}, {layout.method.value}{scale}"
    lines = [f"{layout.name}: {_state(item)} ({cluster})", *layout.notes]
    table = Table(*HOST_COLUMNS)
    for host, processes in zip(layout.hosts, item.processes, strict=True):
        inner = format_rate(host.inner_bytes_per_s) if host.inner_bytes_per_s else "memory speed"
        cells = (
            host.name,
            host.address,
            str(host.devices),
            _with_lanes(layout, host, lambda link: format_rate(link.link_bytes_per_s)),
            _with_lanes(layout, host, lambda link: _latency(link.added_latency_s)),
            inner,
            str(len(processes)),
            host.namespace,
        )
        table.add_row(*cells)
    return "\n".join(lines) + "\n" + table_text(table)


def _with_lanes(layout: Layout, host: HostLayout, text: Callable[[HostLayout | Lane], str]) -> str:
    """The text of the host's interface, and of the lanes that differ from it."""
    lanes = [
        f"{text(lane)} to {layout.hosts[lane.to].name}"
        for lane in host.lanes
        if text(lane) != text(host)
    ]
    return ", ".join([text(host), *lanes])


def _latency(added_s: float) -> str:
    return format_seconds(added_s) if added_s else "own"
