"""The answers of `autotune what-if` as text and as data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autotune.commands.render.tables import plain_table
from autotune.units import format_bytes, format_ratio, format_seconds
from autotune.whatif.answers.answered import Answered, MeasuredChange
from autotune.whatif.answers.answers import Answer
from autotune.whatif.answers.curves import Curve
from autotune.whatif.answers.limits import Limits
from autotune.whatif.memory import MemoryOutcome

SHOWN_PARTS = 3
COLUMNS = (
    "what-if",
    "workers",
    "step",
    "speed-up",
    "interval",
    "samples",
    "host/device/both/comm/idle",
    "critical path",
)


def answered_text(found: Answered) -> str:
    """The base, a row per prediction, the lines that enact them, and the reasons without one."""
    lines = [*_base_lines(found), ""]
    predicted = found.predicted
    if predicted:
        rows = [_row(one) for one in predicted]
        keep = [k for k, _ in enumerate(COLUMNS) if any(row[k] for row in rows)]
        table = plain_table([COLUMNS[k] for k in keep], [[row[k] for k in keep] for row in rows])
        lines += [table.rstrip("\n"), "", *_enacting(predicted), *_memory(predicted)]
        lines += _sources(predicted)
    lines += _refused(found)
    lines += _slow_rank(found)
    lines += _checked(found)
    return "\n".join(lines).rstrip()


def _base_lines(found: Answered) -> list[str]:
    base, limits = found.base, found.before_limits
    error = found.recorded_s / base.measured_s - 1 if base.measured_s > 0 else 0.0
    line = (
        f"rank {found.rank}: a step takes {format_seconds(base.measured_s)}, replayed "
        f"{format_seconds(found.recorded_s)} ({100 * error:+.2f} %)"
    )
    if base.unknown_s:
        line += f"; {format_seconds(found.least_s)} without waits of unknown cause"
    times = f"now: {shares_text(limits)} (host/device/both/comm/idle); {path_text(limits)}"
    return [line, times, *found.notes]


def shares_text(limits: Limits) -> str:
    """Shares of the step in percent: host only, device only, both, communication only, idle."""
    parts = (
        limits.host_only_s,
        limits.device_only_s,
        limits.both_s,
        limits.communication_only_s,
        limits.idle_s,
    )
    return "/".join(f"{100 * part / limits.step_s:.0f}" for part in parts) + " %"


def path_text(limits: Limits) -> str:
    """The largest parts of the critical path."""
    parts = list(limits.path_s.items())[:SHOWN_PARTS]
    return ", ".join(f"{name} {100 * part_s / limits.step_s:.0f} %" for name, part_s in parts)


def _row(one: Answer) -> tuple[str, ...]:
    prediction, limits = one.prediction, one.limits
    assert prediction is not None and limits is not None
    return (
        one.asked.text,
        "" if one.workers is None else str(one.workers),
        format_seconds(prediction.after_s),
        format_ratio(prediction.speedup),
        f"{format_ratio(prediction.speedup_low)[:-1]}-{format_ratio(prediction.speedup_high)}",
        "" if one.samples_ratio is None else format_ratio(one.samples_ratio),
        shares_text(limits),
        path_text(limits),
    )


def _enacting(predicted: tuple[Answer, ...]) -> list[str]:
    """Each what-if of the rows once, with the line of code that enacts it."""
    lines = {one.name: one.enact for answer in predicted for one in answer.what_ifs}
    width = max(map(len, lines))
    return ["enacted by:"] + [f"  {name.ljust(width)}  {line}" for name, line in lines.items()]


def _sources(predicted: tuple[Answer, ...]) -> list[str]:
    """The notes of all rows, each once: amounts that were assumed or measured elsewhere."""
    notes = (one.prediction.base.notes for one in predicted if one.prediction is not None)
    listed = dict.fromkeys(note for of_row in notes for note in of_row)
    return ["", "taken from elsewhere:", *(f"  {note}" for note in listed)] if listed else []


def _memory(predicted: tuple[Answer, ...]) -> list[str]:
    """The peak memory of what-ifs that are about it, or why it is unknown."""
    lines = []
    for one in predicted:
        assert one.prediction is not None
        memory, reason = one.prediction.memory, one.prediction.memory_reason
        if memory is not None:
            lines.append(f"  {one.asked.text}: {memory_text(memory)}")
        elif reason:
            lines.append(f"  {one.asked.text}: {reason}")
    return ["", "memory of a replica:", *lines] if lines else []


def memory_text(memory: MemoryOutcome) -> str:
    """Peaks, and the largest batch if the device is known."""
    text = f"peak {format_bytes(memory.before_bytes)} -> {format_bytes(memory.after_bytes)}"
    if memory.largest_batch_before is not None and memory.largest_batch_after is not None:
        return (
            f"{text}; largest batch {memory.largest_batch_before} -> {memory.largest_batch_after}"
        )
    if memory.batch_times_before is not None and memory.batch_times_after is not None:
        times = f"{memory.batch_times_before:.2f} -> {memory.batch_times_after:.2f}"
        return f"{text}; largest batch {times} times the recorded one"
    return text


def _refused(found: Answered) -> list[str]:
    rows = list(dict.fromkeys((_named(one), one.reason) for one in found.refused))
    return ["", "do not apply:", *(f"  {name}: {reason}" for name, reason in rows)] if rows else []


def _named(one: Answer) -> str:
    return one.asked.text if one.workers is None else f"{one.asked.text} on {one.workers} workers"


def _slow_rank(found: Answered) -> list[str]:
    slow = found.slow
    if slow is None:
        return []
    share = next(one for one in slow.ranks if one.rank == slow.slowest)
    others = ", ".join(
        f"rank {one.rank} {format_seconds(one.alone_s)}"
        for one in sorted(slow.ranks, key=lambda one: -one.alone_s)[:8]
    )
    cost = 100 * slow.cost_s / slow.together_s if slow.together_s else 0.0
    return [
        "",
        f"slowest: rank {slow.slowest}, {format_seconds(share.alone_s)} without communication, "
        f"the others {format_seconds(slow.others_s)} (median)",
        f"it costs every rank {format_seconds(slow.cost_s)} a step ({cost:.1f} %): "
        f"{format_seconds(slow.together_s)} replayed, {format_seconds(slow.without_s)} if it were "
        "like the others",
        f"without communication: {others}",
    ]


def _checked(found: Answered) -> list[str]:
    rows = [
        (
            one.name,
            _ratio(one.predicted, one.predicted_low, one.predicted_high),
            _ratio(one.measured, one.measured_low, one.measured_high),
            "" if one.error is None else f"{100 * one.error:+.1f} %",
            f"{format_seconds(one.baseline_s)} -> {format_seconds(one.changed_s)}",
            f"{one.pairs} pairs of {one.steps_per_turn} steps",
        )
        for one in found.checked
    ]
    columns = ("checked", "predicted", "measured", "error of step time", "median step", "turns")
    lines = ["", plain_table(columns, rows).rstrip("\n")] if rows else []
    lines += [f"  {one.name}: {note}" for one in found.checked for note in one.notes]
    lines += [f"{name}: not checked: {reason}" for name, reason in found.refusals]
    return lines


def _ratio(middle: float | None, low: float | None, high: float | None) -> str:
    if middle is None:
        return "none"
    return f"{middle:.3f}x" + (f" ({low:.3f}-{high:.3f})" if low is not None else "")


def answered_data(found: Answered) -> dict[str, Any]:
    slow = found.slow
    return {
        "rank": found.rank,
        "measured_step_s": found.base.measured_s,
        "replayed_step_s": found.recorded_s,
        "step_s": found.before_limits.step_s,
        "least_step_s": found.least_s,
        "unexplained_s": found.base.unknown_s,
        "limits": limits_data(found.before_limits),
        "what_ifs": [_answer_data(one) for one in (*found.predicted, *found.refused)],
        "slow_rank": None
        if slow is None
        else {
            "rank": slow.slowest,
            "cost_s": slow.cost_s,
            "together_s": slow.together_s,
            "without_s": slow.without_s,
            "others_s": slow.others_s,
            "ranks": [
                {"rank": one.rank, "alone_s": one.alone_s, "measured_s": one.measured_s}
                for one in slow.ranks
            ],
        },
        "over_workers": [_curve_data(curve) for curve in found.over_workers],
        "over_bandwidth": [_curve_data(curve) for curve in found.over_bandwidth],
        "checked": [_checked_data(one) for one in found.checked],
        "not_checked": dict(found.refusals),
        "notes": list(found.notes),
    }


def limits_data(limits: Limits) -> dict[str, Any]:
    return {
        "step_s": limits.step_s,
        "host_only_s": limits.host_only_s,
        "device_only_s": limits.device_only_s,
        "both_s": limits.both_s,
        "communication_only_s": limits.communication_only_s,
        "idle_s": limits.idle_s,
        "exposed_communication_s": limits.exposed_communication_s,
        "critical_path_s": limits.path_s,
    }


def _answer_data(one: Answer) -> dict[str, Any]:
    prediction, limits = one.prediction, one.limits
    data: dict[str, Any] = {
        "what_if": one.asked.text,
        "title": one.title,
        "sources": [what_if.source for what_if in one.what_ifs],
        "assumptions": [what_if.assumptions for what_if in one.what_ifs],
        "enact": [what_if.enact for what_if in one.what_ifs],
        "workers": one.workers,
    }
    if prediction is None or limits is None:
        return data | {"reason": one.reason}
    return data | {
        "before_s": prediction.before_s,
        "after_s": prediction.after_s,
        "speedup": prediction.speedup,
        "speedup_low": prediction.speedup_low,
        "speedup_high": prediction.speedup_high,
        "samples_ratio": one.samples_ratio,
        "limits": limits_data(limits),
        "memory": None if prediction.memory is None else asdict(prediction.memory),
        "memory_reason": prediction.memory_reason,
        "notes": list(prediction.base.notes),
    }


def _checked_data(one: MeasuredChange) -> dict[str, Any]:
    return {
        "what_if": one.name,
        "predicted_speedup": one.predicted,
        "predicted_low": one.predicted_low,
        "predicted_high": one.predicted_high,
        "measured_speedup": one.measured,
        "measured_low": one.measured_low,
        "measured_high": one.measured_high,
        "step_error": one.error,
        "baseline_s": one.baseline_s,
        "changed_s": one.changed_s,
        "pairs": one.pairs,
        "steps_per_turn": one.steps_per_turn,
        "notes": list(one.notes),
    }


def _curve_data(curve: Curve) -> dict[str, Any]:
    return {"what_if": curve.name, "points": [list(point) for point in curve.points]}
