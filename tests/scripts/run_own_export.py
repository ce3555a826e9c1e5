"""`DIRECTORY SCRIPT args`: runs the script as `autotune run`, each rank with its own export."""

import os
import sys

from runtime_rewriter.rank.launch import main

if __name__ == "__main__":
    directory, *words = sys.argv[1:]
    sys.exit(main(["--strategy", f"{directory}/rank{os.environ['RANK']}.json", "--", *words]))
