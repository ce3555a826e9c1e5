"""Started by its path: `python .../rank/start.py ROOTS ...` runs `rank.launch` with the rest.

ROOTS are the directories with our packages, joined like PATH; none of them stays on `sys.path`. So
a script imports what it imports without us, though a checkout has other folders beside our packages
(`datasets`, say, is also the name of a library).
"""

import os
import sys

if not sys.flags.safe_path:
    del sys.path[0]  # of this file; the launcher puts the script's there
_roots = [root for root in sys.argv.pop(1).split(os.pathsep) if root]
sys.path[:0] = _roots
from autotune.garbage import collection_paused  # noqa: E402 - and later imports need no path
from runtime_rewriter.file_view import requested_view  # noqa: E402

if _view := requested_view():
    _view.enter()  # before numpy is imported, whose threads would forbid it
with collection_paused():
    from runtime_rewriter.rank.launch import main

del sys.path[: len(_roots)]

if __name__ == "__main__":
    sys.exit(main())
