"""Every rival of the outcome benchmark can be enacted in every domain and matches its name."""

from __future__ import annotations

import importlib.util
import itertools
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BucketCapacityConfig

from autotune.cluster import Cluster
from autotune.jobs.campaign.domains import DILATIONS, GENERATED, SCRIPTS, seeded_domains
from autotune.jobs.campaign.generated_models import MODELS
from autotune.jobs.campaign.setups import Setup
from autotune.jobs.campaign.train_generated import module_of
from autotune.optimizer.bounds import least_synchronization_s
from autotune.strategy_space.backend import buckets_of
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import SparseHandling, Synchronizer
from autotune.workload import Variable, Workload, model_id
from benchmarks.outcome.measure import DOMAINS, UNDILATED
from benchmarks.outcome.rivals import (
    ACROSS,
    BUCKET_CAPS_MIB,
    BYTE_SCHEDULER,
    BYTEPS,
    DDP,
    DDP_SWEPT,
    HIERARCHICAL,
    ONE_SHOT,
    SERVERS,
    ZERO2,
    families,
)
from benchmarks.repository import ROOT, setup_of
from runtime_rewriter.emulation import timetable_of


def workload_of(script: str) -> Workload:
    """Return an example's workload with its defaults; no times, since these are measured."""
    spec = importlib.util.spec_from_file_location(script, ROOT / "examples" / f"{script}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    gpt = script == "gpt_text"
    module = example.GPT(2000, 64, 256, 4, 4, 0.1) if gpt else example.ResNet(32)
    parameters = list(module.named_parameters())
    variables = [Variable(name, tuple(parameter.shape)) for name, parameter in parameters]
    return Workload(script, tuple(variables[::-1]), backward_s=0.1)


@cache  # and not where every process of a test run collects
def workloads() -> dict[str, Workload]:
    """The workload of each model."""
    scripts = {name: workload_of(script) for name, (script, _) in SCRIPTS.items()}
    return {name: model.workload() for name, model in MODELS.items()} | scripts


LARGEST = "densenet"
"""The model with the most variables, which takes nearly as long as the others together."""


def on(model: str, cluster: str = "four_hosts") -> tuple[Workload, Cluster]:
    return workloads()[model], UNDILATED[f"{model}.{cluster}.ratio_1"].cluster()


def sparse_names(workload: Workload) -> set[str]:
    return {variable.name for variable in workload.variables if variable.sparse}


def test_every_model_meets_every_cluster_and_a_drawn_third_has_other_ratios():
    at_one = [setup for setup in DOMAINS.values() if setup.ratio == 1]
    pairs = {(setup.model, setup.cluster_file.stem) for setup in at_one}
    assert pairs == set(itertools.product((*GENERATED, *SCRIPTS), DILATIONS)) and len(pairs) >= 20
    for ratio in (0.5, 2):
        drawn = {(s.model, s.cluster_file.stem) for s in DOMAINS.values() if s.ratio == ratio}
        assert drawn < pairs and len(drawn) == len(pairs) / 3
    ranks = [setup.cluster().world_size for setup in at_one]
    assert {min(ranks), max(ranks)} == {2, 8}
    cores = {count / setup.dilation for count, setup in zip(ranks, at_one, strict=True)}
    assert cores == {2}, "each rank has the work of one of two cores"
    assert "--clip-grad-norm" in UNDILATED["gpt_text_clipped.four_hosts.ratio_1"].script
    assert len(seeded_domains(ROOT)) == 4 and seeded_domains(ROOT) < set(DOMAINS)
    assert sparse_names(workloads()["embedding"])
    vgg = workloads()["vgg"]
    assert max(variable.grad_bytes for variable in vgg.variables) > 0.7 * vgg.grad_bytes
    assert len(workloads()["densenet"].variables) == 364


@pytest.mark.parametrize(
    "domain",
    [
        pytest.param(
            setup,
            marks=[pytest.mark.slow] * ("two_devices" not in setup.name or setup.model == LARGEST),
        )
        for setup in DOMAINS.values()
        if setup.ratio == 1
    ],
    ids=lambda setup: setup.name,
)
def test_every_setting_of_every_rival_is_enactable_in_every_domain(domain: Setup):
    workload, cluster = workloads()[domain.model], domain.cluster()
    rivals = families(workload, cluster)
    elements = sum(variable.elements for variable in workload.variables)
    hierarchical = {HIERARCHICAL} if domain.cluster_file.stem.endswith("two_devices") else set()
    assert set(rivals) == {DDP, BYTE_SCHEDULER, BYTEPS, ZERO2, SERVERS, ONE_SHOT} | hierarchical
    for name, settings in rivals.items():
        planned = [plan(strategy, workload, cluster.world_size) for strategy in settings.values()]
        assert len(set(planned)) == len(planned), "settings differ"
        for one, strategy in zip(planned, settings.values(), strict=True):
            assert refusal_reason(one) is None, name
            assert sum(message.elements for message in one.messages) == elements, name
            sparse = [message.slices for message in one.messages if message.sparse != "dense"]
            sent = {part.variable for parts in sparse for part in parts}
            assert sent == sparse_names(workload), name
            assert strategy.lossless
    across = {
        name: {strategy.cross_step for strategy in settings.values()}
        for name, settings in rivals.items()
    }
    assert across.pop(BYTE_SCHEDULER) == across.pop(ONE_SHOT) == {True}
    assert across.pop(BYTEPS) == {True, False} and set().union(*across.values()) == {False}
    forbidden = families(workload, cluster, across_steps=False)
    assert set(rivals) - set(forbidden) == {BYTE_SCHEDULER, ONE_SHOT}
    assert not any(ACROSS in setting for setting in forbidden[BYTEPS])


@pytest.mark.parametrize(
    "model", ["vgg", pytest.param(LARGEST, marks=pytest.mark.slow), "gpt_text"]
)
def test_the_sweep_has_the_buckets_of_torch_for_each_bucket_cap(model: str):
    workload = workloads()[model]
    names = [variable.name for variable in workload.variables]
    tensors = [torch.empty(variable.shape, device="meta") for variable in workload.variables]
    sparse, order = [False] * len(tensors), list(range(len(tensors)))
    sweep = families(workload, on(model)[1])[DDP]
    swept = {tuple(sorted(buckets_of(plan(s, workload, 4)))) for s in sweep.values()}
    lists = [
        [float(cap) for cap in name.partition("=[")[2].rstrip("]").split(", ")]
        for name in sweep
        if name.startswith("bucket_cap_mb_list")
    ]
    assert len(lists) > 3
    for cap in (None, *BUCKET_CAPS_MIB, *lists):
        single, several = (None, cap) if isinstance(cap, list) else (cap, None)
        limits = _BucketCapacityConfig.create(single, several, use_python_reducer=False)  # type: ignore[arg-type]
        both = [limits.first_bucket_bytes_cap, limits.bucket_bytes_cap]
        caps = list(limits.per_bucket_bytes_caps) or both
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, caps, sparse, order)
        buckets = (tuple(names[position] for position in bucket) for bucket in theirs)
        assert tuple(sorted(buckets)) in swept, cap
    assert next(iter(sweep)) == DDP_SWEPT


def test_schedulers_send_four_megabyte_pieces_and_earlier_layers_overtake():
    workload, cluster = on("vgg")
    rivals = families(workload, cluster)
    direct, all_reduce = Synchronizer.DIRECT_EXCHANGE, Synchronizer.ALL_REDUCE
    for name, synchronizer in ((BYTEPS, direct), (BYTE_SCHEDULER, all_reduce)):
        messages = plan(rivals[name]["its default"], workload, 4).messages
        assert {message.synchronizer for message in messages} == {synchronizer}
        assert max(message.grad_bytes for message in messages) <= 4 * 2**20
        order = [message.slices[0].variable for message in messages]
        first, last = order.index("fc0.weight"), len(order) - 1 - order[::-1].index("fc0.weight")
        assert first < order.index("conv3_2.weight") < last


def test_servers_in_turn_hold_as_many_variables_each():
    workload, cluster = on("vgg")
    settings = families(workload, cluster)[SERVERS]
    messages = plan(settings["in turn, 4 in flight"], workload, 4).messages
    owners = {message.slices[0].variable: message.shares.index(1.0) for message in messages}
    backwards = [owners[variable.name] for variable in reversed(workload.variables)]
    assert backwards == [turn % 4 for turn in range(32)]


def test_sparse_gradients_travel_as_rows_by_the_way_that_fits_the_synchronizer():
    rivals = families(*on("embedding"))
    bucket, server = rivals[DDP][DDP_SWEPT], rivals[SERVERS]["balanced, 2 in flight"]
    assert bucket.by_name["table.weight"].sparse is SparseHandling.ALL_GATHER
    assert server.by_name["table.weight"].sparse is SparseHandling.GATHER_SCATTER


def test_hierarchical_rivals_sum_within_hosts_first():
    workload, cluster = on("vgg", "four_hosts_two_devices")
    settings = families(workload, cluster)[HIERARCHICAL]
    shards = {s.hierarchical for one in settings.values() for c in one.variables for s in c.shards}
    assert shards == {True} and len(settings) > 3


@pytest.fixture
def alone():
    """Start a world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_script_builds_the_variables_of_its_workload_and_can_be_waited_for(model, alone):
    workload, module = model.workload(), module_of(model)
    parameters = list(module.named_parameters())
    shapes = ((name, tuple(parameter.shape), "float32") for name, parameter in parameters)
    assert workload.id == model_id(shapes)
    assert workload.edges == tuple((number, number + 1) for number in range(len(parameters) - 1))
    assert timetable_of(workload).compute_s == pytest.approx(model.step_s)
    DistributedDataParallel(module)(torch.ones(4)).square().mean().backward()
    sparse = {
        name: variable.grad.coalesce() for name, variable in parameters if variable.grad.is_sparse
    }
    touched = {
        variable.name: variable.touched_rows for variable in workload.variables if variable.sparse
    }
    assert {name: len(gradient.values()) for name, gradient in sparse.items()} == touched


@pytest.mark.parametrize("model", MODELS)
def test_steps_are_as_long_as_computing_and_sending_take_on_even_links(model: str):
    """At 1 Gbit/s, sending and computing without overlap take 100 to 500 ms; neither is small."""
    workload, cluster = workloads()[model], setup_of(model, "four_hosts").cluster()
    transfer_s = least_synchronization_s(workload, cluster)
    assert 0.1 < workload.compute_s + transfer_s < 0.5
    assert 1 / 3 < transfer_s / workload.compute_s < 3
