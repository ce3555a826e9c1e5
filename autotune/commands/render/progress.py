"""What a user sees while a job runs: one line per event, on stderr, with the best so far and the time left."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape

from autotune.records import CURRENT_SETUP, Measured, Role, Stopped
from autotune.tuning.events import Event, Profiled, Proposed
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.tuning.tuner import Instruction, ProfileWorkload, Propose, RunTrial
from autotune.units import format_bytes, format_seconds


class ConsoleProgress:
    """An observer of the driver. On a terminal the current activity stands below the lines."""

    def __init__(self, spec: JobSpec, console: Console) -> None:
        self._spec, self._console = spec, console
        self._status = console.status("starting the workers", spinner="dots")
        self._began_s = time.monotonic()

    def __enter__(self) -> ConsoleProgress:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def waiting(self, what: str) -> None:
        """Show what is being waited for before the first instruction."""
        self._status.update(what)

    def started(self, instruction: Instruction, history: History) -> None:
        """Show what is being waited for."""
        if isinstance(instruction, ProfileWorkload):
            what = "starting the script, profiling one replica, probing the links (under a minute)"
        elif isinstance(instruction, Propose):
            what = f"round {instruction.round}: sampling, training the simulators, ranking"
        elif isinstance(instruction, RunTrial):
            what = f"trial {instruction.request.number}: {_name(instruction.request.strategy_id)}"
        else:
            what = "closing"
        self._status.update(f"{what}  [dim]{self._time_left(history)}[/dim]")

    def recorded(self, event: Event, history: History) -> None:
        """Print what was learned."""
        if isinstance(event, Profiled):
            self._profiled(event)
        elif isinstance(event, Proposed):
            self._line(
                history,
                f"round {event.round}: {len(event.proposals)} of {event.considered} strategies; {escape(event.reason)}",
            )
        else:
            request, outcome = event.request, event.outcome
            label = {Role.CANDIDATE: "trial", Role.REFERENCE: "reference", Role.AB: "A/B"}[
                request.role
            ]
            if not isinstance(outcome, Measured):
                text = f"[red]failed ({outcome.kind})[/red] {escape(first_line(outcome.message))}"
            else:
                predicted = (
                    f", predicted {format_seconds(request.predicted_s)}"
                    if request.predicted_s
                    else ""
                )
                told = (
                    event.interval is not None and request.role is not Role.AB
                )  # a block counts beside its partner, not by itself
                error = f" ± {event.interval.half_width:.1%}" if told and event.interval else ""
                stopped = (
                    f" ({outcome.stopped.value})"
                    if outcome.stopped in (Stopped.LOSING, Stopped.ENDED)
                    else ""
                )
                disturbed = ", disturbed" if event.unsteady else ""
                text = f"{format_seconds(outcome.median_s)}{error}{stopped}{disturbed}{predicted}"
            self._line(
                history,
                f"{label} {request.number} {_name(request.strategy_id)}: {text}{_best(history)}",
            )

    def _profiled(self, event: Profiled) -> None:
        workload = event.workload
        self._console.print(
            f"profiled: {len(workload.variables)} variables, {format_bytes(workload.grad_bytes)} of gradients; "
            f"forward {format_seconds(workload.forward_s)}, backward {format_seconds(workload.backward_s)}, "
            f"rest {format_seconds(workload.update_s)}",
            highlight=False,
            soft_wrap=True,
        )
        if event.limits:
            self._console.print(f"  {escape(event.limits)}", highlight=False, soft_wrap=True)
        for fit in event.cluster.fits:
            if fit.group_size == self._spec.workers and not fit.loaded and fit.beta_s_per_byte > 0:
                pieces = f" in {len(fit.bends) + 1} pieces" if fit.bends else ""
                self._console.print(
                    f"  {fit.primitive} on {fit.group_size} ranks: {format_seconds(fit.alpha_s)} + "
                    f"{format_bytes(1 / fit.beta_s_per_byte)}/s{pieces} (fit error {fit.relative_error:.0%}, spread {fit.spread:.0%})",
                    highlight=False,
                    soft_wrap=True,
                )

    def _line(self, history: History, text: str) -> None:
        self._console.print(
            f"[dim]{self._time_left(history)}[/dim] {text}", highlight=False, soft_wrap=True
        )

    def _time_left(self, history: History) -> str:
        """Elapsed, and an estimate from whichever budget ends first."""
        elapsed = history.elapsed_s
        left = max(0.0, self._spec.max_seconds - elapsed)
        done = len(history.candidates) - len(history.refused)
        if done >= 3:
            closing = 2 * self._spec.ab_pairs + self._spec.finalists
            per_trial_s = elapsed / len(history.trials)
            open_trials = max(0, self._spec.max_trials - done) + closing - len(history.ab_trials)
            left = min(left, per_trial_s * open_trials)
        return f"{_clock(elapsed)} (ETA {_clock(left)})"


def _best(history: History) -> str:
    ranking = history.ranking()
    if not ranking or history.reference_s is None:
        return ""
    return f"; best {format_seconds(ranking[0][1])}, {history.reference_s / ranking[0][1]:.2f}x the current setup"


def _name(strategy_id: str) -> str:
    return (
        "current setup"
        if strategy_id == CURRENT_SETUP
        else strategy_id.removeprefix("strategy-")[:8]
    )


def first_line(text: str, characters: int = 160) -> str:
    """The beginning of a message that may be long, or empty."""
    return text.partition("\n")[0][:characters]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:d}:{int(seconds) % 60:02d}"
