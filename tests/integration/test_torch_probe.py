"""The link probe over loopback: complete, alike on all ranks, and within its deadline."""

from __future__ import annotations

import time

from torch_world import run_world

from autotune.cluster import Cluster, CollectiveFit
from runtime_rewriter.torch_probe import SIZES_BYTES, probe_links

PRIMITIVES = {"all_reduce", "reduce_scatter", "all_gather", "gather", "scatter", "broadcast", "reduce_scatter_all_gather", "push_pull"}


def probe(rank: int, deadline_s: float) -> tuple[tuple[CollectiveFit, ...], float]:
    started_s = time.monotonic()
    return probe_links(deadline_s=deadline_s), time.monotonic() - started_s


def test_every_primitive_is_fitted_for_pairs_and_the_world_alike_on_all_ranks() -> None:
    answers = run_world(probe, 3, 4.0)
    fits = answers[0][0]
    assert all(answer[0] == fits for answer in answers)
    assert {(fit.primitive, fit.group_size) for fit in fits} == {(name, size) for name in PRIMITIVES for size in (2, 3)}
    for fit in fits:
        assert fit.alpha_s >= 0 and fit.beta_s_per_byte >= 0 and fit.alpha_s + fit.beta_s_per_byte > 0
        assert fit.smallest_bytes == SIZES_BYTES[0] < fit.largest_bytes
    assert Cluster.local(3).with_fits(fits).fit("push_pull", 3) is not None


def test_a_short_deadline_gives_fewer_sizes_not_a_late_answer() -> None:
    answers = run_world(probe, 2, 0.5)
    assert all(seconds < 10 for _, seconds in answers)
    assert all(fit.largest_bytes <= SIZES_BYTES[-1] for fit in answers[0][0])


def test_a_world_of_one_has_no_links() -> None:
    assert run_world(probe, 1, 1.0)[0][0] == ()
