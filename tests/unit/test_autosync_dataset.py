"""The reader of the AutoSync dataset on an invented miniature, intact and broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from autosync_miniature import (
    STRATEGIES,
    all_reduce,
    field,
    graph_item,
    server,
    strategy,
    write_miniature,
)

from autotune.dataset.autosync import AutosyncDomain, read_autosync
from autotune.errors import InvalidInput
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_miniature(tmp_path)
    return tmp_path


def domain(folder: Path) -> AutosyncDomain:
    """NCF on AWS."""
    return read_autosync(folder)[0]


def test_every_domain_is_read_whatever_its_folders_are_called(folder: Path) -> None:
    domains = read_autosync(folder)
    names = [(domain.model, domain.cluster_name) for domain in domains]
    assert names == [(model, place) for model in ("ncf", "vgg16") for place in ("aws", "in-house")]
    assert all([trial.id for trial in each.trials] == ["first", "second"] for each in domains)
    assert not any(each.left_out for each in domains)
    first, second = domains[0].trials
    assert (first.average_s, second.average_s) == (0.2, pytest.approx(0.31))
    assert first.runtime_s == (0.21, 0.2, 0.19)


def test_variables_are_in_backward_order_and_a_gathered_one_is_sparse(folder: Path) -> None:
    variables = domain(folder).workload.variables
    dense = [("dense/bias", (4,), False), ("dense/kernel", (8, 4), False)]
    rows = [(v.name, v.shape, v.sparse) for v in variables]
    assert rows == [*dense, ("embedding", (50, 8), True)]


def test_the_resource_spec_becomes_a_cluster(folder: Path) -> None:
    hosts = domain(folder).trials[0].cluster.hosts
    rows = [(host.name, host.devices, host.link_bytes_per_s) for host in hosts]
    assert rows == [("10.0.0.1", 2, 25e9 / 8), ("10.0.0.2", 2, 1e9 / 8)]


def test_strategies_keep_all_choices(folder: Path) -> None:
    first, second = (trial.strategy.by_name for trial in domain(folder).trials)
    parts = first["embedding"]
    assert parts.partition is not None
    assert (parts.partition.axis, parts.partition.sizes) == (0, (17, 17, 16))
    assert [shard.placement for shard in parts.shards] == [0, 2, 0]
    assert parts.sparse is SparseHandling.GATHER_SCATTER
    shard = first["dense/kernel"].shards[0]
    assert (shard.synchronizer, shard.group) == (Synchronizer.ALL_REDUCE, 0)
    assert second["embedding"].shards[0].placement == 2
    dense = [second[name].shards[0] for name in ("dense/kernel", "dense/bias")]
    choices = [(shard.compressor, shard.group) for shard in dense]
    assert choices == [(Compressor.FP16, 0), (Compressor.FP16, 1)]


def test_only_local_replication_of_a_dense_variable_is_hierarchical(folder: Path) -> None:
    """AutoDist never replicates a sparse variable, whatever its strategy says."""
    for name, replicated in (("first", False), ("second", True)):
        path = folder / "ncf" / "aws" / "strategies" / name
        path.write_bytes(strategy([server(replicated=replicated)] * 3))
    hierarchical = [
        {name for name, choice in trial.strategy.by_name.items() if choice.shards[0].hierarchical}
        for trial in domain(folder).trials
    ]
    assert hierarchical == [set(), {"dense/kernel", "dense/bias"}]


def test_trials_that_were_read_can_be_planned(folder: Path) -> None:
    ncf = domain(folder)
    plans = [plan(trial.strategy, ncf.workload, trial.cluster.world_size) for trial in ncf.trials]
    assert [len(each.messages) for each in plans] == [4, 3]
    synchronizers = {message.synchronizer for message in plans[0].messages}
    assert synchronizers == {Synchronizer.PARAMETER_SERVER, Synchronizer.ALL_REDUCE}


def _left_out(folder: Path, name: str, data: bytes | str, place: str = "strategies") -> str:
    """Return why the first trial cannot be read with other contents of a file."""
    path = folder / "ncf" / "aws" / place / name
    path.write_bytes(data) if isinstance(data, bytes) else path.write_text(data)
    ncf = domain(folder)
    assert [trial.id for trial in ncf.trials] == ["second"]
    return ncf.left_out["first"]


def embedding(configuration: bytes) -> bytes:
    """A strategy that configures the embedding so and sends the rest by all-reduce."""
    return strategy([configuration, *[all_reduce(0)] * 2])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (STRATEGIES["first"][:-3], "is cut off"),
        (b"\x0b" + STRATEGIES["first"], "field of kind 3"),
        (b"\xff" * 12, "more than 10 bytes"),
        (embedding(server("10.0.0.9")), "node of the resource spec"),
        (embedding(server(staleness=3)), "staleness is 3"),
        (embedding(server(sync=False)), "server of 'embedding' has sync false"),
        (embedding(all_reduce(0, 3)), "compressor must be one of"),
        (embedding(b""), "has neither"),
        (embedding(field(5, "2,2") + server()), "cut along one axis"),
        (embedding(field(5, "x") + server()), "numbers with commas"),
        (strategy([all_reduce(0)] * 3, replicas=3), "a replica per device"),
        (field(3, field(1, "embedding") + all_reduce(0)), "lacks 'dense/bias'"),
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
    for nodes in ("[]", "[{gpus: [0]}]", "[{address: a, network_bandwidth: -1}]"):
        (folder / "ncf" / "aws" / "resource_spec.yml").write_text(f"nodes: {nodes}")
        assert set(domain(folder).left_out) == {"first", "second"}


def test_a_broken_graph_is_an_error(folder: Path) -> None:
    item = graph_item()
    unknown = field(2, field(1, "g:0") + field(2, "lost:0"))
    cases = {"cut off": item[:-2], "lacks 'all of them'": b"", "lacks 'lost'": item + unknown}
    for message, data in cases.items():
        (folder / "ncf" / "graph_item").write_bytes(data)
        with pytest.raises(InvalidInput, match=message):
            read_autosync(folder)


def test_a_folder_without_domains_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="MODEL/CLUSTER/strategies"):
        read_autosync(tmp_path)
