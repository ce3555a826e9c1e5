"""Measures what-ifs on a script: the changed script runs in turns with the unchanged one.

Both run at the same time in a view of their files, but only one at a time trains: a turn is a few
steps of one of them, while the other waits between two steps. So both meet the same machine, and a
pair of neighbouring turns gives one ratio of step times. Turns alternate their order.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from autotune.errors import InvalidInput, LaunchError
from autotune.jobs.processes import Launched
from autotune.tuning.statistics import compare_pairs
from autotune.whatif.answers.answered import MeasuredChange
from autotune.whatif.answers.answers import Answer
from runtime_rewriter.changes.settings import ENACTABLE, CheckSettings
from runtime_rewriter.control import ControlClosed, ControlLine
from runtime_rewriter.world.command import at_any_port, with_launcher
from runtime_rewriter.world.script_command import ScriptCommand
from runtime_rewriter.world.starting import launcher_words
from runtime_rewriter.world.views import HeldView, Protected

CONFIDENCE = 0.95
FEWEST_PAIRS = 6
"""Fewer pairs have no interval of 95 % (signed ranks)."""
WARMUP_STEPS = 3
SETTLING_STEPS = 1
"""Steps at the beginning of a turn that do not count: the other script used the caches, and the
device had no work queued."""
POLL_S = 0.5
LONGEST_ADDRESS = 107
"""Bytes in the path of a socket (`man 7 unix`, sun_path)."""
TUNING = "AUTOTUNE_TUNING"
"""As in tuning jobs, "1" tells a script to write nothing that matters."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class CheckPlan:
    """`pairs` of turns of `steps` each, or as many as are done after `timeout_s`.

    `protect`: whether the script sees its folders copy-on-write.
    """

    pairs: int = 10
    steps: int = 5
    timeout_s: float = 600.0
    protect: bool = True

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.steps < 1:
            raise InvalidInput(
                "a check needs at least 1 pair of turns with at least 1 step, but has "
                f"{self.pairs} and {self.steps}"
            )


def check(
    command: ScriptCommand, answer: Answer, plan: CheckPlan, progress: Progress = lambda item: None
) -> MeasuredChange:
    """Run the changes of `answer` in turns with the baseline.

    Raises `InvalidInput` for a change that cannot be enacted on this script, and `LaunchError` if
    the script ends before everything is measured.
    """
    if command.nodes > 1:
        raise InvalidInput(
            f"--check runs the script on this machine alone, but the command has {command.nodes} "
            "nodes; leave out --nnodes"
        )
    names = tuple(answer.asked.names.split("+"))
    changed = CheckSettings("", names, dict(answer.asked.amounts))
    deadline_s = time.monotonic() + plan.timeout_s
    with contextlib.ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="autotune-check-")))
        sides = [
            ending.enter_context(_Side.started(name, command, settings, folder, plan.protect))
            for name, settings in (("baseline", CheckSettings("")), (answer.asked.text, changed))
        ]
        for side in sides:
            side.meet(deadline_s)
        for side in sides:  # one after the other: their first steps are the longest
            progress(f"{side.name}: warming up")
            side.turn(WARMUP_STEPS, deadline_s)
        pairs_s = pairs_of_turns(sides, plan, deadline_s, progress)
        return _measured(answer, pairs_s, plan, tuple(sides[1].notes))


class OutOfTime(LaunchError):
    """A turn was not over at the deadline."""


class TakesTurns(Protocol):
    """A script that trains when it is its turn."""

    name: str
    notes: list[str]

    def turn(self, steps: int, deadline_s: float) -> list[float]:
        """The times of `steps` steps; raises `OutOfTime`, or `LaunchError` if the script ends."""


def pairs_of_turns(
    sides: Sequence[TakesTurns], plan: CheckPlan, deadline_s: float, progress: Progress
) -> list[tuple[float, float]]:
    """The median step times of both sides, in pairs of neighbouring turns, shape (pairs, 2).

    From `FEWEST_PAIRS` on, fewer than planned if the time ends; a note of the second side says so.
    """
    pairs_s: list[tuple[float, float]] = []
    begun_s = time.monotonic()
    for pair in range(plan.pairs):
        now_s = time.monotonic()
        if not fits_another(pair, now_s - begun_s, deadline_s - now_s):
            break
        progress(f"{sides[1].name}: pair {pair + 1} of {plan.pairs}")
        pair_s = [0.0, 0.0]
        try:
            for place in (0, 1) if pair % 2 == 0 else (1, 0):
                times_s = sides[place].turn(plan.steps + SETTLING_STEPS, deadline_s)
                pair_s[place] = median(times_s[SETTLING_STEPS:])
        except OutOfTime:
            if pair < FEWEST_PAIRS:
                raise
            break
        pairs_s.append((pair_s[0], pair_s[1]))
    if len(pairs_s) < plan.pairs:
        sides[1].notes.append(f"{len(pairs_s)} of {plan.pairs} pairs fitted into --timeout")
    return pairs_s


def fits_another(pairs: int, spent_s: float, left_s: float) -> bool:
    """Whether another pair is measured after `pairs` that took `spent_s`, with `left_s` to go.

    Below `FEWEST_PAIRS` one is always tried: fewer have no interval.
    """
    return pairs < FEWEST_PAIRS or spent_s / pairs <= left_s


def _measured(
    answer: Answer, pairs_s: Sequence[tuple[float, float]], plan: CheckPlan, notes: tuple[str, ...]
) -> MeasuredChange:
    before_s, after_s = np.array(pairs_s).T
    comparison = compare_pairs(np.log(before_s / after_s), CONFIDENCE)
    bounded = math.isfinite(comparison.high)
    prediction = answer.prediction
    return MeasuredChange(
        name=answer.asked.text,
        predicted=None if prediction is None else prediction.speedup,
        predicted_low=None if prediction is None else prediction.speedup_low,
        predicted_high=None if prediction is None else prediction.speedup_high,
        measured=comparison.ratio,
        measured_low=comparison.low if bounded else None,
        measured_high=comparison.high if bounded else None,
        baseline_s=float(np.median(before_s)),
        changed_s=float(np.median(after_s)),
        pairs=len(pairs_s),
        steps_per_turn=plan.steps,
        notes=notes,
    )


class _Side:
    """One of the two scripts: its ranks wait for turns on a socket."""

    def __init__(self, name: str, launched: Launched, listener: socket.socket, ranks: int) -> None:
        self.name, self.notes = name, list[str]()
        self._launched, self._listener, self._ranks = launched, listener, ranks
        self._lines: list[ControlLine] = []

    @staticmethod
    @contextlib.contextmanager
    def started(
        name: str, command: ScriptCommand, settings: CheckSettings, folder: Path, protect: bool
    ) -> Iterator[_Side]:
        """Start it; it ends with the block."""
        place = folder / ("changed" if settings.changes else "baseline")
        address = f"{place}.socket"
        CheckSettings(address, settings.changes, settings.amounts).write(place.with_suffix(".json"))
        mode = ("--check", str(place.with_suffix(".json")))
        with contextlib.ExitStack() as ending:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            ending.callback(listener.close)
            _refuse_long_address(address)
            listener.bind(address)
            listener.listen()
            environment = {**command.environment, TUNING: "1"}
            if protect:
                view = _view(command, folder)
                ending.callback(view.end)
                environment |= view.view.environment
            launched = Launched(_words(command, mode), environment)
            ending.enter_context(launched.ended_afterwards())
            side = _Side(name, launched, listener, command.workers or 1)
            ending.callback(side.stop)
            yield side

    def meet(self, deadline_s: float) -> None:
        """Wait until every rank has connected."""
        self._listener.settimeout(POLL_S)
        while len(self._lines) < self._ranks:
            try:
                end, _ = self._listener.accept()
            except TimeoutError:
                self._check_runs(deadline_s)
                continue
            self._lines.append(ControlLine(end))
        for line in self._lines:
            self._receive(line, deadline_s)  # its rank

    def turn(self, steps: int, deadline_s: float) -> list[float]:
        """Let all ranks make `steps` steps; the times of the slowest rank in each."""
        for line in self._lines:
            with contextlib.suppress(ControlClosed):  # its last line states the reason
                line.send(json.dumps({"steps": steps}))
        answers = [self._receive(line, deadline_s) for line in self._lines]
        for answer in answers:
            self.notes += [note for note in answer["notes"] if note not in self.notes]
        return [max(times_s) for times_s in zip(*(one["step_s"] for one in answers), strict=True)]

    def stop(self) -> None:
        for line in self._lines:
            with contextlib.suppress(ControlClosed):
                line.send(json.dumps({"stop": True}))
        self._launched.wait(time.monotonic() + 10.0, lambda: False)
        for line in self._lines:
            line.close()

    def _receive(self, line: ControlLine, deadline_s: float) -> dict[str, Any]:
        while True:
            try:
                text = line.receive(POLL_S)
            except ControlClosed:
                raise LaunchError(self._ended("ended before everything was measured")) from None
            if text is not None:
                break
            self._check_runs(deadline_s)
        answer: dict[str, Any] = json.loads(text)
        if "refused" in answer:
            raise InvalidInput(str(answer["refused"]))
        if "ended" in answer:
            raise LaunchError(
                f"the script must train until everything is measured, but {self.name} ended after "
                f"{answer['ended']} steps; let it train longer, or ask for fewer pairs of turns"
            )
        return answer

    def _check_runs(self, deadline_s: float) -> None:
        if time.monotonic() > deadline_s:
            raise OutOfTime(self._ended("was not measured within the time limit (--timeout)"))
        if self._launched.wait(time.monotonic(), lambda: False) is not None:
            raise LaunchError(self._ended("ended before everything was measured"))

    def _ended(self, what: str) -> str:
        return f"the script ({self.name}) {what}; {self._launched.last_output()}"


def _refuse_long_address(address: str) -> None:
    if len(os.fsencode(address)) > LONGEST_ADDRESS:
        raise InvalidInput(
            f"a socket's path may have {LONGEST_ADDRESS} bytes, but TMPDIR makes it {address}; "
            "set TMPDIR to a shorter folder, such as /tmp"
        )


def _words(command: ScriptCommand, mode: tuple[str, ...]) -> list[str]:
    if command.workers is None:
        return [sys.executable, *launcher_words(), *mode, "--", *command.as_python_words()]
    return with_launcher(at_any_port(command), command.workers, mode)


def _view(command: ScriptCommand, kept: Path) -> HeldView:
    """A view of the working folder and the script's. Raises `LaunchError` with the fix."""
    folders = {Path.cwd()}
    if not command.is_module:
        folders.add(Path(command.target).resolve().parent)
    try:
        return HeldView(Protected.of(folders, [kept]))
    except LaunchError as error:
        raise LaunchError(
            f"the script must not change your files, but this machine gives it no copy-on-write "
            f"view ({error}); add --writes-are-fine if it may change them",
            anchor="no-view",
        ) from error


def check_all(
    command: ScriptCommand, answers: Sequence[Answer], plan: CheckPlan, progress: Progress
) -> tuple[tuple[MeasuredChange, ...], tuple[tuple[str, str], ...]]:
    """Check each answer in turn; the measured ones, and (name, reason) of the others."""
    measured: list[MeasuredChange] = []
    refusals: list[tuple[str, str]] = []
    for answer in answers:
        try:
            measured.append(check(command, answer, plan, progress))
        except (InvalidInput, LaunchError) as refusal:
            refusals.append((answer.asked.text, str(refusal)))
    return tuple(measured), tuple(refusals)


def progress_items(answers: Sequence[Answer], plan: CheckPlan) -> int:
    """Calls of `progress` by `check_all` if everything is measured."""
    return len(answers) * (2 + plan.pairs)


def to_check(
    answers: Sequence[Answer], names: Collection[str], workers: int | None
) -> tuple[Answer, ...]:
    """The answers of these combinations, or without any of all predicted ones that can be enacted.

    For a combination with several numbers of workers, the one of the command.
    """
    chosen: dict[str, Answer] = {}
    for one in answers:
        fits = set(one.asked.names.split("+")) <= set(ENACTABLE) and one.prediction is not None
        if (one.asked.text in names) if names else fits:
            text = one.asked.text
            if text not in chosen or one.workers == workers:
                chosen[text] = one
    if not chosen:
        raise InvalidInput(
            "no predicted what-if can be enacted on a script from outside; those that can are "
            f"{', '.join(ENACTABLE)}"
        )
    return tuple(chosen.values())
