"""The kind of failure of an exception or an exit status."""

from __future__ import annotations

import resource
import signal

from autotune.errors import SynchronizationError
from autotune.records import Failed, FailureKind

NO_DDP_FIX = (
    "wrap the model in torch.nn.parallel.DistributedDataParallel or call "
    "autotune.apply(model, optimizer)"
)
NO_STEP_FIX = (
    f"{NO_DDP_FIX}; in TensorFlow train by model.fit on one device, by "
    "train_step = autotune.distribute(train_step) or under MultiWorkerMirroredStrategy"
)
_OUT_OF_MEMORY_TEXT = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "std::bad_alloc",
)
_NO_THREAD_TEXT = "can't start new thread"
"""Python's error if a thread's stack gets no memory, or if there are too many threads."""
_TIMEOUT_TEXT = ("timed out", "timeout")
_NCCL_LOST_PEER_TEXT = "a remote process exiting prematurely"
# Errors of a rank whose peer is gone: a consequence, never the cause.
_CONSEQUENCE_TEXT = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "aborted due to",
    "read error",
    _NCCL_LOST_PEER_TEXT,
    "horovod has been shut down",
)
_NCCL_TIMEOUT_TEXT = "watchdog caught collective operation timeout"
"""Torch writes it and aborts, without an exception, if a rank never joins a collective over
NCCL."""
_LAST_OUTPUT = "; last output: "
_URGENCY = (
    FailureKind.OUT_OF_MEMORY,
    FailureKind.NUMERICS,
    FailureKind.REFUSED,
    FailureKind.CRASH,
    FailureKind.HANG,
)


def kind_of_exception(error: BaseException) -> FailureKind:
    """The kind of an exception that ended the script."""
    text = str(error).lower()
    if isinstance(error, MemoryError) or any(word in text for word in _OUT_OF_MEMORY_TEXT):
        return FailureKind.OUT_OF_MEMORY
    if _NO_THREAD_TEXT in text and _memory_is_limited():
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, SynchronizationError) and error.__cause__ is not None:
        return kind_of_exception(error.__cause__)  # the communication library's own error
    # torch.distributed raises RuntimeError and its subclasses; in others the word proves nothing.
    timed_out = isinstance(error, RuntimeError) and any(word in text for word in _TIMEOUT_TEXT)
    return FailureKind.HANG if timed_out or isinstance(error, TimeoutError) else FailureKind.CRASH


def _memory_is_limited() -> bool:
    limits = (resource.getrlimit(one)[0] for one in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return any(limit != resource.RLIM_INFINITY for limit in limits)


def failure_of_exit(code: int, rank: int, log_tail: str) -> Failed:
    """The failure of a process that ended without a report (a signal, `os._exit`)."""
    tail = f"{_LAST_OUTPUT}{log_tail[-600:].strip()}" if log_tail.strip() else ""
    if code == -signal.SIGKILL:
        message = f"rank {rank} was killed by SIGKILL, as when memory runs out{tail}"
        return Failed(FailureKind.OUT_OF_MEMORY, message, rank)
    if _NCCL_TIMEOUT_TEXT in log_tail.lower():
        message = (
            f"rank {rank} waited in vain for another rank, so torch's NCCL watchdog ended it; "
            f"is every rank at the same step?{tail}"
        )
        return Failed(FailureKind.HANG, message, rank)
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return Failed(FailureKind.CRASH, f"rank {rank} ended {how}{tail}", rank)


def is_consequence(failure: Failed) -> bool:
    """Whether the rank only lost another one.

    The last output of a process that ended without a report proves nothing: the script may have
    handled the error that it shows. Only NCCL's own text counts there.
    """
    message = failure.message.lower()
    reported = message.partition(_LAST_OUTPUT)[0]
    lost = any(word in reported for word in _CONSEQUENCE_TEXT)
    return lost or _NCCL_LOST_PEER_TEXT in message


def root_cause(failures: list[Failed]) -> Failed:
    """The failure that explains the others: causes first, then the most urgent kind."""

    def order(failure: Failed) -> tuple[bool, int, int]:
        rank = -1 if failure.rank is None else failure.rank
        return is_consequence(failure), _URGENCY.index(failure.kind), rank

    return min(failures, key=order)
