"""Hosts of the ranks: given, read or assumed, and given up if the clocks contradict them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from synthetic_traces import Job
from test_alignment import observations

from autotune.errors import InvalidInput
from autotune.profiling.alignment import align
from autotune.profiling.alignment.align import align_observations
from autotune.profiling.traces import read_job


def changed(folder: Path, rank: int, **fields: object) -> None:
    path = folder / f"rank{rank}.json.gz"
    with gzip.open(path) as file:
        data = json.load(file)
    path.write_bytes(gzip.compress(json.dumps(data | fields).encode(), 1))


def test_hosts_are_read_from_the_traces_and_a_caller_overrules_them(tmp_path: Path) -> None:
    Job(ranks=4).run().write(tmp_path)
    unknown = read_job(tmp_path)
    assert (unknown.hosts.names, unknown.hosts.source) == (("",) * 4, "")
    assert "--hosts" in unknown.hosts.text(range(4))
    for rank in range(4):
        changed(tmp_path, rank, host_name=f"node{rank // 2}")
    hosts = read_job(tmp_path).hosts
    assert (hosts.names, hosts.source) == (("node0", "node0", "node1", "node1"), "traces")
    assert hosts.text(range(4)) == "hosts: node0 (rank 0-1), node1 (rank 2-3); from traces"
    assert read_job(tmp_path, hosts="4").hosts.names == ("host 0",) * 4
    assert read_job(tmp_path, hosts="a, b,a,b").hosts.names == ("a", "b", "a", "b")
    for wrong in ("3", "0", "a,b", "a,,b,c"):
        with pytest.raises(InvalidInput, match=r"hosts must be|ranks per host"):
            read_job(tmp_path, hosts=wrong)


def test_the_job_file_of_a_recording_gives_the_hosts(tmp_path: Path) -> None:
    Job().run().write(tmp_path)
    ranks = [{"rank": 0, "host": "x"}, {"rank": 1, "host": "y"}]
    (tmp_path / "job.json").write_text(json.dumps({"ranks": ranks}))
    hosts = read_job(tmp_path).hosts
    assert (hosts.names, hosts.source) == (("x", "y"), "job file")


@pytest.mark.parametrize(("first", "names"), [(100, ("gpu-7", "gpu-7")), (900, ("", ""))])
def test_torchs_file_names_give_the_host_if_their_process_is_the_traces(
    tmp_path: Path, first: int, names: tuple[str, str]
) -> None:
    Job().run().write(tmp_path)
    for rank in range(2):
        name = f"gpu-7_{first + rank}.1694128201553.pt.trace.json.gz"
        (tmp_path / f"rank{rank}.json.gz").rename(tmp_path / name)
    assert read_job(tmp_path).hosts.names == names


def test_rising_device_numbers_suggest_hosts_and_equal_clocks_confirm_them(tmp_path: Path) -> None:
    offsets = (0.0, 0.0, 0.03, 0.03)
    job = Job(ranks=4, devices=(0, 1, 0, 1), jitter_us=4.0, offsets_s=offsets).read(tmp_path)
    assert job.hosts.names == ("host 0", "host 0", "host 1", "host 1") and job.hosts.assumed
    result = align(job, samples=0)
    assert abs(result.offset_s[1]) < 1e-6 and not result.notes
    assert abs(result.offset_s[3] - result.offset_s[2]) < 1e-6
    assert Job(ranks=2, devices=(0, 0)).read(tmp_path).hosts.names[:2] == ("host 0", "host 1")


def test_hosts_that_were_assumed_are_given_up_where_their_clocks_differ(tmp_path: Path) -> None:
    offsets = (0.0, 1e-4, 0.03, 0.03)
    job = Job(ranks=4, steps=5, devices=(0, 1, 0, 1), jitter_us=4.0, offsets_s=offsets)
    result = align(job.read(tmp_path), samples=0)
    np.testing.assert_allclose(result.offset_s, offsets, atol=4e-6)
    assert any("[0, 1]" in note and "assumed to be on one host" in note for note in result.notes)
    assert not any("[2, 3]" in note for note in result.notes)


def test_ranks_of_one_host_name_are_separated_if_the_order_of_events_demands_it() -> None:
    rng = np.random.default_rng(3)
    starts = rng.uniform(0, 1e-3, (20, 3)) + np.arange(20)[:, None]
    ends = starts.max(axis=1, keepdims=True) + 1e-3 + rng.uniform(0, 5e-6, (20, 3))
    offset = np.array([0.0, 0.0, 0.5])
    result = align_observations(observations(starts - offset, ends - offset, (0, 0, 0)), samples=0)
    np.testing.assert_allclose(result.offset_s, offset, atol=5e-6)
    assert any("said to be on one host" in note for note in result.notes)
    assert result.worst_slack_s == 0


def test_a_number_of_ranks_per_host_counts_ranks_and_not_traces(tmp_path: Path) -> None:
    """Ranks 8 to 11 were on the host of ranks 0 to 3, since theirs were the next traces."""
    Job(ranks=16, steps=1).run().write(tmp_path)
    for rank in (*range(4, 8), *range(12, 16)):
        (tmp_path / f"rank{rank}.json.gz").unlink()
    job = read_job(tmp_path, hosts="8")
    assert job.hosts.names == ("host 0",) * 4 + ("host 1",) * 4
    assert job.rank_numbers[4:] == (8, 9, 10, 11)
    with pytest.raises(InvalidInput, match="must divide the 16 ranks of the job, but is 5"):
        read_job(tmp_path, hosts="5")
