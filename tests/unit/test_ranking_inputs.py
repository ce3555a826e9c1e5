"""The inputs of the ranking benchmark: what a job knows without a probe, caches, and noise."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic_job import WORKLOAD

import autotune
from autotune.cluster import Cluster, CollectiveFit, Host, LinkFit, PeerFit
from autotune.cluster_file import read_cluster
from autotune.dataset.folder import domain_of, read_description, read_domain, read_sums
from autotune.features.extract import Extractor, job_extractor
from autotune.lowering.costs import EMULATED_COSTS, RuntimeCosts
from autotune.records import Accelerators, Measured, Role, TrialRequest
from autotune.rng import generator
from autotune.sampler.random import sample_many
from autotune.storage.store import Store
from autotune.strategy_space.op_fusion import OpFusionChoice
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.events import Event, Profiled, Proposal, Proposed, TrialFinished
from autotune.tuning.job import JobSpec
from benchmarks.ranking.calibrations import Calibrations
from benchmarks.ranking.json_lines import JsonLines
from benchmarks.ranking.median_noise import MEDIAN_SD, median_noise
from benchmarks.ranking.trials import (
    Campaign,
    ReplayedTimes,
    calibration_sources,
    of_domain,
    of_store,
    replay_sources,
)
from benchmarks.ranking.unprobed import without_probe
from benchmarks.ranking.wrong_replays import WRONG
from benchmarks.repository import ROOT, cluster_file
from benchmarks.stated_clusters import stated_cluster

PACKAGE = Path(autotune.__file__).parent
DATASETS = [ROOT / "datasets" / name for name in ("trials", "outcome_ratios")]
NAMES = ("a", "b", "c")
FILE = Cluster("c", tuple(Host(name, 1, 1.25e8, 5e-5, 1e10, 5e-6) for name in NAMES))
FIT = CollectiveFit("all_reduce", 3, 1e-3, 2e-8, 0.0, 1, 10**7)
PROBED = Cluster(
    "c",
    tuple(Host(name, 1, 1e8, 1e-4, 9e9, 1e-6, cores=4) for name in NAMES),
    fits=(FIT,),
    source="measured",
    link_fits=tuple(LinkFit(name, False, 1e8, 1e-4, 0.0, 0.0) for name in NAMES),
    measured_at="2026-11-27",
    software=(("torch", "2.13.0"),),
    measured_on="emulated",
    machine_cores=2,
    peer_fits=tuple(PeerFit(name, 2, True, 9e7, 1e-4, 0.0, 0.0) for name in NAMES),
)
PAIR = Cluster("pair", (Host("localhost", 2, 1e6, 5e-4, 1e6, 5e-4),))


def links(cluster: Cluster) -> list[tuple[float, ...]]:
    return [
        (host.link_bytes_per_s, host.latency_s, host.inner_bytes_per_s, host.inner_latency_s)
        for host in cluster.hosts
    ]


def campaign(stated: Cluster | None) -> Campaign:
    unprobed = job_extractor(WORKLOAD, without_probe(PROBED, stated), Accelerators.EMULATED, {})
    return Campaign("d", "m", "c", Extractor(WORKLOAD, PROBED, RuntimeCosts()), unprobed, ())


def test_a_replay_without_a_probe_knows_nothing_that_was_probed() -> None:
    wrong = WRONG["assumed"](campaign(FILE))
    assert links(wrong.cluster) == links(FILE)
    assert wrong.cluster.fits == wrong.cluster.link_fits == wrong.cluster.peer_fits == ()
    assert wrong.cluster.source == "assumed" and wrong.cluster.machine_cores == 2
    assert [host.cores for host in wrong.cluster.hosts] == [4, 4, 4]
    assert wrong.costs is EMULATED_COSTS
    faster = replace(
        PROBED, hosts=tuple(replace(host, link_bytes_per_s=2e8) for host in PROBED.hosts)
    )
    assert without_probe(faster, FILE) == wrong.cluster


@pytest.mark.parametrize(
    "stated",
    [None, replace(FILE, hosts=FILE.hosts[:2]), replace(FILE, source="measured")],
    ids=["no file", "other hosts", "a probe's file"],
)
def test_without_stated_links_they_are_those_of_an_unknown_machine(stated: Cluster | None) -> None:
    cluster = WRONG["assumed"](campaign(stated)).cluster
    assert links(cluster) == links(Cluster.local(1)) * 3
    assert [host.name for host in cluster.hosts] == list(NAMES) and cluster.peer_fits == ()


def test_the_links_of_a_domain_without_a_probe_are_those_of_its_dilated_file() -> None:
    domain = read_domain(DATASETS[1] / "vgg.four_hosts_mixed.dilated_2.ratio_1")
    described = of_domain(domain)
    probed, unprobed = described.extractor.cluster, described.unprobed.cluster
    file = read_cluster(cluster_file("four_hosts_mixed"))
    assert probed.peer_fits and not unprobed.peer_fits and not unprobed.fits
    assert unprobed.machine_cores == domain.cores
    rates = [host.link_bytes_per_s for host in unprobed.hosts]
    assert rates == [host.link_bytes_per_s / 2 for host in file.hosts]
    assert rates != [host.link_bytes_per_s for host in probed.hosts]
    assert [host.latency_s for host in unprobed.hosts] == [host.latency_s for host in file.hosts]


def test_every_domain_of_the_datasets_has_a_file_that_states_its_links() -> None:
    folders = [path for dataset in DATASETS for path in sorted(dataset.iterdir()) if path.is_dir()]
    for folder in folders:
        domain = domain_of(read_description(folder, read_sums(folder)), ())
        stated = stated_cluster(domain)
        assert stated is not None and stated.source == "assumed", folder
        assert links(without_probe(domain.cluster, stated)) == links(stated), folder


def test_other_wrong_replays_keep_measured_op_fusions() -> None:
    fused = OpFusionChoice("pair", (("add", "mul"),), 0.01, 0.1, 0.1, 0.0, {})
    extractor = Extractor(WORKLOAD, PROBED, None, (fused,))
    given = replace(campaign(FILE), extractor=extractor)
    for case in ("bandwidth", "traffic", "framework"):
        assert WRONG[case](given).fused == extractor.fused


def test_the_values_of_complete_lines_are_read_after_a_cut_off_one(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "lines.jsonl"
    lines = JsonLines(path)
    lines.append(["a", 1])
    lines.append(["b", {"c": 2.5}])
    path.write_text(path.read_text()[:-4])
    again = JsonLines(path)
    assert again.values == [["a", 1]]
    again.append(["d", 3])
    assert JsonLines(path).values == [["a", 1], ["d", 3]]


def test_calibrations_are_read_from_a_file_with_a_cut_off_line(tmp_path: Path) -> None:
    path = tmp_path / "calibrations.jsonl"
    path.write_text(json.dumps(["key", {"links": 0.1}, {}]) + '\n"stray"\n["cut o')
    replayed = ReplayedTimes(tmp_path / "times.jsonl")
    Calibrations([], [], replayed, path)
    JsonLines(path).append(["other", {}, {}])
    assert path.read_text().endswith('["cut o\n["other", {}, {}]\n')


def test_replays_with_other_measured_op_fusions_are_other_entries(tmp_path: Path) -> None:
    replayed = ReplayedTimes(tmp_path / "times.jsonl")
    choice = OpFusionChoice("pair", (("add", "mul"),), 0.01, 0.1, 0.1, 0.0, {})
    fusions = [(), (choice,), (replace(choice, forward_s=0.2),)]
    extractors = [Extractor(WORKLOAD, PROBED, None, each) for each in fusions]
    keys = {replayed.key(replace(campaign(FILE), extractor=each), []) for each in extractors}
    assert len(keys) == len(fusions)


def imported(files: Iterable[Path]) -> set[Path]:
    """Return the files of the package that these files import, directly or not, and these."""
    reached: set[Path] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        if file in reached:
            continue
        reached.add(file)
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names] + [node.module]
            elif not isinstance(node, ast.Import):
                continue
            places = [PACKAGE.parent / name.replace(".", "/") for name in names]
            files_of = [(place.with_suffix(".py"), place / "__init__.py") for place in places]
            waiting += [path for pair in files_of for path in pair if path.is_file()]
    return {file for file in reached if file.is_relative_to(PACKAGE)}


def test_the_caches_depend_on_all_code_that_replays_and_calibrations_import() -> None:
    replays = imported([PACKAGE / "features" / "extract.py", PACKAGE / "lowering" / "replayed.py"])
    assert PACKAGE / "costs" / "timing.py" in replays
    assert replays <= set(replay_sources())
    calibrations = imported([PACKAGE / "simulators" / "calibration.py"])
    assert calibrations - replays <= {*replay_sources(), *calibration_sources()}
    assert set(calibration_sources()) <= calibrations


def integrated_sd(n: int) -> float:
    """Return the standard deviation of the median of n standard normal values, on a grid.

    The density of the middle order statistic, or of the middle two (David and Nagaraja, Order
    Statistics, eqs. 2.1.6 and 2.2.1).
    """
    x = np.linspace(-7, 7, 1401)
    step = x[1] - x[0]
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    half = (n - 1) // 2
    tails = math.factorial(half) ** 2
    if n % 2:
        weight = math.factorial(n) / tails * (below * below[::-1]) ** half * density
        return math.sqrt(float((weight * x**2).sum() * step))
    lower = below**half * density
    upper = below[::-1] ** half * density
    joint = math.factorial(n) / tails * np.triu(np.outer(lower, upper))
    joint[np.diag_indices(len(x))] /= 2  # half of the cell lies above the diagonal
    mean = (x[:, None] + x[None, :]) / 2
    return math.sqrt(float((joint * mean**2).sum() * step**2))


def test_the_noise_of_a_median_is_that_of_normal_values() -> None:
    for n, sd in enumerate(MEDIAN_SD, start=1):
        assert sd == pytest.approx(integrated_sd(n), abs=1e-4), n
        assert median_noise(0.1, n) == 0.1 * sd
    assert median_noise(0.1, 2) == pytest.approx(0.1 / math.sqrt(2), abs=1e-5)


def test_many_trials_have_at_most_slightly_too_much_noise() -> None:
    for n in (len(MEDIAN_SD) + 1, len(MEDIAN_SD) + 2, 40, 101):
        assert 1.0 <= median_noise(1.0, n) / integrated_sd(n) < 1.032


def store_job(directory: Path, trials: list[tuple[Strategy, float]]) -> Campaign:
    """Measure strategies in a job of a new store, and return its campaign."""
    strategies = tuple({strategy.id: strategy for strategy, _ in trials}.values())
    proposals = tuple(Proposal(strategy, "sampled") for strategy in strategies)
    events: list[Event] = [
        Profiled(WORKLOAD, replace(PAIR, machine_cores=2), 1.0, {"torch": "2.13.0"}),
        Proposed(0, proposals, "none", "test", len(strategies), (), 2.0),
    ]
    for number, (strategy, step_s) in enumerate(trials):
        request = TrialRequest(number, strategy.id, Role.CANDIDATE, 1, 2)
        enacted = plan(strategy, WORKLOAD, 2)
        measured = Measured(((step_s, step_s),) * 2, 0.0)
        events.append(TrialFinished(request, measured, enacted.id, 3.0 + number))
    with Store.open(directory / "autotune.db") as store:
        store.create_job("job", JobSpec(("torchrun", "train.py"), 2, PAIR))
        for seq, event in enumerate(events):
            store.append("job", seq, event)
    [described] = of_store(directory)
    return described


def plans(count: int) -> list[Strategy]:
    """Return strategies, no two of which enact the same."""
    by_plan: dict[str, Strategy] = {}
    for strategy in sample_many(WORKLOAD, PAIR, SearchSpace.default(), 3 * count, 7):
        by_plan.setdefault(plan(strategy, WORKLOAD, 2).enacted_id, strategy)
    return list(by_plan.values())[:count]


def test_the_noise_of_a_store_is_that_of_its_repeated_trials(tmp_path: Path) -> None:
    draw = generator(0, "noise of a store")
    strategies = plans(30)
    repeated = [
        (strategy, (1 + place) * math.exp(0.02 * draw.standard_normal()))
        for _ in range(4)
        for place, strategy in enumerate(strategies)
    ]
    assert store_job(tmp_path, repeated).noise == pytest.approx(0.02, rel=0.3)


def test_the_noise_of_a_store_with_few_repeats_is_unknown(tmp_path: Path) -> None:
    measured = [(strategy, 1.0) for strategy in plans(4)]
    assert math.isnan(store_job(tmp_path, [*measured, measured[0]]).noise)


def test_a_job_of_a_store_without_a_probe_has_the_links_of_its_settings(tmp_path: Path) -> None:
    described = store_job(tmp_path, [(strategy, 1.0) for strategy in plans(2)])
    assert links(described.unprobed.cluster) == links(PAIR)
    assert described.unprobed.cluster.machine_cores == 2
    assert described.runtime == "torch, real accelerators"
