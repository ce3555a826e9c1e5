"""Install the wheel in fresh environments outside the clone and run commands there.

    python tests/wheel.py [PYTHON...]      # default: python3.11, python3.12 and 3.13 if they run

Only the base installation, without frameworks: it is what a machine without GPUs needs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

PIN = re.compile(r"^(\S+==\S+)", re.M)
"""A pin without its hashes: with them, pip would ask for a hash of the wheel, too."""
ROOT = Path(__file__).parents[1]
RECORDINGS = {
    "recording": ROOT / "datasets/gpu_traces/h100/bert_base.fp32",
    "two_ranks": ROOT / "datasets/gpu_traces/h100/resnet50.two_ranks",
}
COMMANDS = [
    ["--help"],
    ["init"],
    ["docs", "troubleshooting#no-ddp"],
    ["strategies", "bert-base", "B7"],
    ["optimize", "bert-base", "--cluster", "B7", "--budget-time", "2s"],
    ["replay", "recording"],
    ["replay", "two_ranks"],
    ["what-if", "two_ranks", "--only", "amp,faster_network"],
]
NEWER = ("python3.12", "python3.13")


def run(*words: object, folder: Path) -> str:
    """Run a command in `folder`, without this environment's Python settings; return its output."""
    settings = {name: value for name, value in os.environ.items() if "PYTHON" not in name}
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, env=settings, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


def runs(python: str) -> bool:
    """Check for an interpreter; the command may be a stub of a version manager."""
    return (
        bool(shutil.which(python))
        and not subprocess.run([python, "--version"], capture_output=True).returncode
    )


def built_wheel(folder: Path) -> Path:
    """Build the wheel from the tracked files alone; files of an earlier build must not help."""
    source = folder / "source"
    for name in run("git", "ls-files", folder=ROOT).splitlines():
        if name.startswith(("autotune/", "runtime_rewriter/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    run("python3.11", "-m", "pip", "wheel", "--no-deps", "-q", "-w", folder, source, folder=folder)
    return next(folder.glob("*.whl"))


def check(python: str, wheel: Path, folder: Path) -> None:
    """Install the wheel for one Python, and run every command outside the clone."""
    folder.mkdir()
    environment = folder / "environment"
    run(python, "-m", "venv", "--without-pip", environment, folder=folder)
    pip = (python, "-m", "pip", "--python", environment / "bin/python")
    pins = folder / "pins.txt"
    pins.write_text("\n".join(PIN.findall((ROOT / "constraints.txt").read_text())))
    run(*pip, "install", "-q", "--no-compile", "-c", pins, wheel, folder=folder)
    for name, recording in RECORDINGS.items():
        shutil.copytree(recording, folder / name)
    for words in COMMANDS:
        output = run(environment / "bin/autotune", *words, folder=folder)
        assert output.strip(), f"`autotune {' '.join(words)}` printed nothing"
    print(f"{python}: {wheel.name} works")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    available = ["python3.11", *(name for name in NEWER if runs(name))]
    pythons = parser.parse_args().pythons or available
    with tempfile.TemporaryDirectory() as temporary:
        wheel = built_wheel(Path(temporary))
        for number, python in enumerate(pythons):
            check(python, wheel, Path(temporary) / str(number))


if __name__ == "__main__":
    main()
