"""Campaigns: times at a ratio of computation to communication, one commit, the time left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_worlds import cluster, model

from autotune.cluster import PairLink
from autotune.errors import InvalidInput
from autotune.jobs.campaign.balance import balanced, ring_s
from autotune.jobs.campaign.commit import CHECKOUT, demand_one_commit
from autotune.jobs.campaign.dilation import dilated
from autotune.jobs.campaign.generated_models import MODELS
from autotune.jobs.campaign.progress import LINE_EVERY_S, Progress
from autotune.jobs.campaign.session import portable
from autotune.jobs.campaign.setups import TRAIN_VARIED, Setup, varied
from autotune.records import Accelerators, Failed, FailureKind
from autotune.workload import Variable

SETUP = Setup("small", Path("up.yaml"), ("train.py", "--epochs", "3"))


def test_a_ring_sends_dense_bytes_twice_but_for_one_share_and_gathers_rows():
    """The slowest of four hosts carries 2 * 3/4 of 4000 bytes, and 3 times 10 rows of 40 bytes."""
    table = Variable("t", (100, 10), sparse=True, touched_rows=10.0)
    workload = model(Variable("w", (1000,)), table)
    assert ring_s(workload, cluster(1e3, 5e2, 1e3, 1e3)) == pytest.approx((6000 + 1200) / 500)
    assert ring_s(workload, cluster(1e3, 1e3, devices=2)) == pytest.approx((6000 + 1200) / 1e3)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_all_times_are_scaled_to_the_ratio(ratio):
    workload, hosts = MODELS["embedding"].workload(), cluster(1e8, 2e8)
    first = replace(workload.variables[0], script_read_s=0.001)
    workload = replace(workload, variables=(first, *workload.variables[1:]))
    scaled = balanced(workload, hosts, ratio)
    assert scaled.compute_s == pytest.approx(ratio * ring_s(workload, hosts))
    assert scaled.source == "assumed" and scaled.id == workload.id
    factor = scaled.compute_s / workload.compute_s
    for mine, theirs in zip(scaled.variables, workload.variables, strict=True):
        assert mine.ready_s == pytest.approx(theirs.ready_s * factor)
        assert mine.needed_s == pytest.approx(theirs.needed_s * factor)
    assert scaled.variables[0].script_read_s == pytest.approx(0.001 * factor)
    assert scaled.update_s == pytest.approx(workload.update_s * factor)


def test_a_ratio_needs_computation_and_emulated_accelerators():
    with pytest.raises(InvalidInput, match="the ratio is 0 and"):
        balanced(MODELS["vgg"].workload(), cluster(1e8, 1e8), 0)
    with pytest.raises(InvalidInput, match="'small' computes for real"):
        replace(SETUP, accelerators=Accelerators.REAL, ratio=1.0)
    assert replace(SETUP, ratio=0.5).name == "small.up.ratio_0.5"


def test_dilated_hosts_compute_and_send_more_slowly_in_the_same_ratio():
    hosts = cluster(1e8, 2e8, links=(PairLink(("a", "b"), 5e7, 0.25),))
    slower = dilated(hosts, 4)
    assert [host.link_bytes_per_s for host in slower.hosts] == [2.5e7, 5e7]
    assert slower.pair_links == (PairLink(("a", "b"), 1.25e7, 0.25),)
    restored = (replace(host, link_bytes_per_s=4 * host.link_bytes_per_s) for host in slower.hosts)
    assert tuple(restored) == hosts.hosts, "nothing else differs"
    workload = MODELS["vgg"].workload()
    times = [balanced(workload, each, 1.0).compute_s for each in (hosts, slower)]
    assert times[1] == pytest.approx(4 * times[0])
    assert dilated(hosts, 1) is hosts


def test_a_dilation_needs_emulated_hosts_and_a_ratio():
    with pytest.raises(InvalidInput, match="but is 2 for 'small'"):
        replace(SETUP, dilation=2)
    with pytest.raises(InvalidInput, match="above 1 needs emulated hosts"):
        replace(SETUP, dilation=2, ratio=1.0, address="head:6379")
    assert replace(SETUP, dilation=2, ratio=1.0).name == "small.up.dilated_2.ratio_1"


def test_a_varied_setup_runs_the_same_script_with_the_options_before_it():
    assert varied(SETUP) is SETUP
    words = varied(SETUP, {"static_graph": True}, "fp16", 64).script
    assert words[0] == str(TRAIN_VARIED) and words[2:] == SETUP.script
    assert words[1] == '{"ddp": {"static_graph": true}, "hook": "fp16", "spare_memory_mib": 64}'


def test_a_failure_names_files_by_their_places_in_the_checkout():
    script = "autotune/jobs/campaign/train_varied.py"
    failed = Failed(FailureKind.CRASH, f"RuntimeError: no room (at {CHECKOUT / script}:73)", 1)
    assert portable(failed).message == f"RuntimeError: no room (at {script}:73)"
    elsewhere = replace(failed, message="no room (at <script>/train.py:3)")
    assert portable(elsewhere) == elsewhere


@pytest.mark.parametrize(
    ("recorded", "now", "reason"),
    [
        ((), "abc-dirty", "has changes or is none: abc-dirty"),
        ((), "", "has changes or is none: unknown"),
        (("abc", "def"), "abc", "this is abc, but earlier sessions were at def"),
    ],
)
def test_everything_is_measured_at_one_commit_without_changes(recorded, now, reason):
    with pytest.raises(InvalidInput, match=reason):
        demand_one_commit(recorded, now)


def test_sessions_of_the_same_commit_go_on():
    demand_one_commit(("abc", "abc"), "abc")


def test_the_time_that_is_left_follows_the_pace_of_this_run():
    now_s = [0.0]
    lines: list[str] = []
    progress = Progress(10, 4, lines.append, clock_s=lambda: now_s[0])
    progress.count("first")
    assert lines == []
    now_s[0] = LINE_EVERY_S
    progress.count("second")
    assert lines == ["second | 7.50 s a trial with all around it, about 4 left (ETA 0:00:30)"]
