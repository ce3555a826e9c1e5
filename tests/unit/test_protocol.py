"""Messages between driver and ranks: equal values after the line, or an error."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest

from autotune.cluster import Where
from autotune.errors import InvalidInput
from autotune.recordings.probe import LinkCost, NoCost, ProbedLinks, ProbePoint, ProbeSeries
from autotune.records import FailureKind
from autotune.strategy_space.builders.collectives import single_bucket
from autotune.strategy_space.plan import plan
from autotune.workload import Variable, Workload
from runtime_rewriter import protocol
from runtime_rewriter.protocol import RankEvent, RankInstruction, decode_event, decode_instruction

WORKLOAD = Workload("m", (Variable("v", (4,)), Variable("w", (4, 4))))
POINT = ProbePoint(4096, 0.1 + 0.2, 1 / 3, 5, 1e-7)
SMALLER = replace(POINT, size_bytes=8)
SERIES = (ProbeSeries("all_reduce", 2, Where.ACROSS, True, (POINT,)),)
COST = LinkCost(1e8 / 3, 2e-4, 0.01, 0.02)
LINKS = ProbedLinks(((0, COST),), (((0, 1), COST),), (), (((0, 2), NoCost.TIME),))
INSTRUCTIONS = (
    protocol.StartProfile(6, 20.0, True, (2, 1)),
    protocol.StartProbe(30.0, False, (2, 1)),
    protocol.StartEmulation(WORKLOAD),
    protocol.StartTrial(plan(single_bucket(WORKLOAD), WORKLOAD, 2), 2, 4),
    protocol.ContinueTrial(1, 4),
    protocol.TrainOn(None),
    protocol.EndScript(),
)
EVENTS = (
    protocol.Ready("model-1", False),
    protocol.Heartbeat(3),
    protocol.Probing("links inside the hosts"),
    protocol.ProfileAnswer(WORKLOAD, SERIES, {"torch": "2.13.0"}, 8, "it clips"),
    protocol.ProbeAnswer(SERIES, LINKS, {"torch": "2.13.0"}, 8),
    protocol.EmulationAnswer(),
    protocol.TrialAnswer((0.1 + 0.2, 1e-9), (True, False), (0.01, 0.0), None),
    protocol.RankFailed(FailureKind.NUMERICS, "line one\nline two"),
    protocol.ScriptFinished(7, 2),
)


def test_every_message_is_the_same_value_after_the_line() -> None:
    assert {type(message) for message in INSTRUCTIONS} == set(get_args(RankInstruction))
    assert {type(message) for message in EVENTS} == set(get_args(RankEvent))
    lines = [protocol.encode(message) for message in (*INSTRUCTIONS, *EVENTS)]
    assert not any("\n" in line for line in lines)
    assert tuple(map(decode_instruction, lines[: len(INSTRUCTIONS)])) == INSTRUCTIONS
    assert tuple(map(decode_event, lines[len(INSTRUCTIONS) :])) == EVENTS


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"type": "StartTrail"}, "must have a type of StartProfile, .*but has 'StartTrail'"),
        ({"type": "Heartbeat"}, "an instruction to a rank must have a type .*but has 'Heartbeat'"),
        ([], "but has None"),
        ({"type": "EndScript", "now": True}, "unknown field 'now'"),
        ({"type": "ContinueTrial", "warmup_steps": 1}, "field 'timed_steps' is required"),
        ({"type": "StartProbe", "budget_s": "long", "computing": True}, "budget_s"),
        ({"type": "StartProbe", "budget_s": float("nan"), "computing": True}, "finite numbers"),
    ],
)
def test_an_unknown_message_is_refused(data, reason) -> None:
    with pytest.raises(InvalidInput, match=reason):
        decode_instruction(json.dumps(data))


@pytest.mark.parametrize("kind", [{"a": 1}, [], None, 3])
def test_a_type_that_is_no_text_is_refused(kind) -> None:
    with pytest.raises(InvalidInput, match="must have a type of"):
        decode_event(json.dumps({"type": kind}))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ProbePoint(4096, -0.1, 0.1, 5, 0.0),
        lambda: ProbePoint(-1, 0.1, 0.1, 5, 0.0),
        lambda: ProbePoint(4096, 0.1, 0.1, 0, 0.0),
        lambda: ProbePoint(4096, 0.1, 0.1, 5, float("nan")),
        lambda: ProbeSeries("all_reduce", 10**9, Where.WORLD, False, (POINT,)),
        lambda: ProbeSeries(
            "all_reduce", 2, Where.WORLD, False, (POINT, replace(POINT, size_bytes=8))
        ),
        lambda: LinkCost(-1e9, 5e-5, 0.01, 0.02),
        lambda: LinkCost(1e9, -5e-5, 0.01, 0.02),
    ],
)
def test_impossible_measurements_of_a_probe_are_refused(wrong) -> None:
    with pytest.raises(InvalidInput, match=r"must (be|ascend)"):
        wrong()
