"""`autotune probe` on a local Ray cluster: a table, and a file for `autotune tune`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import error_output
from short_jobs import START_S

from autotune.cluster import Where
from autotune.cluster_file import cluster_yaml, read_cluster

ROOT = Path(__file__).parents[2]


def probe(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autotune", "probe", "--directory", str(directory / "jobs")]
    return subprocess.run(
        [*command, *words], cwd=directory, capture_output=True, text=True, timeout=START_S
    )


@pytest.mark.slow
@pytest.mark.job
def test_a_local_cluster_is_probed_into_a_file_that_reads_back_and_tunes(tmp_path) -> None:
    output = tmp_path / "probed.yaml"
    to_output = ("--output", str(output))
    done = probe(tmp_path, "--workers", "2", "--budget-time", "15s", *to_output, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    cluster = read_cluster(output)
    assert cluster.to_data() == report["cluster"] and report["output"] == str(output)
    assert report["conditions"]["network"] == "loopback"
    assert (cluster.source, cluster.world_size, len(cluster.hosts)) == ("measured", 2, 1)
    fit = cluster.fit("all_reduce", 2)
    assert fit is not None and fit.where is Where.WORLD and fit.sizes >= 2
    (link,) = cluster.link_fits
    assert link.inside and link.host == cluster.hosts[0].name
    assert dict(cluster.software)["torch"] and cluster.measured_at and cluster.hosts[0].cores > 0
    assert "probing 2 ranks" in done.stderr and "ETA" in done.stderr
    assert cluster.measured_on == "loopback of one machine"
    assert cluster_yaml(cluster) == output.read_text()
    again = probe(tmp_path, "--cluster", str(output), "--budget-time", "5s", *to_output)
    assert again.returncode == 0, again.stderr
    assert "all_reduce" in again.stdout
    assert f"cluster file: {output} [loopback of one machine]" in again.stdout
    logs = (tmp_path / "jobs" / "probe").glob("*/logs")
    assert sum(any(folder.iterdir()) for folder in logs) == 2
    assert read_cluster(output).hosts[0].name == cluster.hosts[0].name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (),
            "the number of ranks to probe with is not known; use --workers N, --cluster or "
            "--testbed cluster.yaml",
        ),
        (("--workers", "1"), "a probe needs at least 2 workers, but has 1"),
        (
            ("--workers", "3", "--cluster", "one.yaml"),
            "--workers must be the 2 devices of cluster 'cluster', but is 3",
        ),
        (("--cluster", "two.yaml"), "has 2 hosts, and neither --address nor --testbed is given"),
        (("--workers", "2", "--budget-time", "1s"), "--budget-time must be at least 5s, but is 1s"),
        (("--cluster", "none.yaml"), "cannot read none.yaml"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    tmp_path, words, message, monkeypatch, capsys
) -> None:
    (tmp_path / "one.yaml").write_text("hosts: [{name: a, devices: 2}]")
    (tmp_path / "two.yaml").write_text("hosts: [{name: a}, {name: b}]")
    monkeypatch.chdir(tmp_path)
    assert message in error_output(capsys, "probe", "--directory", "jobs", *words)
    assert not (tmp_path / "jobs").exists()
