"""What to type if Lightning's `Trainer` asks for other ranks than the job has."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


def lightning_hint(error: BaseException, environment: Mapping[str, str]) -> str:
    """The arguments that fit this job, if Lightning refused its own; else empty.

    It compares `devices` times `num_nodes` with the number of ranks, and `devices` with the GPUs of
    the host. `environment`: torchrun's variables.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return ""
    raising = frames[-1][0]
    if str(raising.f_globals.get("__name__", "")).partition(".")[0] not in PACKAGES:
        return ""
    if raising.f_code.co_name != "validate_settings" and "You requested gpu" not in str(error):
        return ""
    devices, hosts = (environment.get(n, "1") for n in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    return (
        "; `devices` is the number of ranks per host: for this job's "
        f"{environment.get('WORLD_SIZE', '1')} ranks write "
        f"Trainer(devices={devices}, num_nodes={hosts})"
    )
