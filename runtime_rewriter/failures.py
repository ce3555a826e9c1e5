"""Which kind of failure an exception or an exit status is."""

from __future__ import annotations

import signal

from autotune.errors import SynchronizationError
from autotune.records import Failed, FailureKind

_OUT_OF_MEMORY_TEXT = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "std::bad_alloc",
)
_TIMEOUT_TEXT = ("timed out", "timeout")
# What a rank says when another one went away: a consequence, never the cause.
_CONSEQUENCE_TEXT = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "aborted due to",
    "read error",
    "a remote process exiting prematurely",  # NCCL
)
_NCCL_TIMEOUT_TEXT = "watchdog caught collective operation timeout"
"""What torch writes before it aborts a process whose collective over NCCL another rank never joined: nothing is raised there."""
_URGENCY = (
    FailureKind.OUT_OF_MEMORY,
    FailureKind.NUMERICS,
    FailureKind.REFUSED,
    FailureKind.CRASH,
    FailureKind.HANG,
)


def kind_of_exception(error: BaseException) -> FailureKind:
    """The kind that a rank reports for an exception that ended the script."""
    text = str(error).lower()
    if isinstance(error, MemoryError) or any(word in text for word in _OUT_OF_MEMORY_TEXT):
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, SynchronizationError) and error.__cause__ is not None:
        return kind_of_exception(
            error.__cause__
        )  # the communication library's own error says what happened
    # torch.distributed and its backends raise RuntimeError and subclasses of it; elsewhere the word says nothing.
    if isinstance(error, TimeoutError) or (
        isinstance(error, RuntimeError) and any(word in text for word in _TIMEOUT_TEXT)
    ):
        return FailureKind.HANG
    return FailureKind.CRASH


def failure_of_exit(code: int, rank: int, log_tail: str) -> Failed:
    """A training process that ended without a word of its own (a signal, `os._exit`)."""
    tail = f"; last output: {log_tail[-600:].strip()}" if log_tail.strip() else ""
    if code == -signal.SIGKILL:
        message = (
            f"rank {rank} was killed by SIGKILL, as the kernel does when memory runs out{tail}"
        )
        return Failed(FailureKind.OUT_OF_MEMORY, message, rank)
    if _NCCL_TIMEOUT_TEXT in log_tail.lower():
        message = f"rank {rank} waited in vain for another rank, so torch's NCCL watchdog ended it; is every rank at the same step?{tail}"
        return Failed(FailureKind.HANG, message, rank)
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return Failed(FailureKind.CRASH, f"rank {rank} ended {how}{tail}", rank)


def is_consequence(failure: Failed) -> bool:
    """Whether the rank only says that another one went away."""
    return any(word in failure.message.lower() for word in _CONSEQUENCE_TEXT)


def root_cause(failures: list[Failed]) -> Failed:
    """The failure that explains the others: ranks that only lost a peer come last, then by urgency of the kind."""

    def order(failure: Failed) -> tuple[bool, int, int]:
        return (
            is_consequence(failure),
            _URGENCY.index(failure.kind),
            failure.rank if failure.rank is not None else -1,
        )

    return min(failures, key=order)
