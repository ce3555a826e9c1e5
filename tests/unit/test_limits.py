"""Numbers of files are bounded where they enter: the message names the limit and the value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_job import job_spec

from autotune import limits
from autotune.cluster import FITTED, Cluster
from autotune.cluster_file import read_cluster
from autotune.errors import InvalidInput
from autotune.export import Timing
from autotune.tuning.job import SETTINGS, JobSpec
from autotune.tuning.settings import Kind
from autotune.workload import Variable, Workload
from runtime_rewriter.probe.operations import OPERATIONS

LARGE = {"name": "w", "shape": [10**6, 10**6], "ready_s": 1.0, "needed_s": 0.0}
FIT = (
    "{primitive: all_reduce, group_size: 2, alpha_s: 0, beta_s_per_byte: 0, relative_error: 0, "
    "smallest_bytes: 1, largest_bytes: 2, spread: 0}"
)


def workload(**change):
    data = {"model": "m", "variables": [LARGE], "forward_s": 1.0, "backward_s": 1.0}
    return Workload.from_data({**data, **change})


def variable(**change):
    return workload(variables=[{**LARGE, **change}])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: variable(shape=[10**9] * 2), "elements of 'w' must be from 0 to 70368744177664"),
        (lambda: variable(shape=[0, 2**62]), "must have extents from 0 to 70368744177664, but is"),
        (lambda: variable(shape=[1] * 65), "may have at most 64 dimensions, but has 65"),
        (lambda: variable(ready_s=-1), r"ready_s of 'w' \(seconds\) must be from 0 to .* is -1"),
        (lambda: variable(needed_s=1e9), r"needed_s of 'w' \(seconds\) must be .* to 2592000, but"),
        (lambda: workload(forward_s=-1e-9), r"forward_s of 'm' \(seconds\) must be from 0 to"),
        (lambda: workload(update_s=1e300), r"update_s of 'm' \(seconds\) must be from 0 to 25"),
        (lambda: workload(threads=-1), "threads of 'm' must be from 0 to 1000000, but is -1"),
        (lambda: workload(buffers=10**9), "buffers of 'm' must be from 0 to 1000000, but is 10000"),
        (lambda: workload(buffer_bytes=[2**60]), "buffer_bytes of 'm' must be from 0 to"),
        (
            lambda: Workload("m", tuple(Variable(f"v{n}", (2**45,)) for n in range(3))),
            "elements of 'm' must be from 0 to 70368744177664",
        ),
        (lambda: Timing(-1.0, 0.0, 0.0, 1), r"median_s of the closing comparison \(seconds\) must"),
    ],
)
def test_a_figure_of_a_workload_or_export_beyond_its_limit_is_refused(build, message):
    with pytest.raises(InvalidInput, match=message):
        build()


def test_a_model_of_a_million_million_parameters_on_thousands_of_devices_is_accepted():
    assert workload().variables[0].grad_bytes == 4 * 10**12
    hosts = tuple(replace(Cluster.local(8).hosts[0], name=f"h{n}") for n in range(4096))
    assert Cluster("large", hosts).world_size == 32_768
    with pytest.raises(InvalidInput, match="devices of cluster 'c' must be from 1 to 131072"):
        Cluster("c", tuple(replace(host, devices=64) for host in hosts))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("devices: 999999999", "devices of host 'a' must be from 1 to 131072, but is 999999999"),
        ("cores: -1", "cores of host 'a' must be from 0 to 131072, but is -1"),
        ("memory: 1e30", r"memory of host 'a' \(bytes\) must be from 0 to 9007199254740992, but"),
        ("bandwidth: 1e30GB/s", r"bandwidth of host 'a' \(bytes per second\) must be from 1 to"),
        ("latency: 999999h", r"latency of host 'a' \(seconds\) must be from 0 to 2592000, but"),
    ],
)
def test_a_figure_of_a_cluster_file_beyond_its_limit_is_refused(tmp_path, fields, message):
    path = tmp_path / "cluster.yaml"
    path.write_text(f"hosts: [{{name: a, {fields}}}]")
    with pytest.raises(InvalidInput, match=message):
        read_cluster(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("all_reduce", "all_reduced", "must be of one of all_reduce, .* but is of 'all_reduced'"),
        ("group_size: 2", "group_size: 0", "group_size of the fit of 'all_reduce' must be from 1"),
        ("largest_bytes: 2", "largest_bytes: 0", "smallest_bytes, up to largest_bytes .* is 1"),
        ("alpha_s: 0", "alpha_s: 1e300", r"alpha_s of the fit of 'all_reduce' \(seconds\) must"),
        ("beta_s_per_byte: 0", "beta_s_per_byte: 9", r"\(seconds per byte\) must be from 0 to 1,"),
        ("spread: 0", "spread: -1", "errors of the fit of 'all_reduce' must be from 0 to"),
    ],
)
def test_a_fit_that_nobody_measured_is_refused(tmp_path, old, new, message):
    path = tmp_path / "cluster.yaml"
    path.write_text(f"hosts: [{{name: a}}]\nfits: [{FIT}]")
    assert read_cluster(path).fits[0].primitive == "all_reduce"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InvalidInput, match=message):
        read_cluster(path)


def test_the_names_of_fits_are_the_operations_that_a_probe_times():
    assert set(FITTED) == set(OPERATIONS)


def test_every_count_and_time_of_a_job_has_a_largest_value():
    spec = job_spec()
    for setting in SETTINGS:
        if setting.field and setting.kind in (Kind.WHOLE, Kind.TIME):
            with pytest.raises(InvalidInput, match=f"{setting.name} must be .*at most"):
                setting.check(10**30)
    with pytest.raises(InvalidInput, match=r"samples_per_round must be .* but is 1000001"):
        replace(spec, samples_per_round=limits.MAX_COUNT + 1)
    with pytest.raises(InvalidInput, match="budget_time must be above 0 and at most 2592000"):
        JobSpec.from_data({**spec.to_data(), "max_seconds": 1e9})


def test_the_page_of_limits_names_each_limit():
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    for name, value in vars(limits).items():
        if name.startswith(("MAX_", "MIN_")):
            assert f"`{name}`" in page, name
            assert f"{int(value):,}" in page, (name, f"{int(value):,}")
