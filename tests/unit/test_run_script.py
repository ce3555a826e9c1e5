"""A script runs as `python SCRIPT` would: its own `__main__`, names and paths."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
    module = "runtime_rewriter.rank.launch"
    launcher = f"import sys; from {module} import _run_script; _run_script(sys.argv[1:])"
    plain = facts_of(tmp_path)
    assert plain["file"] == str(tmp_path / "scripts" / "show.py")
    assert facts_of(tmp_path, "-c", launcher) == plain
