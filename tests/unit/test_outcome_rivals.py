"""Every rival of the outcome benchmark can be enacted in every domain and matches its name."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.nn.parallel.distributed import _BucketCapacityConfig

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.jobs.campaign.generated_models import MODELS
from autotune.jobs.campaign.setups import Setup
from autotune.jobs.campaign.train_generated import module_of
from autotune.optimizer.bounds import least_transfer_s
from autotune.strategy_space.backend import buckets_of
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import SparseHandling, Synchronizer
from autotune.workload import Variable, Workload, model_id
from benchmarks.outcome.measure import CLUSTERS, DOMAINS
from benchmarks.outcome.results import sent_bytes
from benchmarks.outcome.rivals import BUCKET_CAPS_MIB, DDP_DEFAULT, RIVALS, bucket_sweep, rivals
from benchmarks.repository import ROOT, setup_of
from runtime_rewriter.emulation import timetable_of


def gpt_workload() -> Workload:
    """Return the GPT example's workload with its defaults; no times, since these are measured."""
    spec = importlib.util.spec_from_file_location("gpt_text", ROOT / "examples" / "gpt_text.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    parameters = list(example.GPT(2000, 64, 256, 4, 4, 0.1).named_parameters())
    variables = [Variable(name, tuple(parameter.shape)) for name, parameter in parameters]
    return Workload("gpt", tuple(variables[::-1]), backward_s=0.1)


WORKLOADS = {name: model.workload() for name, model in MODELS.items()}
WORKLOADS["gpt_text"] = gpt_workload()


def on_four_hosts(model: str) -> tuple[Workload, Cluster]:
    return WORKLOADS[model], read_cluster(DOMAINS[f"{model}.four_hosts"].cluster_file)


def sparse_names(workload: Workload) -> set[str]:
    return {variable.name for variable in workload.variables if variable.sparse}


def test_there_are_eight_domains_or_more_of_all_four_kinds_on_all_three_clusters():
    models = ("vgg", "densenet", "embedding", "gpt_text")
    assert len(DOMAINS) >= 8
    assert set(DOMAINS) == {f"{model}.{name}" for model in models for name in CLUSTERS}
    assert sparse_names(WORKLOADS["embedding"])
    vgg = WORKLOADS["vgg"]
    assert max(variable.grad_bytes for variable in vgg.variables) > 0.7 * vgg.grad_bytes
    assert len(WORKLOADS["densenet"].variables) == 364


@pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS)
def test_every_rival_is_enactable_in_every_domain(domain: Setup):
    workload, cluster = WORKLOADS[domain.model], read_cluster(domain.cluster_file)
    strategies = rivals(workload, cluster)
    elements = sum(variable.elements for variable in workload.variables)
    assert list(strategies) == list(RIVALS)
    for name, strategy in {**strategies, **bucket_sweep(workload, cluster.world_size)}.items():
        planned = plan(strategy, workload, cluster.world_size)
        assert refusal_reason(planned) is None, name
        assert sum(message.elements for message in planned.messages) == elements, name
        sparse = [message.slices for message in planned.messages if message.sparse != "dense"]
        assert {part.variable for parts in sparse for part in parts} == sparse_names(workload), name
        assert strategy.lossless
    across = {name for name, strategy in strategies.items() if strategy.cross_step}
    assert across == {"BytePS-like, across steps", "ByteScheduler-like"}
    assert set(rivals(workload, cluster, across_steps=False)) == set(RIVALS) - across


@pytest.mark.parametrize("model", ["vgg", "densenet", "gpt_text"])
def test_the_sweep_has_the_buckets_of_torch_for_each_bucket_cap(model: str):
    workload = WORKLOADS[model]
    names = [variable.name for variable in workload.variables]
    tensors = [torch.empty(variable.shape, device="meta") for variable in workload.variables]
    sparse, order = [False] * len(tensors), list(range(len(tensors)))
    sweep = bucket_sweep(workload, 4)
    swept = {tuple(sorted(buckets_of(plan(s, workload, 4)))) for s in sweep.values()}
    for cap in (None, *BUCKET_CAPS_MIB):
        limits = _BucketCapacityConfig.create(cap, None, use_python_reducer=False)  # type: ignore[arg-type]
        both = [limits.first_bucket_bytes_cap, limits.bucket_bytes_cap]
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, both, sparse, order)
        buckets = (tuple(names[position] for position in bucket) for bucket in theirs)
        assert tuple(sorted(buckets)) in swept, cap
    assert next(iter(sweep)) == DDP_DEFAULT


def test_schedulers_send_four_megabyte_pieces_and_earlier_layers_overtake():
    workload, cluster = on_four_hosts("vgg")
    strategies = rivals(workload, cluster)
    servers, all_reduce = Synchronizer.PARAMETER_SERVER, Synchronizer.ALL_REDUCE
    for name, synchronizer in (("BytePS-like", servers), ("ByteScheduler-like", all_reduce)):
        messages = plan(strategies[name], workload, 4).messages
        assert {message.synchronizer for message in messages} == {synchronizer}
        assert max(message.grad_bytes for message in messages) <= 4 * 2**20
        order = [message.slices[0].variable for message in messages]
        first, last = order.index("fc0.weight"), len(order) - 1 - order[::-1].index("fc0.weight")
        assert first < order.index("conv3_2.weight") < last


def test_servers_in_turn_hold_as_many_variables_each():
    workload, cluster = on_four_hosts("vgg")
    messages = plan(rivals(workload, cluster)["PS, round robin"], workload, 4).messages
    owners = {message.slices[0].variable: message.owner for message in messages}
    backwards = [owners[variable.name] for variable in reversed(workload.variables)]
    assert backwards == [turn % 4 for turn in range(32)]


def test_sparse_gradients_travel_as_rows_by_the_way_that_fits_the_synchronizer():
    strategies = rivals(*on_four_hosts("embedding"))
    handling = {name: rival.by_name["table.weight"].sparse for name, rival in strategies.items()}
    assert handling["single bucket"] is SparseHandling.ALL_GATHER
    assert handling["PS, load balanced"] is SparseHandling.GATHER_SCATTER


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
    DDP(module)(torch.ones(4)).square().mean().backward()
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
    workload, cluster = WORKLOADS[model], read_cluster(setup_of(model, "four_hosts").cluster_file)
    transfer_s = least_transfer_s(cluster, sent_bytes(workload))
    assert 0.1 < workload.compute_s + transfer_s < 0.5
    assert 1 / 3 < transfer_s / workload.compute_s < 3
