"""The documentation: its code runs, its commands parse, its paths and links exist."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import output

import autotune
from autotune.cli import COMMANDS, argument_parser, split_words

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "examples/README.md",
    ROOT / "benchmarks/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
INFO = re.compile(r'(?P<language>\w+)(?: skip="(?P<skip>[^"]+)")?')
FOLDERS = "autotune|runtime_rewriter|benchmarks|datasets|docs|examples|tests"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./*-]+)`")
MODULE = re.compile(r"python -m (benchmarks(?:\.[a-z]\w*)+)")
LINK = re.compile(r"\[[^]]*\]\(([^)#\s]+)")
PACKAGES = [path.stem for path in (ROOT / "autotune").iterdir() if path.stem != "__init__"]
NAME = re.compile(
    r"(?<![\w./\"-])((?:autotune|runtime_rewriter)(?:\.[A-Za-z]\w*)+)"
    rf"|`((?:{'|'.join(PACKAGES)})(?:\.[A-Za-z]\w*)+)(?![\w(])"
)
INLINE_COMMAND = re.compile(r"`autotune ([^`]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced code block: its language, the reason not to run it, its text."""

    language: str
    skip: str | None
    text: str


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    parsed = []
    for _, info, text in FENCE.findall(page.read_text()):
        match = INFO.fullmatch(info.strip())
        if info.strip():
            assert match, f'{name_of(page)}: ```{info} must be a language, or language skip="why"'
            parsed.append(Block(match["language"], match["skip"], text))
    return parsed


def command_lines(block: Block) -> list[str]:
    """The commands of a shell block: without prompts, output and comments."""
    text = block.text.replace("\\\n", " ")
    if block.language == "console":
        return [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def shell_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in ("bash", "console")]


def own_words(line: str) -> list[str]:
    """The arguments of an `autotune` command line, else none."""
    words = shlex.split(line, comments=True)
    return words[1:] if words[:1] == ["autotune"] else []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_of_a_page_run_in_sequence(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = [block for block in blocks(page) if block.language == "python"]
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in code:
        compiled = compile(block.text, str(page), "exec", dont_inherit=True)
        if block.skip is None:
            exec(compiled, scope)


RUNNABLE = [
    pytest.param(line, id=f"{name_of(page)}: {line}")
    for page in PAGES
    for block in shell_blocks(page)
    if block.skip is None
    for line in command_lines(block)
]


@pytest.mark.parametrize("line", RUNNABLE)
def test_a_shell_command_without_a_reason_to_skip_it_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "datasets").symlink_to(ROOT / "datasets")  # as in a clone
    words = own_words(line)
    assert words, f"only `autotune` commands run here; give the block a reason to skip: {line}"
    monkeypatch.chdir(tmp_path)
    assert output(capsys, *words)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_line_of_a_page_parses(page: Path) -> None:
    parser = argument_parser()
    for block in shell_blocks(page):
        for line in command_lines(block):
            ours, _ = split_words(own_words(line))
            if ours:
                parser.parse_args(ours)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_options_named_in_a_sentence_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for mention in INLINE_COMMAND.findall(text):
        ours, _ = split_words(mention.split())
        parser = argument_parser()
        for word in ours:
            name = word.partition("=")[0].rstrip(",.")
            subparsers = subparsers_of(parser)
            if subparsers and not name.startswith("-"):
                assert name in subparsers, f"`autotune {mention}`: no command {name}"
                parser = subparsers[name]
            elif name.startswith("-"):
                assert name in parser._option_string_actions, f"`autotune {mention}`: no {name}"


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def resolve(name: str) -> object:
    """Import the longest module of a dotted name, then get its attributes."""
    parts = name.split(".")
    value: object = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:number]))
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_names_of_a_page_exist(page: Path) -> None:
    for full, short in NAME.findall(page.read_text()):
        if not short.endswith((".py", ".md", ".yaml", ".json")):
            resolve(full or f"autotune.{short}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_modules_and_links_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for path in PATH.findall(text):
        assert list(ROOT.glob(path.rstrip("/"))), f"{path} does not exist"
    for module in MODULE.findall(text):
        path = ROOT / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for target in LINK.findall(text):
        if not re.match(r"\w+:", target):
            assert (page.parent / target).exists(), f"the link to {target} is broken"


@pytest.mark.parametrize("page", ["extending.md", "what-if.md"])
def test_the_public_interface_has_what_extensions_import(page: str) -> None:
    imports = r"^from (autotune\.[\w.]+) import ([\w, ]+)$"
    used = {
        f"{module}.{name}"
        for block in blocks(ROOT / "docs" / page)
        for module, names in re.findall(imports, block.text, re.MULTILINE)
        for name in names.split(", ")
    }
    assert used and used <= public_names()


def test_the_public_interface_has_the_names_of_the_package() -> None:
    names = {name for name in autotune.__all__ if name not in ("Recorder", "__version__")}
    assert {f"autotune.{name}" for name in names} <= public_names()


def test_the_first_page_lists_every_command() -> None:
    page = (ROOT / "docs/index.md").read_text()
    for name, purpose in COMMANDS.items():
        assert f"| `autotune {name}` | {purpose} |" in page


def public_names() -> set[str]:
    """The names of the generated reference."""
    path = ROOT / "docs/reference_pages.py"
    spec = importlib.util.spec_from_file_location("reference_pages", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name for names in module.PUBLIC.values() for name in names}
