"""Which kind a failure is, and what the events of all ranks together amount to."""

from __future__ import annotations

import pytest

from autotune.errors import SynchronizationError
from autotune.records import Failed, FailureKind
from runtime_rewriter.failures import failure_of_exit, is_consequence, kind_of_exception
from runtime_rewriter.world.answers import Answers, ScriptEnded, Silence

LOST_PEER = {
    "event": "failed",
    "kind": "crash",
    "message": "all_reduce failed: Connection closed by peer [127.0.0.1]:4242",
}
OWN_ERROR = {"event": "failed", "kind": "crash", "message": "ValueError: planted"}
ENDED = {"event": "ended", "steps": 7}


def synchronization_error(cause: str | None) -> SynchronizationError:
    error = SynchronizationError(f"message 0 must complete on every rank, but failed: {cause}")
    error.__cause__ = RuntimeError(cause) if cause else None
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TypeError("get() got an unexpected keyword argument 'timeout'"), FailureKind.CRASH),
        (ValueError("timeout must be positive"), FailureKind.CRASH),
        (
            RuntimeError("[gloo] Timed out waiting 20000ms for recv operation to complete"),
            FailureKind.HANG,
        ),
        (TimeoutError("the store did not answer"), FailureKind.HANG),
        (synchronization_error("Timed out waiting 60000ms for send operation"), FailureKind.HANG),
        (synchronization_error("Connection closed by peer"), FailureKind.CRASH),
        (synchronization_error(None), FailureKind.CRASH),
        (synchronization_error("CUDA out of memory"), FailureKind.OUT_OF_MEMORY),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
    ],
)
def test_a_hang_is_what_timed_out_and_not_what_names_a_timeout(error, kind) -> None:
    assert kind_of_exception(error) is kind


def test_a_process_that_nccls_watchdog_ended_hung() -> None:
    log = (
        "[rank1]:[E1123 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=3, OpType=ALLREDUCE, Timeout(ms)=10000) ran for 10003 milliseconds before timing out.\nterminate called"
    )
    failed = failure_of_exit(-6, 1, log)
    assert failed.kind is FailureKind.HANG and "rank 1 waited in vain" in failed.message
    assert failure_of_exit(-6, 1, "terminate called").kind is FailureKind.CRASH


def test_a_rank_whose_peer_left_nccl_tells_a_consequence() -> None:
    text = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
    assert is_consequence(failure_of_exit(1, 0, text))


def outcome_of(*by_rank: list[dict], now_s: float = 1.0) -> object:
    answers = Answers("trial", len(by_rank), 6.0, 0.0)
    for rank, events in enumerate(by_rank):
        answers.take(rank, events, 0.5)
    assert answers.complete(now_s, 5.0)
    return answers.outcome(now_s)


def test_a_rank_that_lost_a_peer_that_ended_normally_is_at_the_end_of_the_script() -> None:
    with pytest.raises(ScriptEnded) as ended:
        outcome_of([LOST_PEER], [ENDED, {"event": "exited", "code": 0, "log": ""}])
    assert ended.value.steps == 7


def test_a_rank_that_waits_in_vain_for_a_peer_that_ended_is_at_the_end_of_the_script() -> None:
    with pytest.raises(ScriptEnded):
        outcome_of([], [ENDED], now_s=7.0)


def test_an_error_of_its_own_is_a_failure_even_if_another_rank_ended() -> None:
    failed = outcome_of([OWN_ERROR], [ENDED])
    assert isinstance(failed, Failed) and failed.rank == 0


def test_the_cause_is_reported_and_not_its_consequence() -> None:
    failed = outcome_of([LOST_PEER], [OWN_ERROR])
    assert isinstance(failed, Failed) and failed.rank == 1


def test_silence_counts_from_the_last_word() -> None:
    answers = Answers("trial", 1, 6.0, 0.0)
    answers.take(0, [{"event": "step"}], 5.0)
    assert not answers.complete(10.0, 5.0)
    assert answers.complete(11.5, 5.0)
    with pytest.raises(Silence, match="rank 0 made no step for 6 s"):
        answers.outcome(11.5)
