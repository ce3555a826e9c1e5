"""The sizes that a probe sends between hosts, on links of every latency and bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples

from autotune.recordings.probe import HostPair, LinkCost, NoCost
from autotune.rng import generator
from runtime_rewriter.probe.message_sizes import (
    FEW_REPEATS,
    LINK_BYTES,
    SLOWEST_BYTES_PER_S,
    PairTimes,
    expected_s,
    time_sizes,
)
from runtime_rewriter.probe.pairs import link_cost
from runtime_rewriter.probe.rounds import first_rounds, shows_bandwidth

GBIT_PER_S = 1.25e8
JITTER = 0.02
MINUTE_S, SHORTEST_S = 0.15 * 60.0, 0.15 * 5.0
"""The share of the links in the default budget and in the least one."""


@dataclass(frozen=True)
class Link:
    latency_s: float
    bytes_per_s: float
    jitter: float = 0.0
    """Standard deviation, relative to the latency."""

    def times_s(self, size_bytes: int, repeats: int, random: np.random.Generator) -> list[float]:
        disturbed_s = self.latency_s * np.exp(self.jitter * random.standard_normal(repeats))
        times_s: list[float] = (disturbed_s + size_bytes / self.bytes_per_s).tolist()
        return times_s


@dataclass
class Probed:
    """Costs by pair of hosts, and the seconds that all took together."""

    costs: dict[HostPair, LinkCost | NoCost]
    sizes: dict[HostPair, list[int]]
    spent_s: float


def probed(link: Link, hosts: int, budget_s: float) -> Probed:
    """Probe equal links of a few hosts, one pair after another, within the budget."""
    random = generator(0, "links", hosts)
    rounds = first_rounds(hosts)
    result = Probed({}, {}, 0.0)
    for number, (pair,) in enumerate(rounds):

        def grant(needed_s: float, open_rounds: int = len(rounds) - number) -> float:
            left_s = budget_s - result.spent_s
            return max(left_s / open_rounds, needed_s) if left_s > 0 and left_s >= needed_s else 0.0

        def exchange(size_bytes: int, repeats: int) -> PairTimes:
            times_s = link.times_s(size_bytes, repeats + 1, random)
            result.spent_s += 2 * sum(times_s)
            return [times_s[1:]]

        sizes, series = time_sizes(grant, exchange)
        result.costs[pair] = link_cost(sizes, [rows[0] for rows in series])
        result.sizes[pair] = sizes
    return result


@pytest.mark.parametrize(
    ("link", "hosts", "budget_s", "least"),
    [
        (Link(5e-3, GBIT_PER_S, JITTER), 8, MINUTE_S, 24),
        (Link(12e-3, GBIT_PER_S, JITTER), 4, MINUTE_S, 6),
        (Link(20e-3, GBIT_PER_S, JITTER), 2, MINUTE_S, 1),
        (Link(100e-3, GBIT_PER_S / 10, JITTER), 2, MINUTE_S, 1),
        (Link(1e-4, GBIT_PER_S / 10, JITTER), 8, MINUTE_S, 28),
        (Link(1e-4, GBIT_PER_S / 10, JITTER), 8, SHORTEST_S, 10),
        (Link(1e-4, GBIT_PER_S / 1000, JITTER), 2, MINUTE_S, 1),
        (Link(50e-6, 10 * GBIT_PER_S, JITTER), 8, MINUTE_S, 28),
    ],
)
def test_a_links_bandwidth_is_its_own_whatever_its_latency(
    link: Link, hosts: int, budget_s: float, least: int
) -> None:
    """With 5 ms, 64 KiB were expected to take 16 times as long as 4 KiB; so the probe ended."""
    result = probed(link, hosts, budget_s)
    costs = [cost for cost in result.costs.values() if isinstance(cost, LinkCost)]
    assert len(costs) >= least
    for cost in costs:
        assert cost.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.3)
        assert cost.latency_s == pytest.approx(link.latency_s, rel=0.3)
    assert all(cost is NoCost.TIME for cost in result.costs.values() if cost not in costs)


def test_a_long_link_without_time_for_large_messages_has_no_cost() -> None:
    result = probed(Link(50e-3, GBIT_PER_S), 8, SHORTEST_S)
    assert set(result.costs.values()) == {NoCost.TIME}


@settings(max_examples=examples(200), deadline=None)
@given(
    latency_s=st.floats(1e-6, 0.5),
    bytes_per_s=st.floats(1e3, 1e10),
    hosts=st.integers(2, 8),
    budget_s=st.floats(0.1, 100.0),
)
def test_a_probe_of_any_link_ends_in_time_but_for_its_first_messages(
    latency_s: float, bytes_per_s: float, hosts: int, budget_s: float
) -> None:
    """A link below `SLOWEST_BYTES_PER_S` may take longer for the size after the first one."""
    link = Link(latency_s, bytes_per_s)
    first_s, second_s = (latency_s + size / bytes_per_s for size in LINK_BYTES[:2])
    result = probed(link, hosts, budget_s)
    assert result.spent_s <= budget_s + 20 * first_s + 20 * second_s
    for pair, cost in result.costs.items():
        if isinstance(cost, LinkCost):
            assert result.sizes[pair][-1] >= 2**16
            assert cost.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)


@settings(max_examples=examples(200), deadline=None)
@given(
    latency_s=st.floats(0.0, 0.5),
    bytes_per_s=st.floats(SLOWEST_BYTES_PER_S, 1e10),
    known=st.integers(1, len(LINK_BYTES) - 1),
)
def test_a_message_is_expected_to_take_at_least_its_time(
    latency_s: float, bytes_per_s: float, known: int
) -> None:
    sizes, size = LINK_BYTES[:known], LINK_BYTES[known]
    times_s = [[latency_s + each / bytes_per_s] * FEW_REPEATS for each in sizes]
    time_s = latency_s + size / bytes_per_s
    bound_s = expected_s(sizes, times_s, size)
    assert bound_s >= time_s * (1 - 1e-6)
    assert bound_s <= times_s[-1][0] * size / sizes[-1] * (1 + 1e-6)
    if known > 1:
        assert bound_s == pytest.approx(time_s, rel=1e-3)


def test_a_disturbed_message_hides_no_slow_link() -> None:
    """64 KiB took no longer than 4 KiB, all of whose repeats were disturbed."""
    times_s = [[1e-4] * 3, [0.5] * 3, [0.5] * 3]
    assert expected_s(LINK_BYTES[:3], times_s, LINK_BYTES[3]) > 3.5
    assert expected_s((), (), 64) == 0.0


def test_small_messages_show_the_bandwidth_of_a_slow_link_only() -> None:
    sizes = LINK_BYTES[:3]
    assert shows_bandwidth(sizes, [[1e-4], [1e-3], [1.6e-2]])
    assert not shows_bandwidth(sizes, [[5e-3], [5.03e-3], [5.5e-3]])
    assert not shows_bandwidth(sizes[:2], [[1e-4], [1e-2]])
    assert shows_bandwidth(LINK_BYTES[:4], [[5e-3], [5.03e-3], [5.5e-3], [9.2e-3]])
    assert link_cost(LINK_BYTES[:4], [[1.0]] * 4) is NoCost.FLAT
