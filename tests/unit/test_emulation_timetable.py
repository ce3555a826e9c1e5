"""Timetables of emulated accelerators, lateness, scaled messages, round-robin scheduling."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import InvalidInput
from autotune.records import Accelerators, Conditions, Network
from autotune.workload import Variable, Workload
from runtime_rewriter.emulation import Waiter, timetable_of, travelling
from runtime_rewriter.scheduling import step_down, take_round_robin, wants_round_robin

WORKLOAD = Workload(
    "Net",
    (Variable("b", (2,), ready_s=0.1), Variable("a", (3,), ready_s=0.3)),
    forward_s=0.5,
    backward_s=0.4,
    update_s=0.2,
)


def test_a_timetable_holds_the_times_of_its_workload_in_ready_order() -> None:
    timetable = timetable_of(WORKLOAD)
    assert timetable.ready == (("b", 0.1), ("a", 0.3))
    assert timetable.compute_s == pytest.approx(WORKLOAD.compute_s)


def test_times_within_a_millisecond_become_the_last_one() -> None:
    at_s = {"a": 0.1, "b": 0.1004, "c": 0.1009, "d": 0.1011, "e": 0.103}
    variables = tuple(Variable(name, (2,), ready_s=s, needed_s=0.2 - s) for name, s in at_s.items())
    timetable = timetable_of(replace(WORKLOAD, variables=variables))
    early = tuple((name, 0.1009) for name in "abc")
    assert timetable.ready == (*early, ("d", 0.1011), ("e", 0.103))
    needed = dict(timetable.needed)
    assert [name for name, _ in timetable.needed] == ["e", "d", "c", "b", "a"]
    assert needed["d"] == needed["c"] == needed["b"] == 0.2 - 0.1004
    assert needed["a"] == 0.1 and needed["e"] == 0.2 - 0.103


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (
            {"variables": (Variable("b", (2,)), Variable("a", (3,)))},
            "need ready_s of every variable, but .* none for 'b' and 1 more",
        ),
        ({"backward_s": 0.2}, "none after backward_s, but 'a' is ready after 0.3 s"),
        (
            {"variables": tuple(reversed(WORKLOAD.variables))},
            "must be in the order .* 'a' is ready after 0.3 s and 'b' after 0.1 s",
        ),
        ({"backward_s": 0.0}, "backward_s of a profile must be finite and above 0, but is 0.0"),
        ({"forward_s": -1.0}, "forward_s of 'Net' .* must be .* but is -1.0"),
        ({"update_s": math.inf}, "update_s of 'Net' .* must be .* but is inf"),
    ],
)
def test_a_profile_without_usable_times_is_refused_with_the_rule(
    changes: dict[str, Any], rule: str
) -> None:
    with pytest.raises(InvalidInput, match=rule):
        timetable_of(replace(WORKLOAD, **changes))


def test_a_wait_ends_at_its_time_and_lateness_stays_until_restart() -> None:
    waiter = Waiter()
    start_s = time.perf_counter()
    assert waiter.until(start_s + 0.5) == start_s + 0.5 and time.perf_counter() >= start_s + 0.5
    assert waiter.late_s == 0.0
    assert waiter.until(start_s - 1.0) > start_s and waiter.late_s >= 1.0
    waiter.until(start_s)
    assert waiter.late_s >= 1.0, "the largest one"
    waiter.restart()
    assert waiter.late_s == 0.0


@given(elements=st.integers(0, 10_000), byte_scale=st.floats(1.0, 1000.0), ranks=st.integers(1, 9))
def test_the_smallest_multiple_with_one_part_in_k_travels(
    elements: int, byte_scale: float, ranks: int
) -> None:
    padded = -(-elements // ranks) * ranks
    sizes = [size for size in range(0, padded + 1, ranks) if size >= padded / byte_scale]
    assert travelling(padded, byte_scale, ranks) == sizes[0]


@pytest.mark.parametrize(
    ("network", "accelerators", "ranks", "cores", "wanted"),
    [
        (Network.LOOPBACK, Accelerators.EMULATED, 8, 2, True),
        (Network.EMULATED, Accelerators.EMULATED, 2, 2, True),
        (Network.LOOPBACK, Accelerators.REAL, 2, 2, False),
        (Network.EMULATED, Accelerators.REAL, 2, 3, True),
        (Network.HOSTS, Accelerators.EMULATED, 1, 64, False),
        (Network.HOSTS, Accelerators.REAL, 1, 64, False),
    ],
)
def test_round_robin_is_wanted_if_ranks_wait_or_leave_a_core_free(
    network: Network, accelerators: Accelerators, ranks: int, cores: int, wanted: bool
) -> None:
    assert wants_round_robin(Conditions(network, accelerators), ranks, cores) is wanted


def in_a_child(action: str) -> int:
    """Exit status of a process of its own that runs `action`; the test's keeps its policy."""
    child = multiprocessing.get_context("spawn").Process(target=_end_with, args=(action,))
    child.start()
    child.join(60)
    assert child.exitcode is not None, f"{action} did not end within 60 s"
    return child.exitcode


def _end_with(action: str) -> None:
    sys.exit(ACTIONS[action]())


def take_and_step_down() -> int:
    ready, asked = threading.Event(), threading.Event()
    policies: list[int] = []

    def earlier() -> None:
        ready.set()
        asked.wait(60)
        policies.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=earlier)
    thread.start()
    ready.wait(5)
    if not take_round_robin():
        return 3
    asked.set()
    thread.join()
    if policies != [os.SCHED_RR] or os.sched_getscheduler(0) != os.SCHED_RR:
        return 1
    stepped_down = step_down() and os.sched_getscheduler(0) == os.SCHED_OTHER
    return 0 if stepped_down and not step_down() else 2


def take_and_fork() -> int:
    """Later threads must keep the policy, and forks must not, however often it was taken."""
    if not take_round_robin():
        return 3
    step_down()
    take_round_robin()
    policies: list[int] = []
    thread = threading.Thread(target=lambda: policies.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    child = os.fork()
    if child == 0:
        os._exit(os.sched_getscheduler(0))
    policies.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    still_round_robin = os.sched_getscheduler(0) == os.SCHED_RR
    return 0 if still_round_robin and policies == [os.SCHED_RR, os.SCHED_OTHER] else 1


def refused() -> int:
    os.setuid(65534)
    return 0 if not take_round_robin() and os.sched_getscheduler(0) == os.SCHED_OTHER else 1


ACTIONS = {"take": take_and_step_down, "fork": take_and_fork, "refused": refused}


@pytest.mark.parametrize("action", ["take", "fork"])
def test_threads_take_round_robin_scheduling_until_they_step_down_and_forks_do_not(
    action: str,
) -> None:
    status = in_a_child(action)
    if status == 3:
        pytest.skip("round-robin scheduling is not permitted here")
    assert status == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give up its permission")
def test_a_process_that_may_not_take_round_robin_scheduling_goes_on_without() -> None:
    assert in_a_child("refused") == 0
