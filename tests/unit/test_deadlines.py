"""Calls that may block forever are waited for until a deadline, and no longer."""

from __future__ import annotations

import signal
import threading

import pytest

from autotune.deadlines import Call, Overdue, within


def test_a_call_gives_its_result_or_its_own_error():
    assert within(60.0, lambda: 3) == 3
    with pytest.raises(ValueError, match="'x'"):
        within(60.0, lambda: int("x"))


def test_a_call_that_fails_leaves_no_thread_behind():
    before = set(threading.enumerate())
    call = Call(lambda: int("x"), until=threading.Event())
    with pytest.raises(ValueError, match="'x'"):
        call.result(60.0)
    for thread in set(threading.enumerate()) - before:
        thread.join(30.0)
        assert not thread.is_alive()


def test_a_call_that_blocks_is_left_behind():
    released = threading.Event()
    call = Call(lambda: released.wait(60.0))
    with pytest.raises(Overdue):
        call.result(0.05)
    assert call.running
    released.set()
    assert call.result(60.0) and not call.running


def test_a_signal_is_handled_while_a_call_blocks():
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    released = threading.Event()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            within(60.0, lambda: released.wait(60.0))
    finally:
        signal.signal(signal.SIGALRM, before)
        released.set()
