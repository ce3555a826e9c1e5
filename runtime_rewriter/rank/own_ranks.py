"""Scripts that start their own ranks by `torch.multiprocessing.spawn`.

Our launcher has already started one process per rank, and each of them runs the script's main code
up to `spawn(fn, args, n)`. There rank 0 counts as the parent: its function, its arguments and what
it changed in its environment reach every rank as they reach new processes. Each then runs `fn` for
its rank, in the state of a new process. When all are done, the main code goes on in all of them.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from multiprocessing import spawn
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.multiprocessing

from autotune.errors import LaunchError
from runtime_rewriter.agent_store import AgentStore
from runtime_rewriter.ports import unclaimed_port
from runtime_rewriter.rank.new_process import TorchSettings, as_new_process
from runtime_rewriter.rendezvous import Facts, Peers, meet

MEET_S = 1800.0
"""Time for the main code of all ranks to reach `spawn`: torch's own for a process group."""
JOIN_S = 1e9
"""`spawn` waits for its ranks without a limit. The line to one that dies is closed."""
_PARENT = "parent"


@contextmanager
def spawned_ranks_controlled() -> Iterator[None]:
    """Inside, `torch.multiprocessing.spawn` runs this rank's share; always restored.

    It raises `LaunchError` if it starts another number of processes than this host has ranks, does
    not wait for them, if there are several hosts, or if its arguments can only be inherited.
    """
    places: tuple[Any, ...] = (torch.multiprocessing, torch.multiprocessing.spawn.__globals__)
    own = torch.multiprocessing.spawn
    ranks = _OwnRanks()
    torch.multiprocessing.spawn = ranks.spawn
    places[1]["spawn"] = ranks.spawn
    try:
        yield
    finally:
        torch.multiprocessing.spawn = own
        places[1]["spawn"] = own


class _OwnRanks:
    """This rank among those that the launcher started; made before the script's main code runs."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._settings = TorchSettings.now()
        self._rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._peers: Peers | None = None

    def spawn(
        self,
        fn: Callable[..., object],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> None:
        """Implements `torch.multiprocessing.spawn`."""
        ranks, world = (
            int(self._environment.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE")
        )
        if not join or ranks != world or nprocs != ranks:
            raise LaunchError(
                f"the script starts {nprocs} ranks by torch.multiprocessing.spawn, but this job "
                f"has {world} ranks, {ranks} of them on this host; give {nprocs} workers on one "
                f"host (--workers {nprocs}), or let torchrun start the script, which then takes "
                "its rank from the environment: "
                "autotune tune -- torchrun --nproc-per-node N train.py"
            )
        peers = self._all_ranks(world)
        with ExitStack() as until_end:
            share, its_args = self._handed_over(peers, world, (fn, args), until_end)
            with _joined(peers):
                share(self._rank, *its_args)

    def _handed_over(
        self, peers: Peers, world: int, call: tuple[Any, ...], until_end: ExitStack
    ) -> tuple[Callable[..., object], tuple[Any, ...]]:
        """Rank 0's function and arguments, in this process as a new one `until_end`."""
        main = spawn.get_preparation_data("")  # refuses a main module that is not guarded
        handed: Any = None
        with TemporaryDirectory() if self._rank == 0 else nullcontext("") as own:
            if self._rank == 0:
                _write(Path(own, _PARENT), (bytes(main["authkey"]), self._changes()))
            folder = peers.agree({"folder": own}, lambda of_all: of_all[0], MEET_S)["folder"]
            key, changes = _read(Path(folder, _PARENT))
            multiprocessing.current_process().authkey = key
            environment = _changed(self._environment, changes)
            new_process = as_new_process(self._settings, environment, main)
            if self._rank > 0:
                until_end.enter_context(new_process)
            # One after the other: each shared tensor takes a file descriptor until it is fetched.
            # Rank 0 pickles as the parent, and so becomes a new process last.
            for receiver in (*range(1, world), 0):
                path = Path(folder, str(receiver))
                peers.agree(_pickled(path, call) if self._rank == 0 else {}, _nothing, MEET_S)
                if receiver == self._rank:
                    if self._rank == 0:
                        until_end.enter_context(new_process)
                    handed = _read(path)
        function, arguments = handed
        return function, arguments

    def _all_ranks(self, world: int) -> Peers:
        """Lines between the ranks, from the first `spawn` to the end of the process."""
        if self._peers is None:
            environment = self._environment
            self._peers = Peers(0, ())
            if world > 1:
                self._peers = meet(
                    self._rank,
                    world,
                    environment["MASTER_ADDR"],
                    int(environment["MASTER_PORT"]),
                    MEET_S,
                    AgentStore.of(environment),
                )
        return self._peers

    def _changes(self) -> dict[str, str | None]:
        """Variables that the main code has changed (None: removed), and a port for rank 0.

        In a world that the script starts itself, no agent listens for rank 0.
        """
        changes = {
            name: os.environ.get(name)
            for name in self._environment.keys() | os.environ.keys()
            if os.environ.get(name) != self._environment.get(name)
        }
        if AgentStore.of(self._environment) is not None:
            changes["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            changes.setdefault("MASTER_PORT", str(unclaimed_port("0.0.0.0")))
        return changes


@contextmanager
def _joined(peers: Peers) -> Iterator[None]:
    """Wait at the end until all ranks are done; one that exits with status 0 is."""
    try:
        yield
    except SystemExit as end:
        if end.code in (None, 0):
            with suppress(LaunchError):
                peers.agree({}, _nothing, JOIN_S)
        raise
    peers.agree({}, _nothing, JOIN_S)


def _nothing(of_all: list[Facts]) -> Facts:
    return {}


def _pickled(path: Path, call: tuple[Any, ...]) -> Facts:
    """Write the call for a rank; the problem if it cannot be handed over."""
    try:
        path.write_bytes(ForkingPickler.dumps(call))
    except (pickle.PicklingError, AttributeError, OSError, RuntimeError, TypeError) as error:
        return {
            "problem": "the function and the arguments of torch.multiprocessing.spawn must be "
            f"objects that reach running processes, but {type(error).__name__}: {error}; share no "
            "queue, lock or other object that only a new process inherits, or let torchrun start "
            "the script"
        }
    return {}


def _write(path: Path, value: object) -> None:
    path.write_bytes(pickle.dumps(value))


def _read(path: Path) -> Any:
    """The object that rank 0 has pickled into a file, which must be this user's own."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise LaunchError(
                f"rank 0 must run as the same user as this rank, but {path} has another owner; "
                "start all ranks as one user"
            )
        return pickle.load(file)  # noqa: S301 - of our own user


def _changed(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**environment, **changes}
    return {name: value for name, value in merged.items() if value is not None}
