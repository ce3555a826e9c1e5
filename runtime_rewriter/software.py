"""Versions of the software that a measurement depends on."""

from __future__ import annotations

import platform

import torch


def software_versions() -> dict[str, str]:
    """Versions of Python, torch, the platform and CUDA."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
    }
    if torch.cuda.is_available():
        versions |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
    return versions
