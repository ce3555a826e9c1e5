"""Every command has help; `autotune init` writes a usable folder; docs list the settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_line import error_output

from autotune.cli import COMMANDS, argument_parser, main
from autotune.cluster_file import read_cluster
from autotune.commands.arguments import given_settings
from autotune.commands.settings_page import settings_page
from autotune.errors import InvalidInput
from autotune.files import refuse_unwritable
from autotune.jobs.settings import read_settings
from autotune.jobs.sources import named_cluster, named_model

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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimize", "vgg16"], "the following arguments are required: --cluster"),
        (["replay"], "the following arguments are required"),
        (["tune", "--workers", "x"], "argument --workers: invalid int value: 'x'"),
        (["tune", "torchrun", "train.py"], "train.py; put the command that starts the script "),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_wrong_options_are_one_json_object_too(capsys, words: list[str], message: str) -> None:
    assert main([*words, "--json"]) == 2
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert (data["kind"], data["exit_status"]) == ("InvalidInput", 2)
    assert message in data["error"] and data["error"] in printed.err
    assert printed.err.startswith("usage: autotune")


def test_a_switch_of_the_job_file_can_be_turned_off(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("job.yaml").write_text("command: torchrun --nproc-per-node 2 train.py\nlossy: true\n")
    for words, lossy in (([], True), (["--no-lossy"], False)):
        options = argument_parser(["tune"]).parse_args(["tune", "job.yaml", *words])
        settings = read_settings([], given_settings(options), Path("job.yaml"), None)
        assert settings.spec.lossy == lossy


def test_a_model_of_the_zoo_is_not_taken_for_a_recording_of_its_name(
    capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("VGG16").mkdir()
    assert named_model("VGG16").model == "vgg16"  # an empty folder is no recording
    Path("VGG16", "job.json").write_text("{}")
    for command in (["optimize", "VGG16", "--cluster", "A2"], ["strategies", "VGG16", "A2"]):
        assert main(command) == 2
        assert "is a model of the zoo, but also a recording in this folder; write ./" in (
            capsys.readouterr().err
        )
    Path("A2").write_text("")
    with pytest.raises(InvalidInput, match=r"A2 is a cluster of the zoo, but also a file"):
        named_cluster("A2")


def test_a_result_that_cannot_be_written_is_refused_before_the_work(
    capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    Path("file").touch()
    for path, message in (("taken", "but is a directory"), ("file/r", "Not a directory")):
        for option in ("-o", "--timeline", "--report"):
            assert main(["optimize", "vgg16", "--cluster", "A2", option, path]) == 2
            assert message in capsys.readouterr().err
        assert main(["what-if", "missing.json", "--report", path]) == 2
        assert message in capsys.readouterr().err
    refuse_unwritable(tmp_path / "new" / "folder" / "r.html")
    assert not (tmp_path / "new").exists()


def test_a_command_that_no_shell_understands_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("command: python train.py --note don't\n")
    with pytest.raises(InvalidInput, match=r"job.yaml: command must be .* No closing quotation"):
        read_settings([], {}, Path("job.yaml"), None)


def test_a_job_without_mlflow_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    message = error_output(capsys, "tune", "--workers", 2, "--", "python", "train.py")
    assert "tracking needs MLflow, which is not installed" in message
    assert not list(tmp_path.iterdir())


def test_bytes_that_are_no_utf_8_are_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    script = ("--", "python", "train.py")
    odd = b"caf\xe9".decode("utf-8", "surrogateescape")
    message = error_output(capsys, "tune", "--workers", 2, *script, "--data", odd)
    assert "each word of the command must be UTF-8" in message and "caf\\\\udce9" in message
    message = error_output(capsys, "tune", "--workers", 2, "--directory", odd, *script)
    assert "the path of --directory must be UTF-8" in message
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
