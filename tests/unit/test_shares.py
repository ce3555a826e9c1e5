"""Which rank owns which elements of a direct exchange."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.strategy_space.shares import (
    normal_shares,
    owned_bounds,
    piece_bounds,
    shares_of_hosts,
    shares_text,
)

EIGHTHS = st.lists(st.integers(0, 8), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 5000), EIGHTHS, st.sampled_from([1, 7, 1024]))
def test_owners_cover_every_element_once_and_nothing_is_owned_without_a_share(
    elements, weights, block
):
    shares = tuple(weight / sum(weights) for weight in weights)
    members = tuple(range(len(shares)))
    bounds = owned_bounds(elements, shares, members, block)
    assert bounds[0] == 0 and bounds[-1] == elements and bounds == sorted(bounds)
    assert all(bound % block == 0 for bound in bounds if bound != elements)
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        assert stop == start or shares[rank] > 0
        assert abs(stop - start - shares[rank] * elements) <= block


@given(st.integers(0, 1000), st.integers(1, 64))
def test_pieces_cover_every_element_once_and_are_even(elements, pieces):
    bounds = piece_bounds(elements, pieces)
    assert bounds[0][0] == 0 and bounds[-1][1] == elements
    assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))
    sizes = {stop - start for start, stop in bounds}
    assert max(sizes) - min(sizes) <= 1 and len(bounds) == max(1, min(pieces, elements))
    assert elements == 0 or 0 not in sizes


@pytest.mark.parametrize(
    ("shares", "members", "bounds"),
    [
        (None, (0, 1, 2, 3), [0, 2, 4, 6, 8]),
        ((0.5, 0.25, 0.25, 0.0), (0, 1, 2, 3), [0, 4, 6, 8, 8]),
        ((0.5, 0.25, 0.25, 0.0), (3, 1, 0, 2), [0, 0, 2, 6, 8]),  # in ring order
        ((0.0, 1.0, 0.0, 0.0), (0, 1, 2, 3), [0, 0, 8, 8, 8]),  # a parameter server
        ((0.5, 0.25, 0.25, 0.0), (1, 2), [0, 4, 8]),
        ((1.0, 0.0, 0.0, 0.0), (1, 3), [0, 4, 8]),  # no member has a share
    ],
)
def test_members_own_in_their_order(shares, members, bounds):
    assert owned_bounds(8, shares, members) == bounds


def test_a_leader_owns_for_its_host():
    shares = (0.5, 0.125, 0.25, 0.125)
    assert shares_of_hosts(shares, ((0, 1), (2, 3)), (3, 0)) == (0.625, 0.0, 0.0, 0.375)
    assert shares_of_hosts(None, ((0, 1), (2, 3)), (3, 0)) is None


def test_equal_shares_are_none_and_many_are_shortened():
    assert str(normal_shares((1.0, -0.0))) == "(1.0, 0.0)"  # equal shares have equal ids
    assert normal_shares((0.25,) * 4) is None and normal_shares((1, 0)) == (1.0, 0.0)
    assert shares_text((0.5, 0.25, 0.25, 0.0), 4) == "0.5, 0.25, 0.25, 0"
    assert shares_text((0.5, 0.25, 0.25, 0.0), 2) == "0.5, 0.25 and 2 more"
