"""Calls that may block forever are waited for until a deadline, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from autotune.deadlines import AwakeClock, Call, Overdue, within

ROOT = Path(__file__).parents[2]


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


WAITING = """
import sys, threading
from autotune.deadlines import Call
released = threading.Event()
main = threading.main_thread().ident
def release():
    while sys._current_frames()[main].f_code.co_name != "wait":
        pass
    print("waits", flush=True)
    sys.stdin.readline()
    released.set()
call = Call(released.wait)
threading.Thread(target=release, daemon=True).start()
print(call.result(3.0), flush=True)
"""


@pytest.mark.slow
def test_a_pause_of_the_process_is_not_the_calls():
    command = [sys.executable, "-c", WAITING]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT) as caller:
        assert caller.stdout.readline() == "waits\n"
        caller.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, caller.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(3.5)  # the pause itself
        caller.send_signal(signal.SIGCONT)
        assert caller.communicate("released\n", timeout=60.0)[0] == "True\n"


def test_a_pause_between_two_readings_takes_no_more_time_than_the_longest_wait():
    times_s = iter([100.0, 101.0, 103.5, 1000.0, 1000.5])
    clock = AwakeClock(3.0, lambda: next(times_s))
    assert [clock.now_s() for _ in range(4)] == [1.0, 3.5, 6.5, 7.0]
