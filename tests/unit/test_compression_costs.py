"""Compressed messages cost their fixed parts once for each payload that the runtime handles."""

from __future__ import annotations

import pytest
from synthetic_cluster import FREE, cluster, costs

from autotune.lowering.lower import Lowering
from autotune.lowering.messages import TimedStep
from autotune.strategy_space.plan import Message, TensorSlice
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Variable, Workload

ELEMENTS = 100_000
WORKLOAD = Workload("m", (Variable("v", (ELEMENTS,)),))
COSTS = costs(FREE, top_k_find_s=1.0, top_k_add_s=10.0, int8_encode_s=1.0, int8_decode_s=10.0)
"""Compressing costs 1 s, reading 10 s, and elements nothing."""
DIRECT, REDUCED, SERVED = (
    Synchronizer.DIRECT_EXCHANGE,
    Synchronizer.ALL_REDUCE,
    Synchronizer.PARAMETER_SERVER,
)
ONE_OWNER = (0.0, 1.0, 0.0, 0.0)


def steps_of(
    kind: Synchronizer,
    compressor: Compressor,
    ranks: int = 4,
    shares: tuple[float, ...] | None = None,
) -> tuple[TimedStep, ...]:
    message = Message(
        (TensorSlice("v", ELEMENTS),),
        kind,
        compressor,
        "float32",
        owner=0 if kind is SERVED else None,
        ratio=0.1 if compressor is Compressor.TOP_K else None,
        shares=shares,
    )
    lowering = Lowering(WORKLOAD, cluster(*[(1, 1000)] * ranks), COSTS)
    (batch,) = lowering.messages.batches([message])
    return batch.steps


def prepared_s(steps: tuple[TimedStep, ...]) -> list[float]:
    """The computation before each step, with that of its root."""
    return [float(one.step.prepare_s[0] + one.step.prepare_root_s[0]) for one in steps]


@pytest.mark.parametrize(
    ("kind", "shares", "expected_s"),
    [
        # a payload for each owner, who reads those of four ranks; all read those of the owners
        (DIRECT, None, [4, 4 * 10 + 1, 4 * 10]),
        (DIRECT, ONE_OWNER, [1, 4 * 10 + 1, 10]),
        (REDUCED, None, [1, 4 * 10]),
        (SERVED, None, [1, 4 * 10 + 1, 10]),
    ],
)
def test_top_k_costs_its_calls_once_for_each_payload(kind, shares, expected_s) -> None:
    assert prepared_s(steps_of(kind, Compressor.TOP_K, shares=shares)) == expected_s


@pytest.mark.parametrize(
    ("kind", "ranks", "shares", "expected_s"),
    [
        (DIRECT, 4, None, [1, 10 + 1, 10]),
        (DIRECT, 8, None, [2, 2 * 10 + 1, 2 * 10]),
        (DIRECT, 4, ONE_OWNER, [1, 10 + 1, 10]),
        (REDUCED, 4, None, [1, 10 + 1, 10]),
        (REDUCED, 8, None, [2, 2 * 10 + 1, 2 * 10]),
        (SERVED, 8, None, [1, 2 * 10 + 1, 10]),
    ],
)
def test_int8_costs_a_call_for_every_four_rows(kind, ranks, shares, expected_s) -> None:
    """As many rows were rounded in one call where its cost was measured."""
    assert prepared_s(steps_of(kind, Compressor.INT8, ranks, shares)) == expected_s
