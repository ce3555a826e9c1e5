"""The reader of the AutoSync dataset on a made-up miniature, whole and broken."""

from __future__ import annotations

from pathlib import Path

import autosync_miniature as miniature
import pytest

from autotune.dataset.autosync import AutosyncDomain, read_autosync
from autotune.errors import InvalidInput
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    miniature.write_miniature(tmp_path)
    return tmp_path


def domain(folder: Path) -> AutosyncDomain:
    """NCF on AWS."""
    return read_autosync(folder)[0]


def test_every_domain_is_read_whatever_its_folders_are_called(folder: Path) -> None:
    found = read_autosync(folder)
    assert [(own.model, own.cluster_name) for own in found] == [
        (m, c) for m in ("ncf", "vgg16") for c in ("aws", "in-house")
    ]
    assert all(
        [trial.id for trial in own.trials] == ["first", "second"] and not own.left_out
        for own in found
    )
    assert [trial.average_s for trial in found[0].trials] == [0.2, pytest.approx(0.31)]
    assert found[0].trials[0].runtime_s == (0.21, 0.2, 0.19)


def test_variables_stand_in_backward_order_and_a_gathered_one_is_sparse(folder: Path) -> None:
    variables = domain(folder).workload.variables
    assert [(v.name, v.shape, v.sparse) for v in variables] == [
        ("dense/bias", (4,), False),
        ("dense/kernel", (8, 4), False),
        ("embedding", (50, 8), True),
    ]


def test_the_resource_spec_becomes_a_cluster(folder: Path) -> None:
    cluster = domain(folder).trials[0].cluster
    assert [(host.name, host.devices) for host in cluster.hosts] == [
        ("10.0.0.1", 2),
        ("10.0.0.2", 2),
    ]
    assert [host.link_bytes_per_s for host in cluster.hosts] == [25e9 / 8, 1e9 / 8]


def test_strategies_say_what_they_said(folder: Path) -> None:
    first, second = (trial.strategy.by_name for trial in domain(folder).trials)
    parts = first["embedding"]
    assert parts.partition is not None and (parts.partition.axis, parts.partition.sizes) == (
        0,
        (17, 17, 16),
    )
    assert [shard.placement for shard in parts.shards] == [0, 2, 0]
    assert parts.sparse is SparseHandling.GATHER_SCATTER
    assert (
        first["dense/kernel"].shards[0].synchronizer is Synchronizer.ALL_REDUCE
        and first["dense/kernel"].shards[0].group == 0
    )
    assert second["embedding"].shards[0].placement == 2
    assert [second[name].shards[0].compressor for name in ("dense/kernel", "dense/bias")] == [
        Compressor.FP16,
        Compressor.FP16,
    ]
    assert [second[name].shards[0].group for name in ("dense/kernel", "dense/bias")] == [0, 1]


def test_what_was_read_can_be_planned(folder: Path) -> None:
    own = domain(folder)
    made = [plan(trial.strategy, own.workload, trial.cluster.world_size) for trial in own.trials]
    assert [len(each.messages) for each in made] == [4, 3]
    assert {message.synchronizer for message in made[0].messages} == {
        Synchronizer.PARAMETER_SERVER,
        Synchronizer.ALL_REDUCE,
    }


def _left_out(folder: Path, name: str, data: bytes | str, where: str = "strategies") -> str:
    """Why the first trial cannot be read with other contents of a file."""
    path = folder / "ncf" / "aws" / where / name
    path.write_bytes(data) if isinstance(data, bytes) else path.write_text(data)
    own = domain(folder)
    assert [trial.id for trial in own.trials] == ["second"]
    return own.left_out["first"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (miniature.STRATEGIES["first"][:-3], "is cut off"),
        (b"\x0b" + miniature.STRATEGIES["first"], "field of kind 3"),
        (b"\xff" * 12, "more than 10 bytes"),
        (
            miniature.strategy([miniature.server("10.0.0.9"), *[miniature.all_reduce(0)] * 2]),
            "node of the resource spec",
        ),
        (
            miniature.strategy([miniature.server(staleness=3), *[miniature.all_reduce(0)] * 2]),
            "staleness is 3",
        ),
        (
            miniature.strategy([miniature.all_reduce(0, 3), *[miniature.all_reduce(0)] * 2]),
            "compressor must be one of",
        ),
        (miniature.strategy([b"", *[miniature.all_reduce(0)] * 2]), "has neither"),
        (
            miniature.strategy(
                [miniature.field(5, "2,2") + miniature.server(), *[miniature.all_reduce(0)] * 2]
            ),
            "cut along one axis",
        ),
        (
            miniature.strategy(
                [miniature.field(5, "x") + miniature.server(), *[miniature.all_reduce(0)] * 2]
            ),
            "numbers with commas",
        ),
        (miniature.strategy([miniature.all_reduce(0)] * 3, replicas=3), "a replica per device"),
        (
            miniature.field(3, miniature.field(1, "embedding") + miniature.all_reduce(0)),
            "lacks 'dense/bias'",
        ),
    ],
)
def test_a_broken_strategy_is_left_out_with_the_reason(
    folder: Path, data: bytes, message: str
) -> None:
    assert message in _left_out(folder, "first", data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runtime: [0.2, -1]", "seconds above 0"),
        ("average: .nan", "'average'"),
        ("runtime: []", "'average'"),
        ("!!python/object/apply:os.system ['false']", "must be YAML"),
        ("[" * 2000, "must be YAML"),
    ],
)
def test_a_broken_runtime_is_left_out_and_nothing_in_it_runs(
    folder: Path, text: str, message: str
) -> None:
    assert message in _left_out(folder, "first.yml", text, "runtime")


def test_a_trial_without_a_runtime_is_left_out(folder: Path) -> None:
    (folder / "ncf" / "aws" / "runtime" / "first.yml").unlink()
    assert "needs a runtime" in domain(folder).left_out["first"]


def test_a_broken_resource_spec_leaves_out_its_trials(folder: Path) -> None:
    for text in (
        "nodes: []",
        "nodes: [{gpus: [0]}]",
        "nodes: [{address: a, network_bandwidth: -1}]",
    ):
        (folder / "ncf" / "aws" / "resource_spec.yml").write_text(text)
        assert set(domain(folder).left_out) == {"first", "second"}


def test_a_broken_graph_is_an_error(folder: Path) -> None:
    item = miniature.graph_item()
    unknown = miniature.field(2, miniature.field(1, "g:0") + miniature.field(2, "lost:0"))
    for data, message in (
        (item[:-2], "cut off"),
        (b"", "lacks 'all of them'"),
        (item + unknown, "lacks 'lost'"),
    ):
        (folder / "ncf" / "graph_item").write_bytes(data)
        with pytest.raises(InvalidInput, match=message):
            read_autosync(folder)


def test_a_folder_without_domains_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="MODEL/CLUSTER/strategies"):
        read_autosync(tmp_path)
