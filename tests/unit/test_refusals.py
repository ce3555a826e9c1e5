"""What the PyTorch runtime cannot enact is told from the plan alone: the message, the rule and what
it asks for.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from autotune.errors import InvalidInput, InvalidStrategy
from autotune.strategy_space.enactable import refusal_reason, scaled_refusal_reason, scaled_space
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer
from runtime_rewriter.pytorch.agreement import check_fit

WHOLE = Message((TensorSlice("w", 12),), Synchronizer.ALL_REDUCE, Compressor.NONE, "float32")
TWO = (TensorSlice("w", 12), TensorSlice("v", 3))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (
            {"compressor": Compressor.FP16, "dtype": "complex64"},
            "complex gradients travel uncompressed, but the compressor is fp16",
        ),
        ({"ranks": (0,)}, r"every rank takes part in a message, but the plan names \(0,\)"),
        (
            {"synchronizer": Synchronizer.PARAMETER_SERVER},
            "owner must be a rank below 2, but is None",
        ),
        (
            {"synchronizer": Synchronizer.REDUCE_BROADCAST, "owner": 2},
            "owner must be a rank below 2, but is 2",
        ),
        (
            {"sparse": SparseHandling.ALL_GATHER, "slices": TWO},
            r"rows of a sparse gradient travel alone, .* holds 2 slice\(s\)",
        ),
        (
            {"sparse": SparseHandling.ALL_GATHER, "slices": (TensorSlice("w", 6, 1, 0, 2),)},
            "whole or cut along axis 0",
        ),
        (
            {"sparse": SparseHandling.ALL_GATHER, "compressor": Compressor.INT8},
            "travel as they are or as fp16 or bf16, but the compressor is int8; change it or set sparse = dense",
        ),
        (
            {"compressor": Compressor.INT8, "dtype": "bfloat16"},
            "compressor int8 needs float32 or float64 gradients, but these are bfloat16",
        ),
        (
            {"compressor": Compressor.TOP_K, "ratio": 0.1, "slices": (TensorSlice("w", 2**31),)},
            "top_k sends int32 indices, but the message has 2147483648 elements; cut it to at most 2147483647",
        ),
        (
            {"sparse": SparseHandling.GATHER_SCATTER},
            "sparse = gather_scatter needs parameter_server, but the synchronizer is all_reduce",
        ),
        (
            {
                "sparse": SparseHandling.ALL_GATHER,
                "synchronizer": Synchronizer.PARAMETER_SERVER,
                "owner": 0,
            },
            "sparse = all_gather needs all_reduce or reduce_scatter_all_gather, but the synchronizer is parameter_server",
        ),
        (
            {
                "sparse": SparseHandling.ALL_GATHER,
                "synchronizer": Synchronizer.REDUCE_BROADCAST,
                "owner": 0,
            },
            "but the synchronizer is reduce_broadcast",
        ),
    ],
)
def test_a_message_that_cannot_be_enacted_is_named_with_the_rule(change, rule):
    made = Plan("model", 2, (WHOLE, replace(WHOLE, **change)))
    reason = refusal_reason(made)
    assert reason is not None and reason.startswith("message 1 (")
    assert re.search(rule, reason), reason
    assert refusal_reason(replace(made, messages=(WHOLE,))) is None


@pytest.mark.parametrize(("cross_step", "in_flight"), [(False, 2), (True, 0), (True, 3)])
def test_messages_in_flight_are_one_within_the_step_and_few_across_it(cross_step, in_flight):
    made = Plan("model", 2, (WHOLE,), cross_step, in_flight=in_flight)
    assert refusal_reason(made) == (
        f"in_flight must be from 1 to 2 across steps and 1 within the step, but is {in_flight}, cross_step: {cross_step}"
    )
    assert refusal_reason(replace(made, cross_step=True, in_flight=2)) is None


@pytest.mark.parametrize("most", [0, 3])
def test_a_search_space_has_no_more_in_flight_than_a_strategy_may(most):
    with pytest.raises(
        InvalidInput, match=f"most_in_flight of a search space must be from 1 to 2, but is {most}"
    ):
        replace(SearchSpace.default(), most_in_flight=most)


@pytest.mark.parametrize("order", [(0, 0), (0,), (0, 1, 2)])
def test_a_ring_order_names_each_rank_once(order):
    assert "ring_order must name each of the 2 ranks once" in str(
        refusal_reason(Plan("model", 2, (WHOLE,), ring_order=order))
    )
    assert refusal_reason(Plan("model", 2, (WHOLE,), ring_order=(1, 0))) is None


def test_rows_of_a_sparse_gradient_may_be_cast():
    for compressor in (Compressor.NONE, Compressor.FP16, Compressor.BF16):
        rows = replace(WHOLE, sparse=SparseHandling.ALL_GATHER, compressor=compressor)
        assert refusal_reason(Plan("model", 2, (rows,))) is None


def test_scaled_bytes_leave_the_compressors_whose_cost_scales_with_them():
    lossy = SearchSpace.default(lossy=True)
    assert scaled_space(lossy, 1) is lossy
    space = scaled_space(lossy, 8)
    settings: dict[Compressor, dict[str, Any]] = {
        Compressor.TOP_K: {"ratio": 0.1},
        Compressor.POWER_SGD: {"rank": 1},
    }
    for compressor in Compressor:
        made = Plan(
            "model",
            2,
            (WHOLE, replace(WHOLE, compressor=compressor, **settings.get(compressor, {}))),
        )
        reason = scaled_refusal_reason(made, 8)
        assert (reason is None) is (compressor in space.compressors)
        assert (
            reason is None
            or f"the plan has all_reduce of w with {compressor}; use none, fp16 or bf16" in reason
        )
        assert scaled_refusal_reason(made, 1) is None


def test_a_replica_on_several_devices_is_refused_with_their_names():
    replica = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 1, bias=False, device="meta"))
    with pytest.raises(
        InvalidStrategy,
        match="a replica must be on one device for plans, but the model's parameters are on cpu, meta",
    ):
        check_fit(Plan("model", 2, (WHOLE,)), replica, 2)
