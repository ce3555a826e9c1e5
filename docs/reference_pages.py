"""Generate the site's reference: one page per command and one per public name (a mkdocs hook)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from autotune.cli import argument_parser

PUBLIC = {
    "In the training script": [
        "autotune.apply",
        "autotune.distribute",
        "autotune.profile",
        "runtime_rewriter.recording.api.Recorder",
        "runtime_rewriter.rank.apply.Applied",
    ],
    "The nouns": [
        "autotune.workload.Workload",
        "autotune.workload.Variable",
        "autotune.cluster.Cluster",
        "autotune.cluster.Host",
        "autotune.cluster_file.read_cluster",
        "autotune.export.Export",
    ],
    "Strategies": [
        "autotune.strategy_space.strategy.Strategy",
        "autotune.strategy_space.strategy.VariableStrategy",
        "autotune.strategy_space.strategy.Shard",
        "autotune.strategy_space.strategy.Synchronizer",
        "autotune.strategy_space.plan.Plan",
        "autotune.strategy_space.plan.Message",
        "autotune.strategy_space.plan.plan",
        "autotune.strategy_space.space.SearchSpace",
        "runtime_rewriter.pytorch.attached.attach",
    ],
    "Extending": [
        "autotune.plugins.Registry",
        "autotune.simulators.interface.Simulator",
        "autotune.simulators.residual.ResidualSimulator",
        "autotune.simulators.residual.Architecture",
        "autotune.simulators.training.TrainingRecipe",
        "autotune.simulators.batch.FeatureBatch",
        "autotune.costs.sync_cost.GLOBAL_FEATURES",
        "autotune.optimizer.state.Pass",
        "autotune.optimizer.state.State",
        "autotune.optimizer.state.CriticalPath",
        "autotune.optimizer.edits.like",
        "autotune.strategy_space.compressors.CompressorDescription",
        "autotune.strategy_space.compressors.CodecCosts",
        "autotune.whatif.registry.what_if",
        "autotune.whatif.base.Base",
        "autotune.whatif.question.Question",
        *(
            f"autotune.whatif.primitives.{name}"
            for name in ("select", "scale", "remove", "disconnect")
        ),
    ],
    "Prediction and search": [
        "autotune.dfg.graph.Dfg",
        "autotune.dfg.graph.Kind",
        "autotune.dfg.build.DfgBuilder",
        "autotune.dfg.replay.Timeline",
        "autotune.lowering.lower.Lowering",
        "autotune.optimizer.optimize.optimize",
        "autotune.memory.peak.peak_memory",
    ],
    "Errors": [
        f"autotune.errors.{name}"
        for name in ("AutotuneError", "InvalidInput", "InvalidStrategy", "ModelMismatch")
    ],
}
"""The public interface: all else may change in any version."""


def subcommands(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Name, parser and one-line help of each command, with those of a command's actions."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, command in action.choices.items():
            yield name, command, helps[name]
            for inner, inner_parser, text in subcommands(command):
                yield f"{name} {inner}", inner_parser, text


def option_tables(parser: argparse.ArgumentParser) -> list[str]:
    """One table per group of options."""
    lines: list[str] = []
    for group in parser._action_groups:
        entries = [
            action
            for action in group._group_actions
            if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
        ]
        if not entries:
            continue
        lines += [
            f"## {(group.title or 'options').capitalize()}",
            "",
            "| option | meaning |",
            "|---|---|",
        ]
        lines += [f"| `{_usage(action)}` | {_help(parser, action)} |" for action in entries]
        lines.append("")
    return lines


def _usage(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else None)
    value = value or action.dest.upper()
    if not action.option_strings:
        return str(value)
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names.replace("|", "\\|")
    return f"{names} {value}".replace("|", "\\|")


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return text.replace("|", "\\|").replace("<", "&lt;")


def command_pages() -> dict[str, str]:
    """Markdown of every command's page, by path."""
    index = ["# Commands", "", "| command | purpose |", "|---|---|"]
    pages = {"commands/index.md": ""}
    for name, parser, summary in subcommands(argument_parser()):
        page = f"{name.replace(' ', '-')}.md"
        description = parser.description or f"{summary[:1].upper()}{summary[1:]}."
        lines = [f"# autotune {name}", "", description, ""]
        lines += ["```text", parser.format_usage().strip(), "```", "", *option_tables(parser)]
        pages[f"commands/{page}"] = "\n".join(lines)
        index.append(f"| [`autotune {name}`]({page}) | {summary} |")
    pages["commands/index.md"] = "\n".join(index)
    return pages


def class_pages() -> dict[str, str]:
    """Markdown of every public name's page, by path."""
    index = ["# Classes and functions", "", "The public interface; all else may change."]
    pages = {"classes/index.md": ""}
    for group, names in PUBLIC.items():
        index += ["", f"## {group}", ""]
        for name in names:
            pages[f"classes/{name}.md"] = f"# {name.rpartition('.')[2]}\n\n::: {name}\n"
            index.append(f"- [`{name}`]({name}.md)")
    pages["classes/index.md"] = "\n".join(index)
    return pages


PAGES = command_pages() | class_pages()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the empty sections of the navigation with the pages of the folders of their names."""
    docs = Path(config.docs_dir)
    written = sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))
    for section in config.nav or []:
        for entry in next(iter(section.values())):
            if isinstance(entry, dict) and [] in entry.values():
                folder = next(iter(entry)).lower()
                pages = [page for page in [*PAGES, *written] if re.match(rf"{folder}[./]", page)]
                entry[folder.capitalize()] = sorted(pages, key=lambda page: "index.md" not in page)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    for path, text in PAGES.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files outside `docs/` by their text; drop the `skip` of code blocks."""
    folder = Path(config.docs_dir, page.file.src_uri).parent

    def text_of(link: re.Match[str]) -> str:
        target = (folder / link[2].partition("#")[0]).resolve()
        outside = target.exists() and not target.is_relative_to(config.docs_dir)
        return link[1] if outside else link[0]

    markdown = re.sub(r'^(```\w+) skip="[^"]*"$', r"\1", markdown, flags=re.MULTILINE)
    return re.sub(r"\[([^]]+)\]\((\.\./[^)]+)\)", text_of, markdown)
