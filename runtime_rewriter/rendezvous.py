"""Lines between rank 0 and every other rank of a script that has no communication of its own.

Rank 0 listens on one interface, only until all ranks are connected. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import LaunchError
from runtime_rewriter.agent_store import AgentStore
from runtime_rewriter.control import ControlClosed, ControlLine

HELLO_S = 5.0
"""Time for a connection to state its rank; one that does not is closed."""
RETRY_S = 0.1
_PURPOSE = "rendezvous"
_WORLD_SIZE = "WORLD_SIZE"
_SIZES = {
    _WORLD_SIZE: "a launcher",
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "a launcher of MPI",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""Variables in which launchers give each of their processes the number of all."""
_TERMINAL_OF_SRUN = "SLURM_PTY_PORT"
"""Set in a shell of `srun --pty` and in what it starts."""
Facts = dict[str, Any]


def launched_processes(environment: Mapping[str, str], at_terminal: bool | None = None) -> str:
    """Return which launcher started how many processes, if this is one of several; else "".

    `at_terminal`: whether a user types the input; None: as the standard input is.
    """
    if at_terminal is None:
        at_terminal = sys.stdin is not None and sys.stdin.isatty()
    if _TERMINAL_OF_SRUN in environment and at_terminal:
        return ""  # the one process of its step that has the terminal
    for name, launcher in _SIZES.items():
        size = environment.get(name, "")
        if size.isdigit() and int(size) > 1:
            return f"{launcher} started {size} processes ({name})"
    return ""


def refuse_lone_ranks(environment: Mapping[str, str]) -> None:
    """Raise `LaunchError` if a launcher started several processes that cannot meet.

    Without WORLD_SIZE, each of them would take itself for the only one.
    """
    processes = "" if _WORLD_SIZE in environment else launched_processes(environment)
    if processes:
        raise LaunchError(
            "a rank needs WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT in its environment, but "
            f"{processes} without them, so each would train alone on all data; start the script "
            "by torchrun, or set WORLD_SIZE=1 for trainings of their own"
        )


@dataclass(frozen=True)
class Peers:
    """Lines of rank 0 to the ranks 1, 2, ..., or of another rank to rank 0 alone.

    `addresses`: of every rank by which rank 0 sees it; empty on the others.
    """

    rank: int
    lines: tuple[ControlLine, ...]
    addresses: tuple[str, ...] = ()

    def agree(
        self, facts: Facts, decide: Callable[[list[Facts]], Facts], timeout_s: float
    ) -> Facts:
        """Give `facts`, and return what rank 0 decides from those of all ranks.

        A fact named `problem` is raised on every rank, as is a `LaunchError` of `decide`. Raises
        `LaunchError`, also if a rank is gone or does not answer in time.
        """
        if self.rank > 0:
            self._send(0, facts)
            return _checked(self._receive(0, time.monotonic() + timeout_s))
        deadline_s = time.monotonic() + timeout_s
        decision: Facts
        try:
            all_facts = [facts]
            for index in range(len(self.lines)):
                all_facts.append(self._receive(index, deadline_s))
            for each in all_facts:
                _checked(each)
            decision = decide(all_facts)
        except LaunchError as error:
            decision = {"problem": str(error)}
        for index in range(len(self.lines)):
            with contextlib.suppress(LaunchError):  # it is gone: the others still need to know
                self._send(index, decision)
        return _checked(decision)

    def _send(self, index: int, facts: Facts) -> None:
        try:
            self.lines[index].send(json.dumps(facts))
        except ControlClosed as error:
            raise self._gone(index, error) from error

    def _receive(self, index: int, deadline_s: float) -> Facts:
        try:
            line = self.lines[index].receive(max(0.0, deadline_s - time.monotonic()))
        except ControlClosed as error:
            raise self._gone(index, error) from error
        if line is None:
            raise LaunchError(f"rank {self._peer(index)} gave no answer in time")
        facts: Facts = json.loads(line)
        return facts

    def _peer(self, index: int) -> int:
        return 0 if self.rank else index + 1

    def _gone(self, index: int, error: ControlClosed) -> LaunchError:
        return LaunchError(f"connection closed by peer: rank {self._peer(index)} ended ({error})")


def _checked(facts: Facts) -> Facts:
    if problem := facts.get("problem"):
        raise LaunchError(str(problem))
    return facts


def meet(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    timeout_s: float,
    agent: AgentStore | None = None,
) -> Peers:
    """Connect all ranks with rank 0, which listens at `address`. Raises `LaunchError`.

    With an `agent`, whose store has the port, rank 0 listens on another one and tells it there.
    """
    deadline_s = time.monotonic() + timeout_s
    if rank > 0:
        if agent is not None:
            port = agent.agreed_port(_PURPOSE, None, timeout_s)
        return Peers(rank, (_joined(rank, address, port, deadline_s),))
    lines: dict[int, tuple[ControlLine, str]] = {}
    try:
        listener = socket.create_server(
            (address, 0 if agent is not None else port), backlog=world_size
        )
    except OSError as error:
        raise LaunchError(f"rank 0 cannot listen at {address}:{port}: {error}") from error
    with listener:
        if agent is not None:
            agent.agreed_port(_PURPOSE, listener.getsockname()[1], timeout_s)
        while len(lines) < world_size - 1:
            listener.settimeout(max(deadline_s - time.monotonic(), 0.001))
            try:
                connection, (peer, *_) = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, world_size)) - set(lines))
                raise LaunchError(
                    f"every rank must connect to rank 0 within {timeout_s:g} s, but "
                    f"{', '.join(map(str, missing))} did not; did each of them run the same script?"
                ) from None
            _greet(connection, peer, lines, world_size)
    members = [lines[other] for other in range(1, world_size)]
    return Peers(0, tuple(line for line, _ in members), (address, *(peer for _, peer in members)))


def _greet(
    connection: socket.socket, peer: str, lines: dict[int, tuple[ControlLine, str]], size: int
) -> None:
    """Take the connection if it is one of a rank that is not yet there; else close it."""
    line = ControlLine(connection)
    with contextlib.suppress(ControlClosed, ValueError):
        number = json.loads(line.receive(HELLO_S) or "null")
        if isinstance(number, int) and 0 < number < size and number not in lines:
            lines[number] = (line, peer)
            return
    line.close()


def _joined(rank: int, address: str, port: int, deadline_s: float) -> ControlLine:
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            connection = socket.create_connection((address, port), timeout=max(left_s, 0.001))
        except OSError as error:  # rank 0 may not listen yet
            if left_s <= RETRY_S:
                raise LaunchError(
                    f"rank {rank} cannot reach rank 0 at {address}:{port}: {error}"
                ) from error
            time.sleep(RETRY_S)
            continue
        line = ControlLine(connection)
        line.send(json.dumps(rank))
        return line
