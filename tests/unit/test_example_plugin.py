"""The example plugin: its documentation quotes it, and commands use its extensions.

`tests/contract/test_simulator_contract.py` tests its simulator; `test_plugin_compressor.py` and
`tests/integration/test_torch_compressors.py` test its compressor.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_worlds import FOUR, model, sent

from autotune.strategy_space.builders.registry import BUILDERS, seed_strategies
from autotune.strategy_space.space import SearchSpace

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for path in (ROOT / "examples/plugin").rglob("*.*")
    if path.suffix in (".py", ".toml") and path.name != "__init__.py"
)


def autotune(site: Path, *words: str) -> Any:
    """Run a command with the plugin on the path; return its JSON."""
    path = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *words, "--json"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_documentation_quotes_the_file(path: Path) -> None:
    page = (ROOT / "docs/extending.md").read_text()
    assert path.read_text() in re.findall(r"```\w+[^\n]*\n(.*?)```", page, re.DOTALL)


def test_its_builder_is_listed_with_the_built_in_ones(example_plugin: Path) -> None:
    listed = json.dumps(autotune(example_plugin, "strategies", "bert-base", "B7"))
    assert "two_halves" in listed and "ddp_25mib" in listed


def test_its_builder_plans_and_seeds_the_search(
    example_plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(example_plugin))
    workload = model(100, 300, 200, 200)
    with BUILDERS.separate():
        seeds = dict(seed_strategies(workload, FOUR, SearchSpace.default()))
    assert sent(seeds["two_halves"], workload) == "v0 v1|v2 v3"


def test_its_what_if_is_predicted_alone_and_with_others(example_plugin: Path) -> None:
    trace = str(ROOT / "datasets/gpu_traces/h100/vgg19.fp32")
    names = "no_copies,no_copies+fused_adam"
    answer = autotune(example_plugin, "what-if", trace, "--only", names)
    assert {row["what_if"] for row in answer["what_ifs"]} == {*names.split(",")}
