"""Which extension modules count as torch's own."""

import subprocess
import sys
from pathlib import Path

import torch

LOOK = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from runtime_rewriter.pytorch.extensions import LoadedExtensions
assert torch.__file__.startswith(sys.argv[1]), torch.__file__
print(LoadedExtensions().unseen())
"""


def test_torch_behind_a_symbolic_link_is_no_foreign_extension(tmp_path: Path) -> None:
    link = tmp_path / "packages"
    link.symlink_to(Path(torch.__file__).parent.parent)
    words = [sys.executable, "-c", LOOK, str(link)]
    process = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert process.stdout.strip() == "None"
