"""Spans of a trace are matched with the entries of the log, for random groups and threads."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples

from autotune.recordings.job_file import ClockPair
from runtime_rewriter.recording.collectives import CollectiveLog, IssuedCollective, LoggedGroup
from runtime_rewriter.recording.trace_file import TraceClock, annotate

OPS = {"allreduce_": "gloo:all_reduce", "broadcast_": "gloo:broadcast", "gather_": "gloo:gather"}
OPS["_allgather_base_"] = "gloo:all_gather"
CLOCK = TraceClock(ClockPair(0, 5_000_000), ClockPair(10**9, 1_005_000_000), 5_000_000)


@st.composite
def histories(draw: st.DrawFn) -> tuple[CollectiveLog, list[dict[str, Any]], list[int]]:
    """A log, the spans of its collectives in any order, and the entry of each span.

    A group has two threads; the one that is free first takes the next collective.
    """
    groups = draw(st.integers(1, 3))
    log = CollectiveLog()
    log.groups = {str(g): LoggedGroup(str(g), "", "gloo", (0, 1)) for g in range(groups)}
    free_us = {g: [0.0, 0.0] for g in range(groups)}
    spans: list[dict[str, Any]] = []
    owners: list[int] = []
    now_us = 0.0
    for number in range(draw(st.integers(1, 25))):
        now_us += draw(st.floats(10.0, 400.0))
        group, op = draw(st.integers(0, groups - 1)), draw(st.sampled_from(sorted(OPS)))
        sizes = (4, 4, "float32", 4, int(now_us * 1e3), 0, 1)
        origin = (number // 5, "bucket", "", True)
        log.issued.append(IssuedCollective(op, str(group), number, *sizes, *origin))
        thread = min((0, 1), key=lambda t: free_us[group][t])
        previous = max((s["ts"] for s in spans if s["tid"] // 10 == group + 1), default=-1.0)
        start_us = max(now_us, free_us[group][thread], previous) + draw(st.floats(0.1, 5.0))
        free_us[group][thread] = start_us + draw(st.floats(1.0, 900.0))
        took_us = free_us[group][thread] - start_us
        tid = 10 * (group + 1) + thread
        span = {"ph": "X", "cat": "user_annotation", "name": OPS[op], "tid": tid}
        spans.append({**span, "ts": start_us, "dur": took_us, "args": {"n": number}})
        owners.append(number)
        log.group_of_thread[tid] = str(group)
    return log, draw(st.permutations(spans)), owners


@settings(max_examples=examples(150), deadline=None)
@given(histories())
def test_every_span_gets_the_entry_that_it_is(history) -> None:
    log, spans, owners = history
    put = annotate({"traceEvents": spans}, log, CLOCK, 0, 2, "plan-x")
    assert put.untimed == 0 and len(put.collectives) == len(owners)
    for span in spans:
        assert span["args"]["Seq"] == span["args"]["n"]
        assert span["args"]["autotune"]["queue_us"] >= 0.0


@settings(max_examples=examples(60), deadline=None)
@given(histories())
def test_a_thread_without_a_group_is_assigned_to_the_one_that_lacks_spans(history) -> None:
    log, spans, _ = history
    if len(log.groups) > 1:
        return
    log.group_of_thread.pop(min(log.group_of_thread))
    assert annotate({"traceEvents": spans}, log, CLOCK, 0, 2, "").untimed == 0
    assert all(span["args"]["Seq"] == span["args"]["n"] for span in spans)


@settings(max_examples=examples(60), deadline=None)
@given(histories(), st.randoms())
def test_lost_spans_leave_their_entries_without_times(history, random) -> None:
    log, spans, owners = history
    remaining = [span for span in spans if random.random() < 0.5]
    trace: dict[str, Any] = {"traceEvents": remaining}
    put = annotate(trace, log, CLOCK, 1, 2, "")
    timed = sum("autotune" in span["args"] for span in remaining)
    assert len(put.collectives) == len(owners) and put.untimed == len(owners) - timed
    assert trace["distributedInfo"] == {"rank": 1, "world_size": 2, "backend": "gloo"}
