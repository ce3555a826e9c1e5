"""Refusals of plans that the PyTorch runtime cannot enact: the message, the rule and the fix."""

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
from runtime_rewriter.pytorch.agreement import check_fit, trainable_parameters
from runtime_rewriter.tensorflow.refusals import plan_refusal

WHOLE = Message((TensorSlice("w", 12),), Synchronizer.ALL_REDUCE, Compressor.NONE, "float32")
TWO = (TensorSlice("w", 12), TensorSlice("v", 3))
ROWS = {"sparse": SparseHandling.ALL_GATHER}
SERVED = {"synchronizer": Synchronizer.PARAMETER_SERVER}
DIRECT: dict[str, Any] = {"synchronizer": Synchronizer.DIRECT_EXCHANGE}
ROOTED = {"synchronizer": Synchronizer.REDUCE_BROADCAST}
TOP_K = {"compressor": Compressor.TOP_K, "ratio": 0.1}
INT8 = {"compressor": Compressor.INT8}
FP16 = {"compressor": Compressor.FP16}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (
            {**FP16, "dtype": "complex64"},
            "complex gradients travel uncompressed, but the compressor is fp16",
        ),
        ({"ranks": (0,)}, r"every rank takes part in a message, but the plan names \(0,\)"),
        (SERVED, "owner must be a rank below 2, but is None"),
        ({**ROOTED, "owner": 2}, "owner must be a rank below 2, but is 2"),
        ({**ROWS, "slices": TWO}, r"rows of a sparse gradient travel alone, .* holds 2 slice\(s\)"),
        ({**ROWS, "slices": (TensorSlice("w", 6, 1, 0, 2),)}, "whole or cut along axis 0"),
        (
            {**ROWS, **INT8},
            "travel as they are or as fp16 or bf16, but the compressor is int8; "
            "change it or set sparse = dense",
        ),
        (
            {**INT8, "dtype": "bfloat16"},
            "compressor int8 needs float32 or float64 gradients, but these are bfloat16",
        ),
        (
            {**TOP_K, "slices": (TensorSlice("w", 2**31),)},
            "top_k sends int32 indices, but the message has 2147483648 elements; "
            "cut it to at most 2147483647",
        ),
        (
            {"sparse": SparseHandling.GATHER_SCATTER},
            "sparse = gather_scatter needs parameter_server or direct_exchange, "
            "but the synchronizer is all_reduce",
        ),
        (
            {**ROWS, **SERVED, "owner": 0},
            "sparse = all_gather needs all_reduce or reduce_scatter_all_gather, "
            "but the synchronizer is parameter_server",
        ),
        ({**ROWS, **ROOTED, "owner": 0}, "but the synchronizer is reduce_broadcast"),
        ({"pieces": 2}, "only a direct exchange has shares and pieces, but it is all_reduce"),
        ({**DIRECT, "shares": (0.5, 0.25, 0.25)}, "one for each of 2 ranks, but are 3"),
        ({**DIRECT, "shares": (0.5, 0.25)}, r"sum to 1, but are \(0.5, 0.25\)"),
        ({**DIRECT, "pieces": 65}, "pieces must be from 1 to 64, but are 65"),
        ({**DIRECT, **INT8, "pieces": 2}, "int8 needs the whole message"),
        (
            {**DIRECT, "pieces": 2, "sparse": SparseHandling.GATHER_SCATTER},
            "travel in one piece, but it has 2",
        ),
    ],
)
def test_a_message_that_cannot_be_enacted_is_named_with_the_rule(change, rule):
    plan = Plan("model", 2, (WHOLE, replace(WHOLE, **change)))
    reason = refusal_reason(plan)
    assert reason is not None and reason.startswith("message 1 (")
    assert re.search(rule, reason), reason
    assert refusal_reason(replace(plan, messages=(WHOLE,))) is None


@pytest.mark.parametrize(("cross_step", "in_flight"), [(False, 2), (True, 0), (True, 3)])
def test_messages_in_flight_are_one_within_the_step_and_few_across_it(cross_step, in_flight):
    plan = Plan("model", 2, (WHOLE,), cross_step, in_flight=in_flight)
    rule = "from 1 to 2 across steps and 1 within the step"
    values = f"but is {in_flight}, cross_step: {cross_step}, direct exchanges: False"
    assert str(refusal_reason(plan)).endswith(f"{rule}, {values}")
    assert refusal_reason(replace(plan, cross_step=True, in_flight=2)) is None


def test_pieces_in_flight_are_eight_where_a_message_is_exchanged_directly():
    plan = Plan("model", 2, (WHOLE, replace(WHOLE, **DIRECT)), in_flight=8)
    assert refusal_reason(plan) is None and plan.limit is None
    assert replace(plan, cross_step=True).limit == 2
    rule = "from 1 to 8 with direct exchanges, .* but is 9, .* direct exchanges: True"
    assert re.search(rule, str(refusal_reason(replace(plan, in_flight=9))))


@pytest.mark.parametrize("most", [0, 3])
def test_a_search_space_has_no_more_in_flight_than_a_strategy_may(most):
    rule = f"most_in_flight of a search space must be from 1 to 2, but is {most}"
    with pytest.raises(InvalidInput, match=rule):
        replace(SearchSpace.default(), most_in_flight=most)


@pytest.mark.parametrize("order", [(0, 0), (0,), (0, 1, 2)])
def test_a_ring_order_names_each_rank_once(order):
    reason = refusal_reason(Plan("model", 2, (WHOLE,), ring_order=order))
    assert reason is not None and "ring_order must name each of the 2 ranks once" in reason
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
        lossy_one = replace(WHOLE, compressor=compressor, **settings.get(compressor, {}))
        plan = Plan("model", 2, (WHOLE, lossy_one))
        reason = scaled_refusal_reason(plan, 8)
        assert (reason is None) is (compressor in space.compressors)
        rule = f"the plan has all_reduce of w with {compressor}; use none, fp16 or bf16"
        assert reason is None or rule in reason
        assert scaled_refusal_reason(plan, 1) is None


def test_a_replica_on_several_devices_is_refused_with_their_names():
    replica = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 1, bias=False, device="meta"))
    rule = "must be on one device for plans, but the model's parameters are on cpu, meta"
    with pytest.raises(InvalidStrategy, match=rule):
        check_fit(Plan("model", 2, (WHOLE,)), trainable_parameters(replica), 2)


def test_tensorflow_refuses_direct_exchanges():
    plan = Plan("model", 2, (replace(WHOLE, **DIRECT),))
    assert "TensorFlow's servers exchange tensors by collectives" in str(plan_refusal(plan))


def test_only_a_rewritten_graph_reads_variables_at_their_servers():
    plan = Plan("model", 2, (WHOLE,), local_copies=False)
    reason = refusal_reason(plan)
    assert reason is not None and "local_copies" in reason
    assert refusal_reason(plan, rewrites_graph=True) is None
