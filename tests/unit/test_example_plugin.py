"""The example plugin: its documentation quotes it, and commands use its extensions.

`tests/contract/test_simulator_contract.py` tests its simulator; `test_plugin_compressor.py` and
`tests/integration/test_torch_compressors.py` test its compressor.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for path in (ROOT / "examples/plugin").rglob("*.*")
    if path.suffix in (".py", ".toml") and path.name != "__init__.py"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_documentation_quotes_the_file(path: Path) -> None:
    page = (ROOT / "docs/extending.md").read_text()
    assert path.read_text() in re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)
