"""Run a script with what-ifs enacted, for `autotune profile`.

python benchmarks/whatif_truth/enacted_script.py amp examples/gpt_text.py --epochs 1
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from runtime_rewriter.changes.enact import enacted


def main() -> None:
    changes, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with enacted(tuple(changes.split("+")), {}):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
