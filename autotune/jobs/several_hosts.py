"""Commands that use an export on the several hosts that its job ran on, host by host."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.export import Export
from autotune.masking import masked_command
from autotune.records import Conditions, Network
from runtime_rewriter.rendezvous import launched_processes
from runtime_rewriter.world.command import read_command
from runtime_rewriter.world.script_command import ScriptCommand

PORT = 29500
"""torchrun's own default port."""
SHOWN_HOSTS = 16
"""Hosts that a line lists; best.json has all."""
_HOST_OPTIONS = ("-H", "-host", "--host", "-machinefile", "--machinefile")
"""How the options of mpirun and horovodrun begin that name the hosts, or a file of them."""
_OF_HOSTS = re.compile("(host|node)_?(file|list)", re.IGNORECASE)
"""In names of variables and parameters from which mpirun takes hosts that no option names.

Such as PBS_NODEFILE, SLURM_JOB_NODELIST, PE_HOSTFILE and OMPI_MCA_orte_default_hostfile.
"""
_LSF = "LSB_JOBID"
"""If this variable is set, horovodrun takes its hosts from the allocation of LSF."""
_MEETING_OPTIONS = (
    *("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
)
"""Options of torchrun, each with a value, that say how many ranks meet, and where."""
_log = logging.getLogger("autotune")


@dataclass(frozen=True)
class Use:
    """A shell command that uses an export, and in words where it runs."""

    where: str
    command: str


def on_several_hosts(conditions: Conditions, cluster: Cluster) -> bool:
    """Whether the ranks of a job ran on more than one real host."""
    return conditions.network is Network.HOSTS and len(cluster.hosts) > 1


def hosts_text(cluster: Cluster) -> str:
    """The hosts in the order of their ranks, each with its number, address and number of ranks."""
    listed = [
        f"{number} {_name(host)} ({host.devices} rank{'s' if host.devices > 1 else ''})"
        for number, host in enumerate(cluster.hosts[:SHOWN_HOSTS])
    ]
    more = len(cluster.hosts) - SHOWN_HOSTS
    return ", ".join(listed) + (f" and {more} more (see best.json)" if more > 0 else "")


def _name(host: Host) -> str:
    return f"{host.name} at {host.address}" if host.address else host.name


def use_of(export: Path, words: Sequence[str], cluster: Cluster) -> Use:
    """Return how the export of a job with the command `words` is used on the hosts of `cluster`.

    In the command, R stands for a host's number in `hosts_text`, and D for its number of ranks if
    this differs between hosts.
    """
    try:
        where, launch = _launch(words, cluster.hosts)
    except InvalidInput:  # the script is no longer where it was
        where, launch = "on every host, with a launcher that joins them in this order", [*words]
    run = ["autotune", "run", "--strategy", str(export), "--", *launch]
    return Use(where, shlex.join(run))


def refuse_other_hosts(
    export: Export,
    script: ScriptCommand,
    words: Sequence[str],
    path: Path,
    environment: Mapping[str, str],
) -> None:
    """Raise `InvalidInput` if a command starts the ranks of an export for several hosts on one, or
    the other way round.

    For mpirun, whose configuration files may name hosts, only warn.
    """
    on_one = not on_several_hosts(export.conditions, export.cluster)
    emulated = export.conditions.network is Network.EMULATED
    if on_one and script.nodes > 1 and not emulated:
        raise InvalidInput(
            f"{path} was tuned with all ranks on one host ({hosts_text(export.cluster)}), but the "
            f"command joins {script.nodes}; tune on as many, with --nnodes in the command, or a "
            "cluster file (--cluster)"
        )
    hosts = export.cluster.hosts
    joins = script.nodes > 1 and script.rendezvous
    if joins or on_one or _starts_elsewhere(script, environment):
        return
    problem = "starts all ranks on this machine"
    if script.nodes > 1:
        problem = f"does not state where its {script.nodes} machines meet"
    elif script.mpirun_words:
        problem += ", unless a configuration file of mpirun names hosts"
    use = use_of(path, masked_command(words), export.cluster)
    message = (
        f"{path} was tuned on {len(hosts)} hosts, which a launcher must join, but the command "
        f"{problem}; {use.where}, run: {use.command} (hosts: {hosts_text(export.cluster)})"
    )
    if not script.mpirun_words:
        raise InvalidInput(message)
    _log.warning("%s", message)


def _starts_elsewhere(script: ScriptCommand, environment: Mapping[str, str]) -> bool:
    """Whether the command is one of mpirun or horovodrun that is given hosts."""
    names = {*environment, *script.environment}
    if script.horovodrun_words:
        return _names_hosts(script.horovodrun_words) or _LSF in names
    launcher = script.mpirun_words
    given = any(_OF_HOSTS.search(name) for name in (*launcher, *names))
    return bool(launcher) and (given or _names_hosts(launcher))


def _names_hosts(launcher: Sequence[str]) -> bool:
    return any(word.startswith(_HOST_OPTIONS) for word in launcher)


def refuse_repeated_start(script: ScriptCommand, environment: Mapping[str, str]) -> None:
    """Raise `InvalidInput` if each process of a launcher would start all ranks of the script."""
    if script.nodes > 1 or script.mpirun_words or script.horovodrun_words:
        return
    processes = launched_processes(environment)
    if processes:
        raise InvalidInput(
            f"`autotune run` starts all ranks of {script.target}, but {processes}, each of which "
            "would start all of them; run it once, or once per host with torchrun's --nnodes and "
            "--node-rank in the command (`autotune docs launching#slurm`)"
        )


def has_ranks_of(export: Export, script: ScriptCommand) -> bool:
    """Whether the command starts as many ranks as the export is for, or does not state them.

    The launcher of a host states only how many ranks this host has.
    """
    if script.workers is None or script.workers == export.world_size:
        return True
    devices = [host.devices for host in export.cluster.hosts]
    several = on_several_hosts(export.conditions, export.cluster) and script.nodes == len(devices)
    return several and script.workers // script.nodes in devices


def ranks_fix(export: Export) -> str:
    """The way to start as many ranks as the export is for."""
    if on_several_hosts(export.conditions, export.cluster):
        return f"start as many on each host as the job had: {hosts_text(export.cluster)}"
    return f"use --nproc-per-node {export.world_size}"


def _launch(words: Sequence[str], hosts: Sequence[Host]) -> tuple[str, list[str]]:
    """The place to start the ranks, and the words of the command there."""
    script = read_command(words)
    own_launcher = script.mpirun_words or script.horovodrun_words
    if own_launcher:
        return "on host 0, which starts the ranks of all", _with_hosts(words, own_launcher, hosts)
    accelerate = _is_accelerate(words[: _script_at(words, script)])
    if script.nodes == len(hosts) and script.rendezvous:
        option = "--machine_rank" if accelerate else "--node-rank"
        return f"on every host, with its number as {option}", [*words]
    even = len({host.devices for host in hosts}) == 1
    numbers = "R = its number" if even else "R = its number and D = its ranks"
    launch = _by_accelerate if accelerate and even else _by_torchrun
    return f"on every host, with {numbers}", launch(words, script, hosts)


def _with_hosts(words: Sequence[str], launcher: Sequence[str], hosts: Sequence[Host]) -> list[str]:
    """The words of mpirun or horovodrun, with the hosts if the options name none."""
    if _names_hosts(launcher):
        return [*words]
    after = list(words).index(launcher[0]) + 1
    slots = ",".join(f"{_address(host)}:{host.devices}" for host in hosts)
    return [*words[:after], "-H", slots, *words[after:]]


def _script_at(words: Sequence[str], script: ScriptCommand) -> int:
    """The place of the script among the words of its command."""
    return len(words) - 1 - len(script.arguments)


def _is_accelerate(words: Sequence[str]) -> bool:
    launchers = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
    return any(Path(word).name in launchers for word in words)


def _by_accelerate(words: Sequence[str], script: ScriptCommand, hosts: Sequence[Host]) -> list[str]:
    """Add the options of several machines right before the script, where the last ones count."""
    before = _script_at(words, script)
    options = [
        *("--num_processes", str(sum(host.devices for host in hosts))),
        *("--num_machines", str(len(hosts)), "--machine_rank", "R"),
        *("--main_process_ip", _address(hosts[0]), "--main_process_port", str(PORT)),
    ]
    return [*words[:before], *options, *words[before:]]


def _by_torchrun(words: Sequence[str], script: ScriptCommand, hosts: Sequence[Host]) -> list[str]:
    even = len({host.devices for host in hosts}) == 1
    variables = [f"{name}={value}" for name, value in script.environment.items()]
    return [
        *(["env", *variables] if variables else []),
        *("torchrun", "--nnodes", str(len(hosts))),
        *("--nproc-per-node", str(hosts[0].devices) if even else "D", "--node-rank", "R"),
        *("--master-addr", _address(hosts[0]), "--master-port", str(PORT)),
        *_further_options(script.torchrun_options),
        *script.as_python_words(),
    ]


def _further_options(options: Sequence[str]) -> list[str]:
    """The options of torchrun that do not say how many ranks meet, and where."""
    further, rest = [], list(options)
    while rest:
        name, assigned, _ = rest[0].partition("=")
        name = name.replace("_", "-")
        taken = 1
        if name in _MEETING_OPTIONS:
            taken = 1 if assigned else 2
        elif name != "--standalone":
            further.append(rest[0])
        rest = rest[taken:]
    return further


def _address(host: Host) -> str:
    return host.address or host.name
