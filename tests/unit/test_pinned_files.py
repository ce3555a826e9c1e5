"""Every requirement of a clone is pinned with the hashes of its files, and none names a host."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FILES = (
    "constraints.txt",
    "constraints-cuda.txt",
    "constraints-tensorflow.txt",
    "third_party/horovod/cmake.txt",
    "third_party/horovod/sources.txt",
)
ENTRY = re.compile(r"^(\S+)==(\S+) ((?:\\\n    --hash=sha256:[0-9a-f]{64}(?: |(?=\n)))+)\n", re.M)


def pins(name: str) -> dict[str, Version]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return {canonicalize_name(match[1]): Version(match[2]) for match in ENTRY.finditer(text)}


@pytest.mark.parametrize("name", FILES)
def test_every_line_is_a_pin_with_hashes(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    left = [line for line in ENTRY.sub("", text).splitlines() if not line.startswith("#")]
    assert left == [] and pins(name) and "://" not in text


def test_every_requirement_of_the_project_and_of_its_build_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"].values()
    listed = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    listed += [text for extra in extras for text in extra]
    pinned = {name: pin for file in FILES for name, pin in pins(file).items()}
    for requirement in map(Requirement, listed):
        if requirement.name != "autotune":
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), requirement


def test_no_name_is_pinned_twice():
    names = [name for file in FILES for name in pins(file)]
    assert len(names) == len(set(names))
