"""Build Horovod for the PyTorch and TensorFlow of this environment, and install it there.

    .venv/bin/python third_party/horovod/build.py      # what `make horovod` runs

A wheel fits one compiler, one Python and one version of each framework, so that none can be
downloaded. It is built once for each such combination and kept in the user's cache, outside the
clone: `$XDG_CACHE_HOME/autotune/horovod/<key>/`, with `~/.cache` by default. The key is a hash of
everything that decides the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

HERE = Path(__file__).resolve().parent
SETTINGS = {
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_TENSORFLOW": "1",
}
FLAGS = ("CPPFLAGS", "CXXFLAGS", "CFLAGS", "LDFLAGS")
"""Variables that CMake reads."""
FRAMEWORKS = ("torch", "tensorflow-cpu")
DEADLINE_S = 1800.0
"""Ten times what the build took on two cores: 167 s."""
PROBE = "#include <Python.h>\n#include <optional>\nstd::optional<int> none;\n"
"""What the smallest file of Horovod needs: C++17, its library, and Python's headers."""


class CannotBuild(SystemExit):
    """The message goes to standard error, and the exit status is 1."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the build gives."""

    files: Mapping[str, str]
    settings: Mapping[str, str]
    versions: Mapping[str, str]

    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def recipe(compiler: Path) -> Recipe:
    names = ("sources.txt", "cmake.txt", "compiler")
    return Recipe(
        {name: (HERE / name).read_text(encoding="utf-8") for name in names},
        SETTINGS | {name: os.environ.get(name, "") for name in FLAGS},
        {
            "compiler": compiler_version(compiler),
            "processor": " ".join([platform.machine(), *instruction_sets()]),
            "python": sys.version,
            **{name: framework_version(name) for name in FRAMEWORKS},
        },
    )


def instruction_sets() -> list[str]:
    """Return those that Horovod's build looks for on this machine, and uses."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return sorted({"avx", "f16c", "fma"}.intersection(cpu))


def framework_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        raise CannotBuild(
            f"Horovod is built for an installed {name}, and this environment has none: "
            "run `make horovod`, which installs it first"
        ) from None


def find_compiler() -> Path:
    name = os.environ.get("CXX") or "c++"
    found = shutil.which(name)
    if found is None:
        raise CannotBuild(
            f"Horovod is built with a C++ compiler, and {name!r} is none on the PATH: install one "
            "(Debian: apt-get install g++ make) or set CXX to its path"
        )
    return Path(found).absolute()


def compiler_version(compiler: Path) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60)
    if done.returncode != 0 or not done.stdout.strip():
        raise CannotBuild(
            f"`{compiler} --version` must print the version of a C++ compiler, and printed "
            f"{done.stdout!r} with status {done.returncode}: set CXX to a compiler"
        )
    return done.stdout.partition("\n")[0]


def check_compiler(compiler: Path) -> None:
    """Compile a line of C++17 that includes Python's headers."""
    include = sysconfig.get_path("include")
    words = [str(compiler), "-std=c++17", f"-I{include}", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(words, input=PROBE, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise CannotBuild(
            f"{compiler} cannot compile C++17 with the headers of Python in {include}: install "
            "a later compiler, or those headers (Debian: apt-get install g++ python3-dev)\n"
            + last_lines(done.stderr, 3)
        )


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "autotune" / "horovod"


def cached_wheel(cache: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Return the wheel of `key`, if need be after `build(folder)` has put it into a folder.

    The folder gets its name in the cache when it is complete. A second build waits for the first.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotBuild(
            f"the wheel of Horovod is kept in {cache}, which cannot be created ({error.strerror}): "
            "set XDG_CACHE_HOME to a folder that you may write"
        ) from None
    with locked(cache / f"{key}.lock"):
        kept = cache / key
        if not any(kept.glob("*.whl")):
            unfinished = cache / f"{key}.unfinished"
            for left in (kept, unfinished):
                shutil.rmtree(left, ignore_errors=True)
            unfinished.mkdir()
            try:
                build(unfinished)
                unfinished.rename(kept)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        return next(kept.glob("*.whl"))


@contextlib.contextmanager
def locked(path: Path, deadline_s: float = DEADLINE_S) -> Iterator[None]:
    """Hold the lock of a file, which the system releases when the process ends."""
    end = time.monotonic() + deadline_s
    with path.open("w") as file:
        waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise CannotBuild(
                        f"another build has held {path} for {deadline_s:.0f} s: end it, and "
                        "start this one again"
                    ) from None
            if not waited:
                say("waiting for another build of Horovod")
                waited = True
            time.sleep(0.2)
        yield


def build_wheel(folder: Path, log: Path, compiler: Path) -> None:
    """Compile Horovod with all cores of this process, with a CMake of its own."""
    check_compiler(compiler)
    say(f"building Horovod (minutes); the log is {log}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as work, log.open("w") as lines:
        settings = build_settings(Path(work), compiler)
        Path(settings["HOROVOD_OBJECTS"]).mkdir()
        hashed = ["--no-deps", "--require-hashes", "--requirement"]
        build = ["--no-build-isolation", "--no-binary", ":all:"]
        sources = ["download", *build, "--dest", work, *hashed, str(HERE / "sources.txt")]
        run(pip(*sources), settings, lines)
        cmake = ["install", "--only-binary", ":all:", "--target", f"{work}/tools"]
        run(pip(*cmake, *hashed, str(HERE / "cmake.txt")), settings, lines)
        (archive,) = Path(work).glob("*.tar.gz")
        # Without pip's own cache: it keeps a wheel by the name of its sources, whoever compiled it.
        wheel = ["wheel", "--verbose", "--no-cache-dir", "--no-deps", "--no-index", *build]
        run(pip(*wheel, "--wheel-dir", str(folder), str(archive)), settings, lines)
    say(f"built Horovod in {time.monotonic() - start:.0f} s")


def build_settings(work: Path, compiler: Path) -> dict[str, str]:
    """Return the environment of the build, without the user's own settings of Horovod."""
    inherited = {name: text for name, text in os.environ.items() if "HOROVOD" not in name}
    return {
        **inherited,
        **SETTINGS,
        "CXX": str(HERE / "compiler"),
        "HOROVOD_COMPILER": str(compiler),
        "HOROVOD_CMAKE": str(work / "tools/cmake/data/bin/cmake"),
        "HOROVOD_OBJECTS": str(work / "objects"),
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0)) + 1}",  # some wait for a twin's object
        "TMPDIR": str(work),
    }


def pip(*words: str) -> list[str]:
    return [sys.executable, "-m", "pip", *words]


def run(
    words: Sequence[str], settings: Mapping[str, str], log: TextIO, deadline_s: float = DEADLINE_S
) -> None:
    """Run a command with its output in the log, and all that it starts in a group of its own."""
    process = subprocess.Popen(
        words,
        env=settings,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        status = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        raise failure(f"did not end within {deadline_s:.0f} s", log) from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0:
        raise failure(f"failed with status {status}", log)


def failure(what: str, log: TextIO) -> CannotBuild:
    text = Path(log.name).read_text(encoding="utf-8", errors="replace")
    return CannotBuild(
        f"the build of Horovod {what}. Its errors and last lines, from {log.name}:\n"
        + last_lines(text, 10)
    )


def last_lines(text: str, count: int) -> str:
    """Return the last lines, after the first errors of earlier ones, each cut to a width.

    pip and setuptools clean up after an error of the compiler, which takes pages.
    """
    lines = [line.strip()[:200] for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[:-count] if "error: " in line]
    return "\n".join([*errors[:3], *lines[-count:]])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # end what runs, and remove files
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    compiler = find_compiler()
    cache, key = cache_folder(), recipe(compiler).key()
    log = cache / f"{key}.log"
    wheel = cached_wheel(cache, key, lambda folder: build_wheel(folder, log, compiler))
    options = ["--quiet", "--no-deps", "--no-index", "--force-reinstall"]
    if subprocess.run(pip("install", *options, str(wheel)), timeout=DEADLINE_S).returncode != 0:
        raise CannotBuild(f"pip could not install {wheel}: see its message above")
    say(f"installed {wheel}")


if __name__ == "__main__":
    main()
