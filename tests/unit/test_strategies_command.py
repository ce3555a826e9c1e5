"""`autotune strategies`: the catalogue of hand-made strategies, for a model of the zoo or of a
file.
"""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from autotune.cli import main
from autotune.strategy_space.builders.registry import BUILDERS
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Variable, Workload


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["strategies", *words]) == 0
    return capsys.readouterr().out


def test_every_builder_stands_with_its_messages_and_whether_the_runtime_enacts_it(capsys) -> None:
    text = printed(capsys, "ncf-sparse", "B7")
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert len(rows) == len(BUILDERS) and all(row.split("│")[-2].strip() == "yes" for row in rows)
    for name in BUILDERS:
        assert f" {name} " in text
    assert "ncf-sparse (" in text and "on B7, " in text


def test_a_limit_of_single_connections_makes_synchronization_slower(capsys) -> None:
    wide, limited = (
        json.loads(printed(capsys, "vgg16", name, "--json")) for name in ("B7", "B7-single-flow")
    )
    assert limited["cluster"] == "B7-single-flow"
    assert (
        limited["builders"]["single_bucket"]["sync_s"]
        > 2 * wide["builders"]["single_bucket"]["sync_s"]
    )


def test_one_builder_shows_every_variable(capsys, tmp_path: Path) -> None:
    model = Workload("mine", (Variable("head", (10, 4)), Variable("table", (100, 4), sparse=True)))
    file = tmp_path / "workload.json"
    file.write_text(json.dumps(model.to_data()))
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("name: pair\nhosts: [{name: a}, {name: b}]\n")
    data = json.loads(
        printed(capsys, str(file), str(cluster), "--builder", "partitioned_all_reduce", "--json")
    )
    assert (
        data["variables"][0]["partition"] == "2 along axis 0 (5)"
        and data["variables"][1]["synchronizers"] == "all_reduce, sparse: dense"
    )
    assert Strategy.from_data(data["strategy"]) == BUILDERS["partitioned_all_reduce"](model, None)
    text = printed(capsys, str(file), str(cluster), "--builder", "partitioned_all_reduce")
    assert "100x4 sparse" in text and Strategy.from_data(data["strategy"]).id in text


def test_the_model_may_be_a_recording(capsys) -> None:
    recording = Path(__file__).parents[2] / "datasets/gpu_traces/h100/resnet50.fp32"
    shown = [printed(capsys, str(path), "B7") for path in (recording, recording / "job.json")]
    assert shown[0] == shown[1] and "161 variables" in shown[0]


def test_the_schema_takes_every_hand_made_strategy_and_refuses_what_the_reader_refuses(
    capsys,
) -> None:
    schema = json.loads(printed(capsys, "--schema"))
    assert schema == json.loads(printed(capsys, "--schema", "--json"))
    builders = json.loads(printed(capsys, "vgg16", "A2", "--json"))["builders"]
    for row in builders.values():
        jsonschema.validate(row["strategy"], schema)
    wrong = builders["ddp_25mib"]["strategy"] | {"crosstep": True}
    with pytest.raises(jsonschema.ValidationError, match="crosstep"):
        jsonschema.validate(wrong, schema)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a model and a cluster, or give --schema; models: resnet50"),
        (["gpt5", "A2"], "a folder of `autotune profile` or one of resnet50"),
        (["vgg16", "Z9"], "the cluster must be a cluster file or one of A1"),
        (["vgg16", "A1", "--builder", "best"], "--builder must be one of ddp_25mib"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(capsys, words: list[str], message: str) -> None:
    assert main(["strategies", *words]) == 2
    assert message in capsys.readouterr().err
