"""Whether trials see the user's files, or a copy-on-write view of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.jobs.places import Where
from autotune.jobs.settings import Settings
from autotune.jobs.workspace import Workspace
from autotune.tuning.job import JobSpec
from runtime_rewriter.world.script_command import ScriptCommand
from runtime_rewriter.world.views import Protected, refusal_reason

Ask = Callable[[str], bool]
"""Puts a question to the user in a terminal; True: yes."""


def protected_folders(
    spec: JobSpec, script: ScriptCommand, workspace: Workspace, job_id: str = ""
) -> Protected | None:
    """The working folder, the script's and those that the user names; None: writes are real.

    The directory of jobs stays real.
    """
    if spec.writes_are_fine or spec.continue_training:
        return None
    folders = [Path.cwd(), *map(Path, spec.protect)]
    if not script.is_module:
        target = Path(script.target)
        folders += [target.parent, target.resolve().parent]
    return Protected.of(folders, (workspace.directory, workspace.directory / job_id))


def refuse_lost_checkpoints(spec: JobSpec, where: Where) -> None:
    """Raise `InvalidInput` if a kept training would write into copies of its folder."""
    if spec.continue_training and where.address is not None and not where.shared_directory:
        raise InvalidInput(
            "--continue keeps the training's checkpoints, but with --address the script runs in a "
            "copy of its folder on every host; add --shared-directory if the folder exists there"
        )


def with_agreed_writes(
    settings: Settings,
    workspace: Workspace,
    ask: Ask | None,
    refusal: Callable[[Protected], str] = refusal_reason,
) -> Settings:
    """Return settings under which trials cannot change files without the user's consent.

    `ask` is None without a terminal. `refusal` returns why this machine cannot make a view. Raises
    `InvalidInput` if there is neither a view nor consent.
    """
    protected = protected_folders(settings.spec, settings.script, workspace)
    reason = refusal(protected) if protected is not None else ""
    if protected is None or not reason:
        return settings
    folders = " and ".join(protected.folders)
    if ask is not None and ask(
        "Trials run your script, and here they can change your real files: checkpoints in "
        f"{folders} may be overwritten or deleted. (A copy-on-write view is not possible: "
        f"{reason}.) Run it with your real files?"
    ):
        return replace(settings, spec=replace(settings.spec, writes_are_fine=True))
    raise InvalidInput(
        f"trials must not change the files in {folders}, but this machine cannot give them a "
        f"copy-on-write view ({reason}); start in a copy of the folder with --writes-are-fine, "
        "or add it if the files may change",
        anchor="no-view",
    )
