"""`autotune testbed`: emulated clusters by hand."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from rich.markup import escape
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


def check(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """What this machine can emulate; exit status 2 where no testbed is possible."""
    able = capabilities()
    table = Table("capability", "needed", "for", "present")
    for item in able.found:
        table.add_row(
            *(
                escape(cell)
                for cell in (
                    item.name,
                    "yes" if item.needed else "no",
                    item.gives,
                    item.reason or "yes",
                )
            )
        )
    data = {
        "possible": able.possible,
        "message": able.message,
        "capabilities": [{**to_data(item), "present": item.present} for item in able.found],
        "exit_status": 0 if able.possible else 2,
    }
    return data, table_text(table) + able.message


def up(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Make a testbed that stays until it is taken down; one that is half made is undone by Ctrl-C and SIGTERM."""
    cluster = read_cluster(options.cluster_file)
    with terminable():
        made = bed.up(
            cluster,
            name=options.name,
            byte_scale=options.byte_scale,
            directory=options.state_directory,
        )
    status = next(
        item
        for item in bed.testbeds(directory=options.state_directory)
        if item.layout.name == made.name
    )
    return _data(status), _shown(status) + f"end it by `autotune testbed down {made.name}`"


def status(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Every recorded testbed, as it is now, and the records that cannot be read."""
    found, unreadable = (
        bed.testbeds(directory=options.state_directory),
        bed.unreadable(directory=options.state_directory),
    )
    text = "".join(_shown(item) for item in found).rstrip() or "no testbed is up"
    lines = [
        text,
        *(f"{item.name}: its record cannot be read: {item.reason}" for item in unreadable),
    ]
    return {
        "testbeds": [_data(item) for item in found],
        "unreadable": to_data(unreadable),
    }, "\n".join(lines)


def down(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Take down the testbed of a name, or all; see `_without_a_name` for neither. SIGTERM is taken as Ctrl-C; another `down` goes on."""
    with terminable():
        removed = _removed(options)
    return {
        "removed": list(removed)
    }, f"removed {', '.join(removed)}" if removed else "nothing to remove"


def _removed(options: argparse.Namespace) -> tuple[str, ...]:
    directory = options.state_directory
    if options.all:
        if options.name:
            raise InvalidInput(f"give a name or --all, but not both ({options.name!r} and --all)")
        names = tuple(item.layout.name for item in bed.testbeds(directory=directory))
        return tuple(name for name in names if bed.down(name, directory=directory))
    if options.name:
        return (options.name,) if bed.down(options.name, directory=directory) else ()
    return _without_a_name(options)


def execute(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Become the command inside a host: its output, signals and exit status are the command's own."""
    made = bed.find(options.name, directory=options.state_directory)
    host = next((item for item in made.hosts if item.name == options.host), None)
    if host is None:
        raise InvalidInput(
            f"testbed {made.name!r} has no host {options.host!r}; its hosts: {', '.join(item.name for item in made.hosts)}"
        )
    if not options.command:
        raise InvalidInput(
            f"nothing to run: autotune testbed exec {made.name} {host.name} -- COMMAND"
        )
    words = [*bed.words_inside(host.namespace), *options.command]
    try:
        os.execvp(words[0], words)
    except OSError as error:
        raise EmulationError(
            f"{words[0]} cannot be run: {error.strerror}; install iproute2"
        ) from error


def _without_a_name(options: argparse.Namespace) -> tuple[str, ...]:
    """Leftovers, and the testbed that `up` made, if it is the only one: what belongs to a living process is in use."""
    directory = options.state_directory
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


def _data(item: bed.BedStatus) -> dict[str, Any]:
    data: dict[str, Any] = to_data(item)
    return {"name": item.layout.name, "state": _state(item), **data}


def _state(item: bed.BedStatus) -> str:
    if item.left_over:
        return "left over by an owner that died; the next `up` or `down` removes it"
    if not item.complete:
        return "being made"
    if item.relay_alive is False:
        return "broken: its relay has ended; take it down"
    return f"up, owned by process {item.owner}" if item.owner is not None else "up"


def _shown(item: bed.BedStatus) -> str:
    """A line about the testbed, its notes, and a table of its hosts."""
    layout = item.layout
    scale = f", rates and bytes divided by {layout.byte_scale:g}" if layout.byte_scale != 1 else ""
    lines = [
        f"{layout.name}: {_state(item)} (cluster {layout.cluster!r}, {layout.method.value}{scale})",
        *layout.notes,
    ]
    table = Table(
        "host", "address", "devices", "rate", "added latency", "inside", "processes", "namespace"
    )
    for host, processes in zip(layout.hosts, item.processes, strict=True):
        inner = format_rate(host.inner_bytes_per_s) if host.inner_bytes_per_s else "memory speed"
        cells = (
            host.name,
            host.address,
            str(host.devices),
            _rates(layout, host),
            _latencies(layout, host),
            inner,
        )
        table.add_row(*(escape(cell) for cell in (*cells, str(len(processes)), host.namespace)))
    return "\n".join(lines) + "\n" + table_text(table)


def _rates(layout: Layout, host: HostLayout) -> str:
    return _with_lanes(layout, host, lambda link: link.link_bytes_per_s, format_rate)


def _latencies(layout: Layout, host: HostLayout) -> str:
    return _with_lanes(layout, host, lambda link: link.added_latency_s, _latency)


def _with_lanes(
    layout: Layout,
    host: HostLayout,
    value: Callable[[HostLayout | Lane], float],
    shown: Callable[[float], str],
) -> str:
    """The value of the host's interface, and of the lanes that differ from it."""
    lanes = [
        f"{shown(value(lane))} to {layout.hosts[lane.to].name}"
        for lane in host.lanes
        if value(lane) != value(host)
    ]
    return ", ".join([shown(value(host)), *lanes])


def _latency(added_s: float) -> str:
    return format_seconds(added_s) if added_s else "own"
