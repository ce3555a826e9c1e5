"""Reads the options of launchers: `env`, `uv run`, torchrun, `accelerate launch`, Open MPI's
`mpirun`.

torchrun's and accelerate's own parsers read their options, so that all are known. The most common
ones of torchrun are read without its parser, which is slow to import.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from autotune.errors import InvalidInput
from runtime_rewriter.world.script_command import ScriptCommand

_USE_ENV = ("--use-env", "--use_env")
_ACCELERATE_PORT = 29500
"""accelerate's own port for several machines."""
_ONE_MACHINE = "127.0.0.1"
"""torchrun's own --master-addr, at which no other machine joins."""
_UV_FLAGS = ("--frozen", "--locked", "--no-sync", "--offline", "--active", "--quiet", "-q", "--")
_NOT_DDP = {
    "deepspeed": "DeepSpeed sends gradients itself, and autotune changes how "
    "DistributedDataParallel does; start a script that uses DistributedDataParallel by torchrun",
    "srun": "inside the allocation start Ray on every node, and give autotune its --address and "
    "the script without srun (`autotune docs launching#slurm`)",
}


def refusal(first: str, words: list[str]) -> str:
    """Why a command that begins with `first` cannot be read, and what to type instead."""
    if first in _NOT_DDP:
        return f"{first} cannot be controlled: {_NOT_DDP[first]}"
    return (
        "the command must start with torchrun, accelerate launch, horovodrun, mpirun, python or a "
        f"script.py, perhaps after env or uv run, but starts with {' '.join(words[:1])!r}"
    )


def read_env(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables of `env A=1 B=2 command`, and the words of the command."""
    variables: dict[str, str] = {}
    rest = list(words)
    while rest and "=" in rest[0] and not rest[0].startswith("-"):
        name, _, value = rest.pop(0).partition("=")
        variables[name] = value
    if not rest or rest[0].startswith("-"):
        raise InvalidInput(
            "env must be followed by NAME=value and a command, but has "
            f"{' '.join(words) or 'nothing'!r}; set up other environments before autotune"
        )
    return variables, rest


def without_uv(words: list[str]) -> list[str]:
    """The command after `uv run`, which runs in the environment of this process.

    Raises `InvalidInput` for options that ask for another environment.
    """
    if words[:1] != ["run"]:
        raise InvalidInput(
            f"uv starts a script with `uv run` only, but the command is `uv {' '.join(words[:1])}`"
        )
    rest = words[1:]
    while rest and rest[0] in _UV_FLAGS:
        rest = rest[1:]
    if rest[:1] in (["-m"], ["--module"]):
        return ["python", "-m", *rest[1:]]
    if not rest or rest[0].startswith("-"):
        raise InvalidInput(
            f"uv's option {(rest or ['without a command'])[0]} decides about the environment, but "
            "scripts run in the environment of autotune; start autotune itself that way: "
            "uv run OPTIONS autotune tune -- COMMAND"
        )
    return rest


_PLAIN_TORCHRUN = re.compile(
    r"(--standalone|(--nproc[-_]per[-_]node|--nnodes)=[0-9]+)$", flags=re.ASCII
)


def read_torchrun(words: list[str]) -> ScriptCommand:
    """The options and the script of `torchrun`."""
    return _read_plain_torchrun(words) or _read_any_torchrun(words)


def _read_plain_torchrun(words: list[str]) -> ScriptCommand | None:
    """The command if it only has a number of ranks and of nodes, which most have; else None.

    torch's own parser would import torch, during which nothing else can start.
    """
    if any(name.startswith("PET_") for name in os.environ):  # torchrun's own variables
        return None
    options: list[str] = []
    counts = {"nproc": 1, "nnodes": 1}
    rest = list(words)
    while rest and rest[0].startswith("--") and rest[0] != "--module":
        separate = "=" not in rest[0] and rest[0] != "--standalone"
        taken = rest[: 1 + separate]
        if not _PLAIN_TORCHRUN.match("=".join(taken)):
            return None
        name, _, value = "=".join(taken).partition("=")
        if value:
            counts[name[2:].replace("_", "-").partition("-")[0]] = int(value)
        options += taken
        rest = rest[len(taken) :]
    is_module = rest[:1] in (["-m"], ["--module"])
    rest = rest[is_module:]
    if not rest or rest[0].startswith("-") or 0 in counts.values():
        return None
    return ScriptCommand(
        target=rest[0],
        arguments=tuple(rest[1:]),
        is_module=is_module,
        workers=counts["nproc"] * counts["nnodes"],
        torchrun_options=tuple(options),
        nodes=counts["nnodes"],
    )


def _read_any_torchrun(words: list[str]) -> ScriptCommand:
    """The command as torch's own parser reads it."""
    from torch.distributed.run import determine_local_world_size, get_args_parser

    parser = get_args_parser()
    with _refusing(parser, "torchrun"):
        options = parser.parse_args(words)
    try:
        nodes = int(str(options.nnodes).split(":")[-1])
        workers = nodes * determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        raise InvalidInput(
            f"torchrun needs numbers for --nnodes and --nproc-per-node: {error}"
        ) from error
    before = words[: len(words) - 1 - len(options.training_script_args)]
    address = options.master_addr
    return ScriptCommand(
        target=options.training_script,
        arguments=tuple(options.training_script_args),
        is_module=bool(options.module),
        workers=workers,
        torchrun_options=tuple(word for word in before if word not in ("-m", "--module")),
        nodes=nodes,
        rendezvous=options.rdzv_endpoint or (address if address != _ONE_MACHINE else ""),
    )


def read_torch_launch(words: list[str]) -> ScriptCommand:
    """The options and the script of `python -m torch.distributed.launch --use-env`.

    Without that option, the module passes `--local-rank` to the script, which our ranks do not get.
    """
    flags = [place for place, word in enumerate(words) if word in _USE_ENV]
    rest = [word for place, word in enumerate(words) if place not in flags[:1]]
    command = read_torchrun(rest)
    options = len(rest) - 1 - len(command.arguments)
    if not flags or flags[0] > options:
        raise InvalidInput(
            "a rank gets its number as LOCAL_RANK in its environment, but python -m "
            f"torch.distributed.launch without --use-env passes --local-rank to {command.target}; "
            "use torchrun, and let the script read os.environ['LOCAL_RANK']"
        )
    return command


def read_accelerate(words: list[str]) -> ScriptCommand:
    """The options and the script of `accelerate launch`, and the variables that it would set.

    Options that are missing come from accelerate's own configuration file.
    """
    try:
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils import check_cuda_p2p_ib_support
        from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
    except ImportError as error:
        raise InvalidInput(
            f"accelerate launch needs the package accelerate in this environment: {error}"
        ) from error
    parser = launch_command_parser()
    with _refusing(parser, "accelerate launch"):
        options = parser.parse_args(words)
    is_module = bool(options.module)
    environment = dict(os.environ)
    try:
        # It prints its defaults, and looks for a free port of its own.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            options, _, _ = _validate_launch_command(options)
            for chosen in ("use_deepspeed", "use_fsdp", "use_megatron_lm", "tpu"):
                if getattr(options, chosen, False):
                    raise InvalidInput(
                        f"accelerate launch is set to {chosen}, but only DistributedDataParallel "
                        "can be tuned; choose --multi_gpu, or another --config_file"
                    )
            workers, nodes = int(options.num_processes or 1), int(options.num_machines or 1)
            torchrun_options = _options_of_machines(options, workers, nodes)
            workers -= workers % nodes  # accelerate starts as many on each machine
            options.main_process_port = 0
            if workers > 1:
                environment = prepare_multi_gpu_env(options)
                if not check_cuda_p2p_ib_support():
                    environment = {**_WITHOUT_PEER_ACCESS, **environment}
            else:
                _, environment = prepare_simple_launcher_cmd_env(options)
    except ValueError as error:
        raise InvalidInput(f"accelerate launch refuses its options: {error}") from error
    ours = {
        name: value
        for name, value in environment.items()
        if os.environ.get(name) != value and not name.startswith("MASTER_")
    }
    return ScriptCommand(
        target=options.training_script,
        arguments=tuple(options.training_script_args),
        is_module=is_module,
        workers=workers if workers > 1 else None,
        torchrun_options=torchrun_options,
        nodes=nodes,
        rendezvous=str(options.main_process_ip) if nodes > 1 else "",
        environment=ours,
    )


_WITHOUT_PEER_ACCESS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""accelerate sets these for GPUs that cannot access each other's memory."""


def _options_of_machines(options: Any, workers: int, nodes: int) -> tuple[str, ...]:
    """torchrun's options by which the ranks of several machines meet, as accelerate sets them.

    Empty for one machine. `options` are accelerate's, with those of its configuration file.
    """
    if nodes == 1:
        return ()
    address, rank = options.main_process_ip, options.machine_rank
    if address is None or rank is None or workers < nodes:
        raise InvalidInput(
            "accelerate launch with several machines needs --num_processes of all machines, "
            "--main_process_ip and --machine_rank, but has "
            f"--num_machines {nodes} --num_processes {workers}, the address {address} and the "
            f"machine rank {rank}; add what is missing, or let accelerate config ask for it"
        )
    port = _ACCELERATE_PORT if options.main_process_port is None else options.main_process_port
    return (
        *("--nnodes", str(nodes), "--nproc-per-node", str(workers // nodes)),
        *("--node-rank", str(rank), "--rdzv-backend", options.rdzv_backend or "static"),
        *("--rdzv-endpoint", f"{address}:{port}"),
        *(("--rdzv-conf", options.rdzv_conf) if options.rdzv_conf else ()),
    )


MODULES = {
    "torch.distributed.run": read_torchrun,
    "torch.distributed.launch": read_torch_launch,
    "accelerate.commands.launch": read_accelerate,
}
"""Readers of the words after `python -m MODULE`."""


_MPI_COUNT = ("-np", "-n", "-c")
_MPI_VALUES = {
    **dict.fromkeys(("-H", "-host", "-hostfile", "-machinefile"), 1),
    **dict.fromkeys(("-bind-to", "-map-by", "-rank-by", "-timeout"), 1),
    **dict.fromkeys(("-mca", "-gmca"), 2),
    **dict.fromkeys(("-oversubscribe", "-allow-run-as-root", "-tag-output"), 0),
    **dict.fromkeys(("-report-bindings", "-quiet", "-q"), 0),
}
"""Values of each option that is accepted and means nothing to a tuning job. Open MPI reads every
option of several letters with one dash and with two."""


def read_mpirun(words: list[str]) -> tuple[list[str], dict[str, str], int, list[str]]:
    """Open MPI's options, the variables of `-x`, the number of ranks, and the words of the command.

    Where the ranks run is left to the cluster that they are tuned on.
    """
    options: list[str] = []
    variables: dict[str, str] = {}
    workers: int | None = None
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        known = option.removeprefix("-") if option.startswith("--") else option
        if known in _MPI_COUNT:
            workers, count = _number(option, rest), 1
        elif option == "-x":
            name, assigned, value = (rest or [""])[0].partition("=")
            if assigned or name in os.environ:  # mpirun, too, leaves out what is not set
                variables[name] = value if assigned else os.environ[name]
            count = 1
        elif known in _MPI_VALUES:
            count = _MPI_VALUES[known]
        else:
            raise InvalidInput(
                f"mpirun's option {option} is not supported; leave it out (supported: "
                f"{', '.join((*_MPI_COUNT, '-x', *_MPI_VALUES))})"
            )
        if len(rest) < count:
            values = "a value" if count == 1 else f"{count} values"
            raise InvalidInput(f"mpirun's option {option} needs {values}, but the command ends")
        options += [option, *rest[:count]]
        rest = rest[count:]
    if workers is None:
        raise InvalidInput("mpirun needs the number of ranks, for example: mpirun -np 4 python ...")
    return options, variables, workers, rest


def _number(option: str, words: list[str]) -> int:
    if not words or not words[0].isdigit():
        raise InvalidInput(f"{option} needs a number, but has {(words or ['nothing'])[0]!r}")
    return int(words[0])


@contextlib.contextmanager
def _refusing(parser: Any, name: str) -> Iterator[None]:
    """Let the parser raise `InvalidInput` where it would exit."""

    def refuse(message: str) -> NoReturn:
        raise InvalidInput(f"{name} does not understand its options: {message}")

    parser.error = refuse
    yield
