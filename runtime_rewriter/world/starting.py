"""The words that start a rank with our packages and nothing else of ours on its path."""

from __future__ import annotations

import os
import site
from pathlib import Path

import autotune
import runtime_rewriter


def launcher_words() -> tuple[str, str]:
    """The words after `python` that start `rank.launch`: a file, and the directories of our
    packages, installed or sent here."""
    packages = [Path(str(one.__file__)).resolve().parent for one in (autotune, runtime_rewriter)]
    roots = dict.fromkeys(str(package.parent) for package in packages)
    site_packages = (*site.getsitepackages(), site.getusersitepackages())
    installed = {str(Path(path).resolve()) for path in site_packages}
    return (
        str(packages[1] / "rank" / "start.py"),
        os.pathsep.join(root for root in roots if root not in installed),
    )
