"""A signal stops a command even if Python drops its exception."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from autotune.jobs.signals import terminable
from autotune.tuning.history import History
from autotune.tuning.instructions import Abort


class Interrupted:
    """A signal arrives while its destructor runs."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):  # Python runs the handler between two of its own instructions
            pass


def test_a_signal_during_a_destructor_ends_the_job_at_its_next_instruction(monkeypatch) -> None:
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: dropped.append(raised.exc_type))
    with terminable() as interruption:
        interrupted = Interrupted()
        del interrupted
        assert dropped == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            interruption.started(Abort("anything"), History((), 0.0))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_every_signal_that_asks_for_an_end_interrupts(number: signal.Signals) -> None:
    before = {
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    try:
        with pytest.raises(KeyboardInterrupt), terminable():
            signal.raise_signal(number)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_handlers_are_restored_and_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with terminable():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not before[0]
        assert signal.getsignal(signal.SIGTERM) is before[0]
    finally:
        signal.signal(signal.SIGINT, before[1])


def test_a_repeated_signal_does_not_interrupt_the_clean_up_of_the_first() -> None:
    """`timeout` sends its signal to the command, and to the command's group."""
    cleaned_up = False
    with pytest.raises(KeyboardInterrupt), terminable():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned_up = True
    assert cleaned_up
