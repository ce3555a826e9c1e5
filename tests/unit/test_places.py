"""Where a job may run, and what is refused before anything is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.cluster import Cluster, Host
from autotune.errors import AutotuneError, InvalidInput
from autotune.jobs.places import refuse_elsewhere, refuse_impossible
from autotune.jobs.settings import read_settings, read_target, scheduled
from autotune.recordings.job_file import RecordedJob
from autotune.records import (
    REAL_CONDITIONS,
    Accelerators,
    Conditions,
    Measured,
    Network,
    Role,
    TrialRequest,
)
from autotune.tuning.events import TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_small.py"
RECORDING = Path(__file__).parents[2] / "datasets/gpu_traces/h100/resnet50.fp32"
EMULATED = Conditions(Network.EMULATED)


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: two hosts\nhosts:\n  - {name: a}\n  - {name: b}\n")
    return path


def test_a_job_goes_on_only_where_it_was_started() -> None:
    refuse_elsewhere(Conditions(Network.HOSTS), "10.0.0.1:6379")
    refuse_elsewhere(EMULATED, None)
    with pytest.raises(InvalidInput, match=r"started on a running Ray cluster.*give its --address"):
        refuse_elsewhere(Conditions(Network.HOSTS), None)
    for network, where in (
        (Network.EMULATED, "a testbed"),
        (Network.LOOPBACK, "this machine alone"),
    ):
        with pytest.raises(InvalidInput, match=f"started on {where}.*leave out --address"):
            refuse_elsewhere(Conditions(network), "10.0.0.1:6379")


def test_a_network_that_no_machine_emulates_is_refused_before_a_job_is_made() -> None:
    slow_inside = Cluster(
        "c", (Host("a", 2, 1e8, 5e-5, 1e10, 1.0), Host("b", 1, 1e8, 5e-5, 1e10, 5e-6))
    )
    refuse_impossible(slow_inside, Conditions(Network.LOOPBACK))
    with pytest.raises(AutotuneError, match=r"inner_latency|not possible"):
        refuse_impossible(slow_inside, EMULATED)


def spec_of(job_file: Path, address: str | None = None, **given: object) -> JobSpec:
    return read_settings([], given, job_file, address).spec


def test_explicit_settings_win_over_the_job_file_and_contradictions_are_refused(
    cluster_file: Path,
) -> None:
    job_file = cluster_file.with_name("job.yaml")
    command = f"command: torchrun --nproc-per-node 2 {SCRIPT}\n"
    emulated = "testbed: cluster.yaml\naccelerators: emulated\nbyte_scale: 4\n"
    job_file.write_text(command + emulated + "step_timeout: 5s\ntop_k: 3\n")
    spec = spec_of(job_file, top_k=5)
    assert (spec.top_k, spec.step_timeout_s) == (5, 5.0)
    assert replace(spec.conditions, round_robin=False) == Conditions(
        Network.EMULATED, Accelerators.EMULATED, 4.0
    )
    other = spec_of(job_file, byte_scale=2.0, accelerators="real").conditions
    assert other == Conditions(Network.EMULATED, byte_scale=2.0)
    one_host = cluster_file.with_name("one.yaml")
    one_host.write_text("name: one host\nhosts: [{name: a, devices: 2}]\n")
    plain = spec_of(job_file, cluster=one_host, byte_scale=1.0)
    assert plain.conditions.network is Network.LOOPBACK and plain.cluster.name == "one host"
    job_file.write_text(command + "testbed: cluster.yaml\ncluster: cluster.yaml\n")
    with pytest.raises(InvalidInput, match="a cluster or a testbed, not both"):
        spec_of(job_file)
    with pytest.raises(InvalidInput, match="byte_scale must be at least 1, but is 0"):
        read_target({"testbed": cluster_file, "byte_scale": 0.0}, None)
    assert read_target({}, "auto").conditions.network is Network.HOSTS


def test_emulated_accelerators_may_wait_for_the_times_of_a_recording() -> None:
    values = {"profile": RECORDING, "accelerators": "emulated"}
    profile = read_target(values, None).profile
    assert profile == RecordedJob.read(RECORDING).measured_workload(RECORDING)
    assert read_target({**values, "profile": RECORDING / "job.json"}, None).profile == profile


def test_a_command_for_several_machines_needs_ray_on_them_or_a_testbed(cluster_file: Path) -> None:
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", str(SCRIPT)]
    with pytest.raises(InvalidInput, match="joins 2, and neither --address nor --testbed is given"):
        read_settings(command, {}, None, None)
    assert read_settings(command, {}, None, "auto").spec.workers == 2
    assert read_settings(command, {"testbed": cluster_file}, None, None).spec.workers == 2


def test_a_file_of_several_hosts_needs_ray_on_them_or_a_testbed(cluster_file: Path) -> None:
    values = {"cluster": cluster_file}
    rule = "several hosts must be joined by Ray or emulated"
    with pytest.raises(InvalidInput, match=f"{rule}.* has 2 hosts, and neither --address nor"):
        read_target(values, None)
    assert read_target(values, "auto").conditions.network is Network.HOSTS
    assert read_target({"testbed": cluster_file}, None).conditions.network is Network.EMULATED


UNEVEN = "hosts:\n  - {name: a, bandwidth: 1GB/s%s}\n  - {name: b%s}\n"
NAMED_LINK = "hosts: [{name: a}, {name: b}]\nlinks: [{between: [a, b], bandwidth: 1MB/s}]\n"


@pytest.mark.parametrize(
    ("text", "unplaced"),
    [
        (UNEVEN % ("", ""), "a, b"),
        (UNEVEN % (", address: 10.0.0.1", ""), "b"),
        (NAMED_LINK, "a, b"),
    ],
)
def test_hosts_that_differ_need_the_address_of_their_node(
    cluster_file: Path, text: str, unplaced: str
) -> None:
    job_file = cluster_file.with_name("job.yaml")
    job_file.write_text(f"command: python {SCRIPT}\ncluster: cluster.yaml\n")
    assert spec_of(job_file, "auto").cluster.name == "two hosts"
    cluster_file.write_text(text)
    with pytest.raises(InvalidInput, match=f"has none for {unplaced}; add what `ray start`"):
        spec_of(job_file, "auto")
    cluster_file.write_text(UNEVEN % (", address: 10.0.0.1", ", address: 10.0.0.2"))
    assert [host.address for host in spec_of(job_file, "auto").cluster.hosts] == [
        "10.0.0.1",
        "10.0.0.2",
    ]


def test_round_robin_is_asked_for_where_ranks_wait_and_never_on_other_peoples_hosts() -> None:
    waiting = Conditions(Network.EMULATED, Accelerators.EMULATED)
    assert scheduled(waiting, 4000).round_robin
    assert not scheduled(EMULATED, 4000).round_robin
    assert not scheduled(Conditions(Network.HOSTS, Accelerators.EMULATED), 2).round_robin


def test_a_job_has_round_robin_only_if_all_its_trials_had_it() -> None:
    wanted = replace(EMULATED, round_robin=True)
    assert History((), 0.1).conditions(wanted) == wanted
    request = TrialRequest(0, "current-setup", Role.REFERENCE, 1, 1)
    held = [
        TrialFinished(request, Measured(((0.1,),)), None, 1.0, replace(EMULATED, round_robin=on))
        for on in (True, False, True)
    ]
    assert History(tuple(held), 0.1).conditions(REAL_CONDITIONS) == EMULATED
    assert History(tuple(held[:1]), 0.1).conditions(REAL_CONDITIONS) == wanted
