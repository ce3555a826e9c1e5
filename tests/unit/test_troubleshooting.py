"""The errors that users meet most name a heading of the troubleshooting page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from command_line import error_output, output
from synthetic_job import SyntheticWorld, decided, job_spec
from test_export import MODEL, NOW
from torch import nn

from autotune.cli import main
from autotune.errors import Anchor, AutotuneError
from autotune.export import check_model
from autotune.jobs import places
from autotune.jobs.exports import build_export
from autotune.records import REAL_CONDITIONS
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Compressor
from autotune.tuning import statistics
from runtime_rewriter.private_network import refusal
from runtime_rewriter.pytorch.agreement import assumed_workload, check_fit, trainable_parameters
from runtime_rewriter.world.answers import ScriptEnded
from runtime_rewriter.world.views import Protected, held_view
from runtime_rewriter.world.world import World

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"


def no_ddp() -> None:
    def script_that_ends():
        raise ScriptEnded(0)

    World(script_that_ends, 1.0, 1.0, statistics).model_id()


def wrong_world_size() -> None:
    check_model(export(), MODEL, 3)


def another_model() -> None:
    check_model(export(), {}, 2)


def no_ray() -> None:
    where = places.Where(None, False, (0, 0))
    ranks = places.Ranks(None, 2, Path("logs"), 1.0, 1.0)
    with places.placed_world(where, job_spec().cluster, REAL_CONDITIONS, ranks, print):
        pass


def refused_strategy() -> None:
    module = nn.Linear(2, 2)
    workload = assumed_workload(module)
    message = plan(ddp_default(workload), workload, 2).messages[0]
    refused = replace(message, compressor=Compressor.FP16, dtype="complex64")
    unfit = replace(plan(ddp_default(workload), workload, 2), messages=(refused,))
    check_fit(unfit, trainable_parameters(module), 2)


def export():
    return build_export("job", job_spec(), *decided(job_spec(), SyntheticWorld({5: 0.06})), NOW)


def no_view() -> None:
    held_view(Protected(("/",)), "this machine")


def untrusted_network() -> None:
    raise refusal("a server", "its hosts are on an ordinary network")


CASES = {
    "no-ddp": no_ddp,
    "wrong-world-size": wrong_world_size,
    "another-model": another_model,
    "no-ray": no_ray,
    "refused-strategy": refused_strategy,
    "no-view": no_view,
    "untrusted-network": untrusted_network,
}


def test_every_anchor_is_on_the_page_and_has_an_example() -> None:
    anchors = set(get_args(Anchor)) - {""}
    page = PAGE.read_text()
    assert {anchor for anchor in anchors if f'<a id="{anchor}"></a>' in page} == anchors == {*CASES}


@pytest.mark.parametrize("anchor", CASES)
def test_the_message_names_its_anchor_once(anchor: str, monkeypatch) -> None:
    monkeypatch.setattr(places, "find_spec", lambda name: None)
    with pytest.raises(AutotuneError) as raised:
        CASES[anchor]()
    assert str(raised.value).count(f"; see `autotune docs troubleshooting#{anchor}`") == 1


def test_every_command_that_a_message_names_prints_its_part_of_the_documentation(capsys) -> None:
    """An installed package has no folder `docs`, but the pages that messages name."""
    packages = (ROOT / name for name in ("autotune", "runtime_rewriter"))
    sources = [path.read_text() for package in packages for path in package.rglob("*.py")]
    named = {page for text in sources for page in re.findall(r"`autotune docs ([\w#-]+)`", text)}
    assert named >= {"launching#slurm", "frameworks"}
    for page in (*named, *(f"troubleshooting#{anchor}" for anchor in CASES)):
        printed = output(capsys, "docs", page)
        assert printed.startswith("## " if "#" in page else "# ")
        assert "#" not in page or "\n## " not in printed


def test_a_section_has_its_subsections_and_unknown_ones_are_refused_with_the_known(capsys) -> None:
    section = output(capsys, "docs", "launching#several-hosts")
    assert section.startswith("## Several machines\n") and "<a id" not in section
    assert "# On the first host:" in section and "### What every host needs" in section
    assert "frameworks, launching, troubleshooting, but is" in error_output(capsys, "docs", "job")
    unknown = error_output(capsys, "docs", "launching#slurms")
    assert "files, several-hosts, hosts, slurm, but is 'slurms'" in unknown


def test_a_script_without_a_step_of_ours_learns_what_to_change_in_tensorflow() -> None:
    with pytest.raises(AutotuneError, match=r"model.fit on one device, by train_step ="):
        no_ddp()


def test_json_errors_name_the_page(capsys, tmp_path) -> None:
    path = tmp_path / "best.json"
    export().write(path)
    script = str(Path(__file__).parents[1] / "scripts" / "train_small.py")
    launch = ["torchrun", "--nproc-per-node", "3", script]
    assert main(["run", "--json", "--strategy", str(path), "--", *launch]) == 2
    error = json.loads(capsys.readouterr().out)
    assert error["help"] == "autotune docs troubleshooting#wrong-world-size"
    assert error["help"] in error["error"]
