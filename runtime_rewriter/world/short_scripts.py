"""Refusals of a script that ends before it makes a step, or carries out an instruction."""

from __future__ import annotations

from autotune.errors import LaunchError
from runtime_rewriter.failures import NO_STEP_FIX
from runtime_rewriter.protocol import (
    EMULATION_STEPS,
    PROFILE_WARMUP_STEPS,
    RankInstruction,
    StartEmulation,
    StartProfile,
    StartTrial,
)
from runtime_rewriter.world.answers import ScriptEnded, Silence, named_ranks

DDP = "DistributedDataParallel"
SURROUNDING_STEPS = 2
"""The first step, after which instructions are taken, and the one that ends the last step."""
_LONGER = "let it train longer (more epochs or steps)"


def too_short(ended: ScriptEnded, instruction: RankInstruction) -> str:
    """The message for a script that ended although `instruction` was its first one."""
    needs, fix = _needs(instruction)
    if ended.model > 1:
        return (
            f"the script trains its DDP model {ended.model} after {ended.steps + 1} steps of its "
            f"first one, the only one that is tuned, but {needs}; let the script train its first "
            "model for longer, or tune a script that wraps only the model to tune"
        )
    return f"the script ends after {ended.steps + 1} steps, but {needs}; {fix}"


def no_first_step(
    end: ScriptEnded | Silence, ranks: int, limit_s: float, output: str
) -> LaunchError:
    """The refusal of a script of which a rank made no step: it ended, or the time is up.

    `output`: the end of the message.
    """
    if isinstance(end, Silence) and len(end.ranks) < ranks:
        return LaunchError(
            f"{named_ranks(end.ranks)} made no training step within {limit_s:.0f} s, but the other "
            f"ranks did; let all begin at about the same time, or raise --start-timeout{output}"
        )
    if isinstance(end, Silence):
        problem = (
            f"the script made no training step under {DDP} within {limit_s:.0f} s; {NO_STEP_FIX}; "
            "of several such models the first one must train; or raise --start-timeout"
        )
    elif end.model > 1:
        problem = (
            f"the script trains its DDP model {end.model}, but has made no step of its first one, "
            "the only one that is tuned; wrap the model to tune before the others"
        )
    else:
        problem = f"the script ended without a training step under {DDP}; {NO_STEP_FIX}"
    return LaunchError(f"{problem}{output}", anchor="no-ddp")


def _needs(instruction: RankInstruction) -> tuple[str, str]:
    """The steps that the instruction needs at least, and the fix."""
    if isinstance(instruction, StartTrial):
        steps = instruction.warmup_steps + instruction.timed_steps
        fix = f"{_LONGER} or lower --warmup-steps and --timed-steps"
        return f"one trial needs at least {SURROUNDING_STEPS + steps}", fix
    if isinstance(instruction, StartProfile):
        steps = PROFILE_WARMUP_STEPS + instruction.steps if instruction.steps else 1
        return f"the profile needs at least {SURROUNDING_STEPS + steps}", _LONGER
    if isinstance(instruction, StartEmulation):
        steps = SURROUNDING_STEPS + EMULATION_STEPS
        return f"emulated accelerators need at least {steps}", _LONGER
    return f"the job needs more than {SURROUNDING_STEPS}", _LONGER
