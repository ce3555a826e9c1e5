"""Kinds of failures, and the outcome of all ranks' events."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping

import pytest

from autotune.errors import SynchronizationError
from autotune.records import Failed, FailureKind
from runtime_rewriter.failures import failure_of_exit, is_consequence, kind_of_exception
from runtime_rewriter.protocol import Heartbeat, RankEvent, RankFailed, ScriptFinished, TrialAnswer
from runtime_rewriter.world.answers import Answers, ScriptEnded, Silence, named_ranks
from runtime_rewriter.world.worker import ProcessExited

LOST_PEER = RankFailed(
    FailureKind.CRASH, "all_reduce failed: Connection closed by peer [127.0.0.1]:4242"
)
OWN_ERROR = RankFailed(FailureKind.CRASH, "ValueError: planted")
FINISHED = ScriptFinished(7)
ANSWER = TrialAnswer((0.1,), (True,), (), None)


def synchronization_error(cause: str | None) -> SynchronizationError:
    error = SynchronizationError(f"message 0 must complete on every rank, but failed: {cause}")
    error.__cause__ = RuntimeError(cause) if cause else None
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TypeError("get() got an unexpected keyword argument 'timeout'"), FailureKind.CRASH),
        (ValueError("timeout must be positive"), FailureKind.CRASH),
        (RuntimeError("[gloo] Timed out waiting 20000ms for recv operation"), FailureKind.HANG),
        (TimeoutError("the store did not answer"), FailureKind.HANG),
        (synchronization_error("Timed out waiting 60000ms for send operation"), FailureKind.HANG),
        (synchronization_error("Connection closed by peer"), FailureKind.CRASH),
        (synchronization_error(None), FailureKind.CRASH),
        (synchronization_error("CUDA out of memory"), FailureKind.OUT_OF_MEMORY),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
    ],
)
def test_only_an_error_that_timed_out_is_a_hang(error, kind) -> None:
    assert kind_of_exception(error) is kind


@pytest.fixture
def data_limit() -> Iterator[Callable[[int], None]]:
    """Sets the limit of this process's data segment, until the end of the test."""
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def test_a_thread_that_cannot_start_lacks_memory_only_under_a_limit(data_limit) -> None:
    limits = {resource.getrlimit(one)[1] for one in (resource.RLIMIT_AS, resource.RLIMIT_DATA)}
    error = RuntimeError("can't start new thread")
    data_limit(2**46)
    assert kind_of_exception(error) is FailureKind.OUT_OF_MEMORY
    if limits != {resource.RLIM_INFINITY}:
        pytest.skip("this process cannot lift its own limits of memory")
    data_limit(resource.RLIM_INFINITY)
    assert kind_of_exception(error) is FailureKind.CRASH


def test_a_process_that_nccls_watchdog_ended_hung() -> None:
    log = (
        "[rank1]:[E1123 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, Timeout(ms)=10000) ran for 10003 "
        "milliseconds "
        "before timing out.\nterminate called"
    )
    failed = failure_of_exit(-6, 1, log)
    assert failed.kind is FailureKind.HANG and "rank 1 waited in vain" in failed.message
    assert failure_of_exit(-6, 1, "terminate called").kind is FailureKind.CRASH


def test_a_rank_whose_peer_left_nccl_reports_a_consequence() -> None:
    text = "ncclRemoteError: possibly a network error or a remote process exiting prematurely."
    assert is_consequence(failure_of_exit(1, 0, text))


def test_the_last_output_of_a_process_does_not_make_its_end_a_consequence() -> None:
    ended = failure_of_exit(-11, 1, "a retry of a download: Connection reset by peer")
    assert "Connection reset" in ended.message and not is_consequence(ended)


def outcome_of(*by_rank: list[RankEvent | ProcessExited], now_s: float = 1.0) -> object:
    answers = Answers(TrialAnswer, len(by_rank), 6.0, 0.0)
    for rank, events in enumerate(by_rank):
        answers.take(rank, events, 0.5)
    assert answers.complete(now_s, 5.0)
    return answers.outcome(now_s)


def test_the_answers_come_by_rank_whatever_else_the_ranks_send() -> None:
    second = TrialAnswer((0.2,), (True,), (), None)
    assert outcome_of([Heartbeat(), ANSWER, ProcessExited(0, "")], [second]) == [ANSWER, second]


@pytest.mark.parametrize(
    ("by_rank", "now_s"),
    [([[LOST_PEER], [FINISHED, ProcessExited(0, "")]], 1.0), ([[], [FINISHED]], 12.0)],
    ids=["lost its peer", "waits in vain"],
)
def test_a_rank_without_a_peer_that_ended_normally_is_at_the_end_of_the_script(
    by_rank, now_s
) -> None:
    with pytest.raises(ScriptEnded) as ended:
        outcome_of(*by_rank, now_s=now_s)
    assert ended.value.steps == 7


@pytest.mark.parametrize(
    ("by_rank", "rank"),
    [
        ([[OWN_ERROR], [FINISHED]], 0),
        ([[LOST_PEER], [OWN_ERROR]], 1),
        ([[ANSWER], [ProcessExited(-9, "")]], 1),
    ],
    ids=["another rank ended", "another rank lost its peer", "a process that only ended"],
)
def test_a_ranks_own_failure_is_the_cause(by_rank, rank) -> None:
    failed = outcome_of(*by_rank)
    assert isinstance(failed, Failed) and failed.rank == rank


def test_others_have_longer_to_report_while_ranks_have_only_lost_another_one() -> None:
    answers = Answers(TrialAnswer, 2, 60.0, 0.0)
    answers.take(0, [LOST_PEER], 1.0)
    assert not answers.complete(14.0, 5.0) and answers.complete(16.5, 5.0)
    answers.take(1, [ProcessExited(7, "")], 14.0)
    failed = answers.outcome(14.0)
    assert answers.complete(14.0, 5.0) and isinstance(failed, Failed) and failed.rank == 1


def test_silence_counts_from_the_last_event() -> None:
    answers = Answers(TrialAnswer, 1, 6.0, 0.0)
    answers.take(0, [Heartbeat()], 5.0)
    assert not answers.complete(15.5, 5.0), "the rank may yet name the message that it misses"
    assert answers.complete(16.5, 5.0)
    with pytest.raises(Silence, match="rank 0 made no step for 6 s"):
        answers.outcome(16.5)


def silence_after(beats: Mapping[float, tuple[int, ...]]) -> Silence:
    """The silence of ranks that sent heartbeats with these steps at these times."""
    answers = Answers(TrialAnswer, 4, 60.0, 0.0)
    for now_s, steps in beats.items():
        for rank, count in enumerate(steps):
            answers.take(rank, [Heartbeat(count)], now_s)
    with pytest.raises(Silence) as silence:
        answers.outcome(now_s + 65.0)
    return silence.value


def test_a_rank_that_is_a_step_behind_the_others_is_named_first() -> None:
    silence = silence_after({5.0: (40,) * 4, 10.0: (41,) * 4, 15.0: (42, 42, 42)})
    behind = "rank 3 is behind (41 steps, others 42); the limit is --step-timeout"
    assert str(silence) == f"ranks 0-3 made no step for 60 s; {behind}"
    assert silence.rank == 3 and silence.ranks == (0, 1, 2, 3)


def test_no_rank_is_behind_where_heartbeats_leave_out_short_steps() -> None:
    steps = {1.0: (100, 90, 95, 99), 2.0: (111, 100, 106, 109)}
    silence = silence_after(steps)
    assert str(silence) == "ranks 0-3 made no step for 60 s; the limit is --step-timeout"
    assert silence.rank == 0
    assert "behind" not in str(silence_after({1.0: (7, 8, 8, 8), 2.5: (8, 9, 9, 9)}))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((2,), "rank 2"),
        ((0, 1), "ranks 0, 1"),
        ((3, 4, 5), "ranks 3-5"),
        ((*range(0, 20, 2),), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2 more"),
    ],
)
def test_ranks_are_named_in_few_words(ranks, words) -> None:
    assert named_ranks(ranks) == words
