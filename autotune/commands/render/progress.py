"""Progress of a job on stderr: a line per event, with the best step time and the time left.

Before the first trial, a line per phase, and one whenever nothing was printed for `QUIET_S`.
"""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.markup import escape

from autotune.commands.render.names import first_line, short_name
from autotune.jobs.several_hosts import hosts_text
from autotune.records import Measured, Network, Role, Stopped
from autotune.tuning.events import Event, Profiled, Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.instructions import Instruction, ProfileWorkload, Propose, RunTrial
from autotune.tuning.job import NO_LIMIT_S, JobSpec
from autotune.tuning.time_budget import closing_left_s, least_budget_s
from autotune.units import format_bytes, format_seconds

TRAINED_EVERY_S = 60.0
QUIET_S = 5.0
"""Longest silence before the first trial."""
_ROLES = {Role.CANDIDATE: "trial", Role.REFERENCE: "reference", Role.AB: "A/B"}


class ConsoleProgress:
    """An observer of the driver. A terminal also shows the current activity below the lines.

    `began_s`: when the command began, on the monotonic clock; None: now.
    """

    def __init__(self, spec: JobSpec, console: Console, began_s: float | None = None) -> None:
        self._spec, self._console = spec, console
        self._status = console.status("", spinner="dots")
        self._began_s = time.monotonic() if began_s is None else began_s
        self._phase = ""
        self._printed_s = self._began_s
        self._tried = threading.Event()
        """A candidate was tried, or the job has ended: no more lines about phases."""
        self._trained = (self._began_s, 0)
        """When the steps of a kept training were last printed, and their number."""

    def __enter__(self) -> ConsoleProgress:
        self._status.start()
        threading.Thread(target=self._break_silence, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._tried.set()
        self._status.stop()

    def _break_silence(self) -> None:
        while not self._tried.wait(QUIET_S / 5):
            if self._phase and time.monotonic() - self._printed_s >= QUIET_S:
                self.waiting(f"still {self._phase.removeprefix('still ')}")

    def waiting(self, what: str) -> None:
        """Print the phase that begins, with the time since the command began."""
        self._phase = what
        self._status.update(what)
        if not self._tried.is_set():
            now = _clock(time.monotonic() - self._began_s)
            self._print(f"[dim]{now} {escape(what)}[/dim]")

    def started(self, instruction: Instruction, history: History) -> None:
        """Show the current activity."""
        if isinstance(instruction, ProfileWorkload):
            return  # the world says what it waits for
        if isinstance(instruction, Propose):
            what = f"round {instruction.round}: sampling, training the simulators, ranking"
        elif isinstance(instruction, RunTrial):
            what = (
                f"trial {instruction.request.number}: {short_name(instruction.request.strategy_id)}"
            )
        else:
            what = "closing"
        if not self._tried.is_set() and not history.candidates:
            self.waiting(what)
        self._status.update(f"{what}  [dim]{self._time_left(history)}[/dim]")

    def recorded(self, event: Event, history: History) -> None:
        """Print the event."""
        if history.candidates:
            self._tried.set()
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
        if self._spec.conditions.network is Network.HOSTS:
            self._print(f"  hosts: {escape(hosts_text(event.cluster))}")
        for text in filter(None, (event.limits, event.op_fusion_report)):
            self._print(f"  {escape(text)}")
        for fit in event.cluster.fits:
            if fit.group_size == self._spec.workers and not fit.loaded and fit.beta_s_per_byte > 0:
                pieces = f" in {len(fit.bends) + 1} pieces" if fit.bends else ""
                self._print(
                    f"  {fit.primitive} on {fit.group_size} ranks: {format_seconds(fit.alpha_s)} + "
                    f"{format_bytes(1 / fit.beta_s_per_byte)}/s{pieces} "
                    f"(fit error {fit.relative_error:.0%}, spread {fit.spread:.0%})"
                )

    def _print(self, text: str) -> None:
        self._printed_s = time.monotonic()
        self._console.print(text, highlight=False, soft_wrap=True)

    def _line(self, history: History, text: str) -> None:
        self._print(f"[dim]{self._time_left(history)}[/dim] {text}")

    def _time_left(self, history: History) -> str:
        """Elapsed time, and the remaining time of the budget that ends first, if it is known."""
        left_s = self._left_s(history)
        eta = "" if left_s is None else f" (ETA {_clock(left_s)})"
        return f"{_clock(history.elapsed_s)}{eta}"

    def _left_s(self, history: History) -> float | None:
        if history.ab_trials:
            return closing_left_s(self._spec, history)
        elapsed_s, estimates_s = history.elapsed_s, []
        if self._spec.max_seconds < NO_LIMIT_S:
            estimates_s.append(max(0.0, self._spec.max_seconds - elapsed_s))
        done = len(history.candidates) - len(history.refused)
        if done >= 3:
            closing = 2 * self._spec.ab_pairs + self._spec.finalists
            per_trial_s = elapsed_s / len(history.trials)
            estimates_s.append(per_trial_s * (max(0, self._spec.max_trials - done) + closing))
        if not estimates_s:
            return None
        # The closing comparison follows, even if the time is over.
        closing_s = least_budget_s(self._spec, history) - elapsed_s if history.candidates else 0.0
        return max(closing_s, min(estimates_s))


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


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:d}:{int(seconds) % 60:02d}"
