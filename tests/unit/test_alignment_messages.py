"""Clocks of ranks that only send and receive: parameter servers, pipelines, direct exchanges."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import json_output, output
from synthetic_traces import span
from test_alignment import observations

from autotune.profiling.alignment.align import align_observations
from autotune.profiling.alignment.observations import Observations, observe
from autotune.profiling.traces.job import read_job

DELAY_S = 1e-4
"""Least time from the start of a send to the end of its receive."""


def messages(
    offset_s: np.ndarray, ways: list[tuple[int, int]], hosts: tuple[int, ...] = (), steps: int = 30
) -> Observations:
    """A message by each of `ways` (sender, receiver) in each step, on clocks with these offsets.

    Either side begins first. A message takes some tenths of a millisecond longer than the least
    time, but in each direction one takes no longer.
    """
    rng = np.random.default_rng(7)
    count, ranks = steps * len(ways), len(offset_s)
    starts, ends = np.full((2, count, ranks), np.nan)
    senders = np.array([sender for _ in range(steps) for sender, _ in ways])
    for k, (sender, receiver) in enumerate(ways * steps):
        both = [sender, receiver]
        starts[k, both] = 5e-3 * k + rng.uniform(0, 1e-3, 2)
        ends[k, sender] = starts[k, sender] + 1e-5
        late_s = rng.exponential(2e-4) if k >= len(ways) else 0.0
        ends[k, receiver] = starts[k, both].max() + DELAY_S + late_s
    for k in range(len(ways)):  # the receive waits in the fastest messages
        starts[k, ways[k][1]] = starts[k, ways[k][0]] - 1e-4
        ends[k, ways[k][1]] = starts[k, ways[k][0]] + DELAY_S
    observed = observations(starts - offset_s, ends - offset_s, hosts, senders)
    numbers = np.arange(count)
    return replace(observed, family=numbers % len(ways), step=numbers // len(ways))


@pytest.mark.parametrize("scale_s", [0.0, 2e-3, 3.0])
def test_offsets_of_a_server_are_found_within_the_least_round_trip(scale_s: float) -> None:
    """No collective: two workers push to a server and pull from it. Either clock may be ahead."""
    offset = scale_s * np.array([0.0, 1.0, -0.4])
    observed = messages(offset, [(0, 2), (1, 2), (2, 0), (2, 1)])
    result = align_observations(observed, samples=3)
    assert np.all(result.low_s - 1e-6 <= offset) and np.all(offset <= result.high_s + 1e-6)
    width_s = result.high_s - result.low_s
    np.testing.assert_allclose(width_s[2], 2 * DELAY_S, atol=1e-6)
    np.testing.assert_allclose(width_s[1], 4 * DELAY_S, atol=1e-6)
    assert np.all(np.abs(result.offset_s - offset)[1:] <= width_s[1:] / 2)
    least_s = np.array([0.0, 2**0.5, 1.0]) * 2 * DELAY_S / 12**0.5
    assert np.all(result.spread_s >= 0.99 * least_s) and np.all(result.spread_s <= 2 * least_s)
    assert result.worst_slack_s == 0 and result.end_spread_s == (0.0, 0.0)


def test_messages_in_one_direction_bound_a_clock_on_one_side_only() -> None:
    result = align_observations(messages(np.array([0.0, 0.5]), [(0, 1)]), samples=0)
    assert np.isfinite(result.low_s[1]) and np.isinf(result.high_s[1])
    assert result.offset_s[1] == 0 and any("both directions" in note for note in result.notes)


def test_messages_lead_on_from_ranks_that_collectives_and_hosts_tie() -> None:
    """Ranks 0 and 1 sum together; 1 and 2 exchange messages; 3 is on the host of 2, and alone."""
    offset = np.array([0.0, 0.2, -0.3, -0.3])
    observed = messages(offset, [(1, 2), (2, 1)], hosts=(0, 1, 2, 2))
    rng = np.random.default_rng(1)
    starts = np.full((20, 4), np.nan)
    starts[:, :2] = rng.uniform(0, 1e-3, (20, 2)) + np.arange(20)[:, None]
    ends = starts + (np.nanmax(starts, axis=1, keepdims=True) - starts) + 1e-3
    ends[:, :2] += rng.uniform(0, 4e-6, (20, 2))
    sums = observations(starts - offset, ends - offset, (0, 1, 2, 2))
    result = align_observations(_both(sums, observed), samples=2)
    np.testing.assert_allclose(result.offset_s[1], 0.2, atol=5e-6)
    np.testing.assert_allclose(result.offset_s[2:], -0.3, atol=DELAY_S)
    assert abs(result.offset_s[2] - result.offset_s[3]) < 2e-6
    assert result.spread_s[1] < 5e-6 < DELAY_S / 2 < result.spread_s[2] < 2 * DELAY_S
    assert result.end_spread_s[1] < 5e-6 and not result.notes


def _both(first: Observations, second: Observations) -> Observations:
    """The collectives of the first, then those of the second."""
    names = ("start_s", "end_s", "rank", "waits")
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in names
    }
    after = first.first[-1] + second.first[1:]
    return replace(
        first,
        **joined,
        of=np.concatenate([first.of, second.of + first.collectives]),
        first=np.concatenate([first.first, after]),
        family=np.concatenate([first.family, second.family + first.family.max() + 1]),
        step=np.concatenate([first.step, second.step]),
        transactions=(*first.transactions, *(f"m{k}" for k in range(second.collectives))),
    )


def server_traces(folder: Path, offset_s: float) -> Path:
    """A recording of a worker and a server on two hosts, as of TensorFlow: pushes and pulls only.

    Per step the worker computes 3 ms and pushes, and the server updates for 1 ms and answers. A
    message takes 1 ms. The server's clock is `offset_s` behind.
    """
    events: list[list[dict[str, Any]]] = [[], []]
    clock_us = (0.0, -offset_s * 1e6)

    def add(rank: int, name: str, ts: float, dur: float, cat: str, tid: int, **args: Any) -> None:
        shown = ts + 1e12 + clock_us[rank]
        events[rank].append(span(name, shown, dur, tid, cat, **args))

    for step in range(4):
        at_us = 1e4 * step
        for rank in range(2):
            add(rank, f"ProfilerStep#{step}", at_us, 9e3, "user_annotation", 1)
        add(0, "MatMul", at_us + 10, 3e3, "cpu_op", 1)
        add(1, "ApplyAdam", at_us + 4.1e3, 1e3, "cpu_op", 1)
        for name, sender, sent_us in (("PUSH g", 0, 3.05e3), ("PULL w", 1, 5.15e3)):
            ends = [sender, 1 - sender]
            args = {"Process Group Ranks": json.dumps(ends), "Group size": 2, "Root Rank": sender}
            args |= {"autotune": {"transaction": f"{name};{ends[0]}>{ends[1]}"}}
            args |= {"In msg nelems": 1000, "dtype": "Byte"}
            for rank, kind, took_us in ((sender, "send", 0.0), (1 - sender, "recv", 1e3)):
                more = args | {"Collective name": kind}
                start_us = at_us + sent_us
                add(rank, f"tf:{name}", start_us, took_us, "user_annotation", 2, **more)
        add(0, "Assign", at_us + 6.3e3, 2e3, "cpu_op", 1)
    for rank in range(2):
        info = {"rank": rank, "world_size": 2, "backend": "tf"}
        trace = {"distributedInfo": info, "traceEvents": events[rank]}
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))
    return folder


def test_replay_aligns_the_clocks_of_a_job_that_only_pushes_and_pulls(tmp_path, capsys) -> None:
    folder = server_traces(tmp_path, 0.25)
    observed = observe(read_job(folder))
    assert observed.collectives == 8 and observed.is_pair.all()
    assert sorted(set(observed.family.tolist())) == [0, 1]
    data = json_output(capsys, "replay", folder, "--hosts", "a,b")
    aligned = data["alignment"]
    assert aligned["low_s"][1] - 1e-6 <= 0.25 <= aligned["high_s"][1] + 1e-6
    assert abs(aligned["offset_s"][1] - 0.25) < 5e-4 < aligned["spread_s"][1] < 7e-4
    assert data["measured_step_s"] < 0.02 < 0.2
    assert abs(data["replay_error"]) < 0.01
    text = output(capsys, "replay", folder, "--hosts", "a,b")
    assert "clocks: offsets up to 250" in text and "uncertain by" in text
