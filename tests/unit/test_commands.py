"""Every command has help; `autotune init` writes a usable folder; docs list the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.cli import COMMANDS, main
from autotune.cluster_file import read_cluster
from autotune.commands.settings_page import settings_page
from autotune.errors import InvalidInput
from autotune.jobs.settings import read_settings

ROOT = Path(__file__).parents[2]


def test_the_folder_holds_the_example_its_clusters_and_a_job(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "."]) == 0
    assert [read_cluster(path).world_size for path in sorted(Path("clusters").iterdir())] == [4] * 3
    assert read_settings([], {}, Path("job.yaml"), None).spec.workers == 2
    example = ROOT / "examples" / "resnet_digits.py"
    assert Path("resnet_digits.py").read_bytes() == example.read_bytes()


def test_files_are_not_overwritten(capsys, tmp_path) -> None:
    (tmp_path / "job.yaml").write_text("command: mine.py")
    assert main(["init", str(tmp_path)]) == 2
    assert f"{tmp_path / 'job.yaml'} exist; name another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_the_committed_page_of_settings_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "job.md").read_text() == settings_page()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_text(capsys, command: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"usage: autotune {command}" in capsys.readouterr().out


def test_a_command_that_no_shell_understands_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("command: python train.py --note don't\n")
    with pytest.raises(InvalidInput, match=r"job.yaml: command must be .* No closing quotation"):
        read_settings([], {}, Path("job.yaml"), None)
