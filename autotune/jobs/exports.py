"""The export of a job: the decided strategy, or a measured one that the user names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from autotune.errors import InvalidInput
from autotune.export import Export, Timing
from autotune.files import is_file, open_regular, write_whole
from autotune.parsing import read_json
from autotune.records import CURRENT_SETUP, Decision, Failed, Measured, Role
from autotune.storage.store import Store
from autotune.strategy_space.horovod_groups import horovod_groups
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.workload import Library

OUR_FIRST_LINE_ENDS = b"Written by `autotune export`."
"""The end of the first line of `HorovodGroups.script`."""
MAX_LINE_BYTES = 1000


def job_export(store: Store, job_id: str, decision: Decision) -> Export:
    """Build the export of a profiled job from the store; a second call gives the same."""
    spec, history = store.job(job_id), store.history(job_id)
    return build_export(job_id, spec, history, decision, store.created_at(job_id))


@dataclass(frozen=True)
class HorovodCode:
    """The file next to an export with its strategy as code for Horovod.

    `written`: its path. `removed`: its path if it held the code of an earlier export, and this one
    has none.
    """

    written: Path | None = None
    removed: Path | None = None


def write_export(export: Export, path: Path) -> HorovodCode:
    """Write the export, and next to it the same strategy as code for Horovod, if it can be.

    Raises `InvalidInput`, and writes nothing, if one of them would replace a file of the user.
    """
    if is_file(path) and not _is_export(path):
        raise InvalidInput(
            f"{path} must be absent or an earlier export, but is another file; move it, or choose "
            "another name for the export"
        )
    script = path.with_name(f"{path.stem}_horovod.py")
    ours = is_file(script) and _is_our_code(script)
    plan = export.plan() if export.library is Library.HOROVOD else None
    groups = horovod_groups(plan, export.variables) if plan is not None else None
    if groups is None:
        export.write(path)
        if not ours:
            return HorovodCode()
        script.unlink()
        return HorovodCode(removed=script)
    if is_file(script) and not ours:
        raise InvalidInput(
            f"{script} must be absent or code that `autotune export` wrote, but is another file; "
            "move it, or choose another name for the export"
        )
    assert export.strategy is not None
    export.write(path)
    write_whole(script, groups.script(export.model, export.strategy.id), "the code for Horovod")
    return HorovodCode(written=script)


def _is_export(path: Path) -> bool:
    """Whether a file has the keys of an export, of whatever version and job."""
    try:
        data = read_json(path)
    except InvalidInput:
        return False
    return isinstance(data, dict) and {"job_id", "content"} <= data.keys()


def _is_our_code(script: Path) -> bool:
    with open_regular(script) as file:
        return file.readline(MAX_LINE_BYTES).rstrip().endswith(OUR_FIRST_LINE_ENDS)


def build_export(
    job_id: str, spec: JobSpec, history: History, decision: Decision, created_at: datetime
) -> Export:
    """Build the export of a profiled job. `created_at` must be in UTC."""
    assert history.profiled is not None
    workload = history.profiled.workload
    planned = history.planned(decision.strategy_id)
    strategy = planned.strategy if planned else None
    best = decision.best_candidate_id
    best_proposal = history.proposals.get(best) if best else None
    return Export(
        job_id=job_id,
        created_at=created_at.isoformat(timespec="seconds"),
        model=workload.model,
        # older versions do not know `rows_only`
        variables=tuple(
            replace(variable, ready_s=None, rows_only=False) for variable in workload.variables
        ),
        world_size=spec.workers,
        strategy=strategy,
        plan_id=planned.plan.id if planned else None,
        lossy=strategy is not None and not strategy.lossless,
        reason=decision.reason,
        comparison=decision.comparison,
        tuned=_timing(history, best, Role.CANDIDATE) if best else None,
        current=_timing(history, CURRENT_SETUP, Role.REFERENCE),
        predicted_s=best_proposal.predicted_s if best_proposal else None,
        cluster=history.profiled.cluster,
        software=dict(history.profiled.software),
        conditions=history.conditions(spec.conditions),
        library=workload.library,
        reads_norms=workload.reads_norms,
    )


def _timing(history: History, strategy_id: str, search_role: Role) -> Timing | None:
    """Step times in the closing comparison, or in the search if it was not compared."""
    blocks: dict[Role, list[np.ndarray]] = {Role.AB: [], search_role: []}
    for trial in history.trials:
        outcome, role = trial.outcome, trial.request.role
        if trial.request.strategy_id == strategy_id and isinstance(outcome, Measured):
            blocks.setdefault(role, []).append(outcome.slowest_s)
    steps_s = blocks[Role.AB] or blocks[search_role]
    if not steps_s:
        return None
    low, median, high = np.quantile(np.concatenate(steps_s), [0.25, 0.5, 0.75])
    return Timing(float(median), float(low), float(high), len(steps_s))


def chosen_decision(store: Store, job_id: str, wanted: str | None) -> Decision:
    """Return the job's decision, or one for the measured strategy whose id begins with `wanted`.

    Raises `InvalidInput` if there is none or more than one, or if it failed in a trial.
    """
    history, decision = store.history(job_id), store.decision(job_id)
    if store.job_status(job_id) == "aborted":
        raise InvalidInput(
            f"job {job_id!r} has nothing to export, since its current setup failed; "
            f"see its trials in `autotune show {job_id}`, repair the script and start a new job"
        )
    resume = f"resume it with `autotune tune --resume {job_id}`"
    if history.profiled is None:
        raise InvalidInput(
            f"job {job_id!r} has no profile yet, so nothing can be exported; {resume}"
        )
    if wanted is None:
        if decision is None:
            raise InvalidInput(
                f"job {job_id!r} has no decision; {resume}, or name a measured strategy with "
                "--strategy"
            )
        return decision
    strategy_id = _measured_id(history, wanted)
    if decision is not None and decision.strategy_id == strategy_id:
        return decision
    if decision is not None and decision.best_candidate_id == strategy_id:
        reason = (
            "chosen by hand, although it was not proven faster than the current setup: "
            f"{decision.reason}"
        )
        return Decision(strategy_id, reason, decision.comparison, strategy_id)
    reason = "chosen by hand; it was not compared with the current setup in an A/B"
    candidate_id = None if strategy_id == CURRENT_SETUP else strategy_id
    return Decision(strategy_id, reason, None, candidate_id)


def _measured_id(history: History, wanted: str) -> str:
    if wanted == CURRENT_SETUP:
        return wanted
    matching = [
        key
        for key in history.measured_s
        if key.startswith(wanted) or key.removeprefix("strategy-").startswith(wanted)
    ]
    fastest = ", ".join(key for key, _ in history.ranking()[:3]) or "none"
    if len(matching) != 1:
        raise InvalidInput(
            f"--strategy needs one measured strategy, but {wanted!r} fits {len(matching)}; "
            f"the fastest are {fastest}"
        )
    failed = history.failed.get(matching[0])
    if failed is not None:
        assert isinstance(failed.outcome, Failed)
        raise InvalidInput(
            f"--strategy needs a strategy without a failed trial, but {matching[0]} failed in "
            f"trial {failed.request.number} ({failed.outcome.kind}: {failed.outcome.message}); "
            f"the fastest are {fastest}"
        )
    return matching[0]
