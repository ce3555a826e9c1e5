"""A script runs as `python SCRIPT` would: its own `__main__`, names and paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime_rewriter.world.starting import launcher_words

LAUNCHER = "import sys; from runtime_rewriter.rank.launch import _run_script"
LAUNCHER += "; _run_script(sys.argv[1:])"
FORKING = """
import json, os, sys
from runtime_rewriter.rank.launch import _run_script
while line := sys.stdin.readline():
    if child := os.fork():
        print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    folder, words = json.loads(line)
    os.chdir(folder)
    _run_script(words)
    break
"""
"""Runs a script for each line of its input, each in a process of its own, to that process's end.

The launcher imports torch, which takes seconds, so the processes are forked from one interpreter.
"""
Launched = Callable[..., str]
"""(folder, script and its words) -> its output."""


@pytest.fixture(scope="module")
def launched() -> Iterator[Launched]:
    environment = {
        key: text for key, text in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }
    with subprocess.Popen(
        [sys.executable, "-c", FORKING],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as interpreter:
        assert interpreter.stdin is not None and interpreter.stdout is not None
        asking, answering = interpreter.stdin, interpreter.stdout

        def run(folder: Path, *words: str) -> str:
            asking.write(json.dumps([str(folder), words]) + "\n")
            asking.flush()
            output = ""
            while not (line := answering.readline()).startswith("ended "):
                assert line, "the interpreter has ended"
                output += line
            assert line == "ended 0\n", output
            return output

        yield run
        asking.close()


SCRIPT = """
import atexit, inspect, json, pickle, sys
from pathlib import Path

class Point:
    pass

facts = {
    "file": __file__, "name": __name__, "argv": sys.argv, "path": sys.path[0],
    "code": (lambda: 0).__code__.co_filename, "spec": __spec__ is None, "doc": __doc__,
    "source": inspect.getsource(Point).strip().splitlines()[0],
}

def show():
    facts["pickled"] = type(pickle.loads(pickle.dumps(Point()))).__name__
    Path(sys.argv[1]).write_text(json.dumps(facts))

atexit.register(show)  # behind the end of the script
"""


def test_a_script_sees_what_it_sees_under_python(tmp_path: Path, launched: Launched) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "show.py").write_text(SCRIPT)
    output = tmp_path / "facts.json"
    words = ["scripts/show.py", str(output)]
    subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, timeout=240)
    plain = json.loads(output.read_text())
    assert plain["file"] == str(tmp_path / "scripts" / "show.py")
    output.unlink()
    launched(tmp_path, *words)
    assert json.loads(output.read_text()) == plain


def test_a_safe_path_is_kept(tmp_path: Path) -> None:
    """With PYTHONSAFEPATH, Python puts no folder of the script before those of PYTHONPATH."""
    (tmp_path / "show.py").write_text("import json, sys; print(json.dumps(sys.path))")
    (tmp_path / "empty.py").touch()
    first = str(tmp_path / "first")
    safe = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": first}

    def paths(*command: str) -> list[list[str]]:
        """The lists of paths that the command prints."""
        words = [sys.executable, *command]
        done = subprocess.run(
            words, cwd=tmp_path, env=safe, capture_output=True, text=True, timeout=240, check=True
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    [plain] = paths("show.py")
    assert plain[0] == first
    start, roots = launcher_words()
    started = f"import sys; sys.argv.insert(1, {roots!r}); import runpy"
    started += f"; runpy.run_path({start!r}); import json; print(json.dumps(sys.path))"
    # Its path is as before it was started, so the same process runs the script, too.
    ours = f"sys.path[:0] = {roots.split(os.pathsep)!r}; {LAUNCHER}"
    after_start, in_script = paths("-c", f"{started}; {ours}", "show.py")
    assert after_start == plain
    assert in_script == [*roots.split(os.pathsep), *plain]


def test_an_edited_script_runs_as_it_is_now_and_leaves_nothing_behind(
    tmp_path: Path, launched: Launched
) -> None:
    """A file of the same size and time, as from an archive, is another script nevertheless."""
    script = tmp_path / "train.py"
    outputs = []
    for number in (1, 2):
        script.write_text(f"print({number})")
        os.utime(script, (1e9, 1e9))
        outputs.append(launched(tmp_path, str(script)).split())
    assert outputs == [["1"], ["2"]]
    assert list(tmp_path.iterdir()) == [script]
