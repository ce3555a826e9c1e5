"""Progress of a job on stderr: a line per event, with the best step time and the time left."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape

from autotune.records import CURRENT_SETUP, Measured, Role, Stopped
from autotune.tuning.events import Event, Profiled, Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.tuning.tuner import (
    Instruction,
    ProfileWorkload,
    Propose,
    RunTrial,
    closing_left_s,
    least_budget_s,
)
from autotune.units import format_bytes, format_seconds

TRAINED_EVERY_S = 60.0
_ROLES = {Role.CANDIDATE: "trial", Role.REFERENCE: "reference", Role.AB: "A/B"}


class ConsoleProgress:
    """An observer of the driver. A terminal also shows the current activity below the lines."""

    def __init__(self, spec: JobSpec, console: Console) -> None:
        self._spec, self._console = spec, console
        self._status = console.status("starting the workers", spinner="dots")
        self._began_s = time.monotonic()
        self._trained = (self._began_s, 0)
        """When the steps of a kept training were last printed, and their number."""

    def __enter__(self) -> ConsoleProgress:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def waiting(self, what: str) -> None:
        """Show the current activity before the first instruction."""
        self._status.update(what)

    def started(self, instruction: Instruction, history: History) -> None:
        """Show the current activity."""
        if isinstance(instruction, ProfileWorkload):
            what = "starting the script, profiling one replica, probing the links (under a minute)"
        elif isinstance(instruction, Propose):
            what = f"round {instruction.round}: sampling, training the simulators, ranking"
        elif isinstance(instruction, RunTrial):
            what = (
                f"trial {instruction.request.number}: {short_name(instruction.request.strategy_id)}"
            )
        else:
            what = "closing"
        self._status.update(f"{what}  [dim]{self._time_left(history)}[/dim]")

    def recorded(self, event: Event, history: History) -> None:
        """Print the event."""
        if isinstance(event, Profiled):
            self._profiled(event)
        elif isinstance(event, Proposed):
            count = f"{len(event.proposals)} of {event.considered} strategies"
            self._line(history, f"round {event.round}: {count}; {escape(event.reason)}")
        else:
            request = event.request
            name = f"{_ROLES[request.role]} {request.number} {short_name(request.strategy_id)}"
            self._line(history, f"{name}: {_outcome(event)}{_best(history)}")
            if request.number == 0 and isinstance(event.outcome, Measured):
                self._warn_of_the_budget(history)

    def decided(self, text: str) -> None:
        """Print a decision, after which a kept training goes on."""
        self._print(escape(text))
        self._status.update("training")
        self._trained = (time.monotonic(), 0)

    def trained(self, steps: int) -> None:
        """Show the training's steps, and print them every `TRAINED_EVERY_S`."""
        printed_s, printed_steps = self._trained
        past_s = time.monotonic() - printed_s
        self._status.update(f"training: {steps} steps")
        if printed_steps == 0 and steps:
            self._trained = (time.monotonic(), steps)
        elif past_s >= TRAINED_EVERY_S and steps > printed_steps:
            per_step = format_seconds(past_s / (steps - printed_steps))
            self._print(f"training: {steps} steps, {per_step} per step")
            self._trained = (time.monotonic(), steps)

    def _warn_of_the_budget(self, history: History) -> None:
        needed_s = least_budget_s(self._spec, history)
        if needed_s > self._spec.max_seconds:
            self._print(
                f"[yellow]the time budget of {format_seconds(self._spec.max_seconds)} is too "
                f"small: one trial and the closing comparison need about {needed_s:.0f} s, and a "
                "search needs more; raise --budget-time[/yellow]"
            )

    def _profiled(self, event: Profiled) -> None:
        workload = event.workload
        self._print(
            f"profiled: {len(workload.variables)} variables, {format_bytes(workload.grad_bytes)} "
            f"of gradients; forward {format_seconds(workload.forward_s)}, "
            f"backward {format_seconds(workload.backward_s)}, "
            f"rest {format_seconds(workload.update_s)}"
        )
        if event.limits:
            self._print(f"  {escape(event.limits)}")
        for fit in event.cluster.fits:
            if fit.group_size == self._spec.workers and not fit.loaded and fit.beta_s_per_byte > 0:
                pieces = f" in {len(fit.bends) + 1} pieces" if fit.bends else ""
                self._print(
                    f"  {fit.primitive} on {fit.group_size} ranks: {format_seconds(fit.alpha_s)} + "
                    f"{format_bytes(1 / fit.beta_s_per_byte)}/s{pieces} "
                    f"(fit error {fit.relative_error:.0%}, spread {fit.spread:.0%})"
                )

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def _line(self, history: History, text: str) -> None:
        self._print(f"[dim]{self._time_left(history)}[/dim] {text}")

    def _time_left(self, history: History) -> str:
        """Elapsed time, and the remaining time of the budget that ends first."""
        elapsed = history.elapsed_s
        if history.ab_trials:
            left = closing_left_s(self._spec, history)
            return f"{_clock(elapsed)} (ETA {_clock(left)})"
        left = max(0.0, self._spec.max_seconds - elapsed)
        done = len(history.candidates) - len(history.refused)
        if done >= 3:
            closing = 2 * self._spec.ab_pairs + self._spec.finalists
            per_trial_s = elapsed / len(history.trials)
            open_trials = max(0, self._spec.max_trials - done) + closing - len(history.ab_trials)
            left = min(left, per_trial_s * open_trials)
        return f"{_clock(elapsed)} (ETA {_clock(left)})"


def _outcome(event: TrialFinished) -> str:
    request, outcome = event.request, event.outcome
    if not isinstance(outcome, Measured):
        return f"[red]failed ({outcome.kind})[/red] {escape(first_line(outcome.message))}"
    text = format_seconds(outcome.median_s)
    # A block counts with its partner, so its own interval is not shown.
    if event.interval is not None and request.role is not Role.AB:
        text += f" ± {event.interval.half_width:.1%}"
    if outcome.stopped in (Stopped.LOSING, Stopped.ENDED):
        text += f" ({outcome.stopped.value})"
    if event.unsteady:
        text += ", disturbed"
    if outcome.overrun is not None:
        text += f", overrun {outcome.overrun:.1%}"
    if request.predicted_s:
        text += f", predicted {format_seconds(request.predicted_s)}"
    return text


def _best(history: History) -> str:
    ranking = history.ranking()
    if not ranking or history.reference_s is None:
        return ""
    best_s = ranking[0][1]
    speedup = history.reference_s / best_s
    return f"; best {format_seconds(best_s)}, {speedup:.2f}x the current setup"


def short_name(strategy_id: str) -> str:
    """The current setup, or the beginning of a strategy's id."""
    if strategy_id == CURRENT_SETUP:
        return "current setup"
    return strategy_id.removeprefix("strategy-")[:8]


def first_line(text: str, characters: int = 160) -> str:
    """The first characters of a message, which may be empty."""
    return text.partition("\n")[0][:characters]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:d}:{int(seconds) % 60:02d}"
