"""A script runs as `python SCRIPT` would: its own `__main__`, names and paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from runtime_rewriter.world.starting import launcher_words

LAUNCHER = "import sys; from runtime_rewriter.rank.launch import _run_script"
LAUNCHER += "; _run_script(sys.argv[1:])"

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


def facts_of(folder: Path, *command: str) -> dict[str, object]:
    output = folder / "facts.json"
    words = [sys.executable, *command, "scripts/show.py", str(output)]
    subprocess.run(words, cwd=folder, check=True, timeout=240)
    facts: dict[str, object] = json.loads(output.read_text())
    return facts


def test_a_script_sees_what_it_sees_under_python(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "show.py").write_text(SCRIPT)
    plain = facts_of(tmp_path)
    assert plain["file"] == str(tmp_path / "scripts" / "show.py")
    assert facts_of(tmp_path, "-c", LAUNCHER) == plain


def test_a_safe_path_is_kept(tmp_path: Path) -> None:
    """With PYTHONSAFEPATH, Python puts no folder of the script before those of PYTHONPATH."""
    (tmp_path / "show.py").write_text("import json, sys; print(json.dumps(sys.path))")
    (tmp_path / "empty.py").touch()
    first = str(tmp_path / "first")
    safe = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": first}

    def paths(*command: str) -> list[str]:
        words = [sys.executable, *command]
        done = subprocess.run(
            words, cwd=tmp_path, env=safe, capture_output=True, text=True, timeout=240, check=True
        )
        folders: list[str] = json.loads(done.stdout)
        return folders

    plain = paths("show.py")
    assert plain[0] == first
    start, roots = launcher_words()
    started = f"import sys; sys.argv = ['start', {roots!r}]; import runpy"
    started += f"; runpy.run_path({start!r}); import json; print(json.dumps(sys.path))"
    assert paths("-c", started) == plain
    ours = f"import sys; sys.path[:0] = {roots.split(os.pathsep)!r}; {LAUNCHER}"
    assert paths("-c", ours, "show.py") == [*roots.split(os.pathsep), *plain]


def test_an_edited_script_runs_as_it_is_now_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A file of the same size and time, as from an archive, is another script nevertheless."""
    script = tmp_path / "train.py"
    environment = {
        key: text for key, text in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }
    outputs = []
    for number in (1, 2):
        script.write_text(f"print({number})")
        os.utime(script, (1e9, 1e9))
        words = [sys.executable, "-c", LAUNCHER, str(script)]
        outputs.append(subprocess.check_output(words, env=environment, timeout=240).split())
    assert outputs == [[b"1"], [b"2"]]
    assert list(tmp_path.iterdir()) == [script]
