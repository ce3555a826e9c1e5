"""A compressor that an installed distribution adds, from its entry point to costs and memory."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_cluster import FREE

from autotune.cluster import Cluster
from autotune.errors import InvalidInput, InvalidStrategy
from autotune.lowering.lower import Lowering
from autotune.memory.plan_buffers import bytes_always, plan_buffers
from autotune.recordings.memory_profile import Replica
from autotune.sampler.job_space import JobSpace
from autotune.sampler.random import sample_many
from autotune.strategy_space.compressors import COMPRESSORS
from autotune.strategy_space.describe import compressor_text
from autotune.strategy_space.enactable import refusal_reason, scaled_space
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    Compressor,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.tuning.events import Profiled
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.workload import Variable, Workload
from runtime_rewriter.pytorch.exchange.payloads import padded_elements, whole_payload

VARIABLE = Variable("v", (1001, 300), ready_s=0.06, needed_s=0.001)
WORKLOAD = Workload("m", (VARIABLE,), (), 0.05, 0.06)
CLUSTER = Cluster.local(4)


@pytest.fixture
def four_bit(monkeypatch: pytest.MonkeyPatch, example_plugin: Path) -> Iterator[Compressor]:
    monkeypatch.syspath_prepend(str(example_plugin))
    with COMPRESSORS.separate():
        yield Compressor("four_bit")
    Compressor._value2member_map_.pop("four_bit")


def one_shard(*shard: Any) -> Strategy:
    return Strategy((VariableStrategy("v", (Shard(*shard),)),))


def planned(compressor: Compressor, synchronizer: Synchronizer = Synchronizer.ALL_REDUCE) -> Plan:
    placement = 1 if synchronizer is Synchronizer.PARAMETER_SERVER else None
    return plan(one_shard(synchronizer, compressor, placement), WORKLOAD, 4)


def test_a_strategy_and_a_plan_store_its_name(four_bit: Compressor) -> None:
    strategy = one_shard(Synchronizer.ALL_REDUCE, four_bit)
    again = Strategy.from_json(strategy.to_json())
    assert '"compressor":"four_bit"' in strategy.to_json()
    assert again.id == strategy.id
    assert again.variables[0].shards[0].compressor is four_bit
    assert Plan.from_json(planned(four_bit).to_json()) == planned(four_bit)
    assert pickle.loads(pickle.dumps(four_bit)) is four_bit  # noqa: S301
    assert four_bit not in tuple(Compressor)


@pytest.mark.parametrize("refused", ["", "they work on tensors of PyTorch"])
def test_a_job_draws_it_where_the_runtime_has_it(four_bit: Compressor, refused: str) -> None:
    profiled = Profiled(WORKLOAD, CLUSTER, 0.0, {}, plugins_refused=refused)
    space = JobSpace(JobSpec(("python", "t.py"), 4, CLUSTER, lossy=True)).space(
        History((profiled,), 0.1)
    )
    assert (four_bit in space.compressors) is not bool(refused)
    assert set(Compressor) <= set(space.compressors)
    assert (f"no compressors of plugins: {refused}" in profiled.limits) is bool(refused)


def test_plan_replay_and_memory_use_its_description(four_bit: Compressor) -> None:
    (message,) = planned(four_bit).messages
    assert message.wire_bytes == 8 + 150_150
    assert refusal_reason(planned(four_bit)) is None
    for kind in (Synchronizer.ALL_REDUCE, Synchronizer.PARAMETER_SERVER):
        plans = [planned(compressor, kind) for compressor in (Compressor.NONE, four_bit)]
        seconds = [Lowering(WORKLOAD, CLUSTER).step_s(one) for one in plans]
        assert min(seconds) > 0 and seconds[0] != seconds[1]
        payload = whole_payload(message, 1, torch.zeros(padded_elements(message, 4)))
        buffers = plan_buffers(planned(four_bit, kind), WORKLOAD, Replica(rank=1, ddp=False), 4)
        sent = next(one for one in buffers if one.what == "what is sent")
        assert sent.bytes // 8 * 8 == sent.bytes >= payload.bytes.numel() - 8
        assert any(one.what == "residual" for one in buffers)
        assert bytes_always(buffers) > 300_300 * 4


def test_each_payload_costs_its_encoding_and_every_decoding(four_bit: Compressor) -> None:
    """An all-reduce has a row for each of four ranks; what is encoded is decoded for its loss."""
    (batch,) = Lowering(WORKLOAD, CLUSTER, FREE).messages.batches(planned(four_bit).messages)
    encoded_s, summed_s, read_s = (float(timed.step.prepare_s[0]) for timed in batch.steps)
    row_s, element_s = 1e-3 + 5e-4, 3e-9 + 2e-9
    assert encoded_s == pytest.approx(4 * row_s + element_s * VARIABLE.elements)
    assert read_s == pytest.approx(4 * 5e-4 + 2e-9 * VARIABLE.elements)
    assert summed_s == pytest.approx(read_s + row_s + element_s * VARIABLE.elements / 4)


def test_the_search_space_has_it_if_installed(four_bit: Compressor) -> None:
    space = SearchSpace.default(lossy=True)
    assert space.compressors == (*Compressor, four_bit)
    assert four_bit not in scaled_space(space, 8).compressors
    only = replace(space, compressors=(Compressor.NONE, four_bit))
    drawn = sample_many(WORKLOAD, CLUSTER, only, 20, 0)
    used = {shard.compressor for one in drawn for shard in one.variables[0].shards}
    assert used == {Compressor.NONE, four_bit}


def test_an_assumed_cost_is_stated(four_bit: Compressor) -> None:
    assert four_bit.description.costs is not None
    assert four_bit.description.costs.source == "assumed"
    assert compressor_text(planned(four_bit).messages[0]) == "four_bit (cost assumed)"


def test_an_unknown_name_lists_the_known_ones_and_the_entry_point_group() -> None:
    rule = (
        "there is no compressor 'six_bit'; known are none, fp16, bf16, int8, top_k, power_sgd.*; "
        "install the distribution that adds it as an entry point in 'autotune.compressors'"
    )
    data = one_shard(Synchronizer.ALL_REDUCE).to_data()
    data["variables"][0]["shards"][0]["compressor"] = "six_bit"
    with pytest.raises(InvalidInput, match=rule):
        Strategy.from_data(data)
    with pytest.raises(InvalidStrategy, match=rule):
        Compressor("six_bit")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"name": "other"}, "its name must be that of its entry point, but is 'other'"),
        ({"encode": None, "costs": None}, "but has no encode, costs"),
        ({"error_feedback": False}, "a quantiser keeps what it loses: set error_feedback"),
        ({"wire_dtype": "float16"}, "no wire_dtype"),
        (None, "must be a CompressorDescription, but is a str"),
    ],
)
def test_an_invalid_description_is_refused(change: Any, rule: str, four_bit: Compressor) -> None:
    description: Any = "text"
    if change is not None:
        description = replace(four_bit.description, **({"name": "bad"} | change))
    COMPRESSORS.register("bad", description)
    with pytest.raises(InvalidInput, match=rule):
        Compressor("bad")
