"""What the PyTorch runtime cannot enact is told from the plan alone: the message, the rule and what it asks for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autotune.strategy_space.plan import Message, Plan, Primitive, TensorSlice
from autotune.strategy_space.strategy import Compressor, SparseHandling
from runtime_rewriter.pytorch.exchange.refusals import why_refused

WHOLE = Message((TensorSlice("w", 12),), Primitive.ALL_REDUCE, Compressor.NONE, "float32")
TWO = (TensorSlice("w", 12), TensorSlice("v", 3))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"compressor": Compressor.FP16, "dtype": "complex64"}, "complex gradients travel uncompressed, but the compressor is fp16"),
        ({"ranks": (0,)}, r"every rank takes part in a message, but the plan names \(0,\)"),
        ({"primitive": Primitive.PUSH_PULL}, "owner must be a rank below 2, but is None"),
        ({"primitive": Primitive.REDUCE_BROADCAST, "owner": 2}, "owner must be a rank below 2, but is 2"),
        ({"sparse": SparseHandling.ALL_GATHER, "slices": TWO}, r"rows of a sparse gradient travel alone, .* holds 2 slice\(s\)"),
        ({"sparse": SparseHandling.ALL_GATHER, "slices": (TensorSlice("w", 6, 1, 0, 2),)}, "whole or cut along axis 0"),
        ({"sparse": SparseHandling.GATHER_SCATTER}, "but the message asks for gather_scatter"),
        ({"sparse": SparseHandling.ALL_GATHER, "primitive": Primitive.PUSH_PULL, "owner": 0}, "but the message asks for all_gather"),
        ({"sparse": SparseHandling.ALL_GATHER, "primitive": Primitive.REDUCE_BROADCAST, "owner": 0}, "asks for all_gather"),
    ],
)
def test_a_message_that_cannot_be_enacted_is_named_with_the_rule(change, rule):
    made = Plan("model", 2, (WHOLE, replace(WHOLE, **change)))
    reason = why_refused(made)
    assert reason is not None and reason.startswith("message 1 (")
    assert re.search(rule, reason), reason
    assert why_refused(replace(made, messages=(WHOLE,))) is None


@pytest.mark.parametrize("order", [(0, 0), (0,), (0, 1, 2)])
def test_a_ring_order_names_each_rank_once(order):
    assert "ring_order must name each of the 2 ranks once" in str(why_refused(Plan("model", 2, (WHOLE,), ring_order=order)))
    assert why_refused(Plan("model", 2, (WHOLE,), ring_order=(1, 0))) is None
