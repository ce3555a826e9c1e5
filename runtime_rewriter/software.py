"""The versions that a measurement depends on."""

from __future__ import annotations

import platform

import torch


def software_versions() -> dict[str, str]:
    """What a measurement depends on besides the model and the cluster."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
    }
    if torch.cuda.is_available():
        versions |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
    return versions
