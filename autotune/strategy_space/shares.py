"""Shares of a direct exchange: which rank owns, and so sums, which elements of a message.

| symbol | meaning | shape |
|---|---|---|
| n | ranks | - |
| shares | of each message's elements that each rank owns, sum 1 | (n,) |
| bounds | rank i owns the elements `bounds[i]` to `bounds[i + 1]` | (n + 1,) |

Over a ring, each link carries 2 (n - 1) / n of a message's bytes in each direction. With a direct
exchange, the link of a rank with share w carries 1 + (n - 2) w of them: it sends what others own,
1 - w, and its sums to n - 1 ranks. So a rank with a slow link should own little or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

MOST_PIECES = 64
"""Pieces into which one message may be cut."""
_TOLERANCE = 1e-6
"""Of the sum of shares that were rounded for storage."""

Shares = tuple[float, ...]


@lru_cache(maxsize=1 << 10)  # thousands of shards have the same few shares
def shares_error(shares: Shares) -> str | None:
    """Return the rule that these shares break, or None."""
    in_range = all(0 <= share <= 1 for share in shares)
    if in_range and math.isclose(math.fsum(shares), 1, rel_tol=0, abs_tol=_TOLERANCE):
        return None
    return f"shares must lie in [0, 1] and sum to 1, but are {tuple(shares)}"


def normal_shares(shares: Sequence[float] | None) -> Shares | None:
    """Return the shares as a tuple of floats, or None if all are equal."""
    if shares is None or len(set(shares)) < 2:
        return None
    return tuple(share + 0.0 for share in shares)  # -0.0 is another content than 0.0


def pieces_error(pieces: int) -> str | None:
    """Return the rule that this number of pieces breaks, or None."""
    if 1 <= pieces <= MOST_PIECES:
        return None
    return f"pieces must be from 1 to {MOST_PIECES}, but are {pieces}"


def piece_bounds(elements: int, pieces: int) -> list[tuple[int, int]]:
    """Cut `elements` into at most `pieces` ranges whose sizes differ by at most one; none empty."""
    count = piece_count(elements, pieces)
    return list(pairwise(number * elements // count for number in range(count + 1)))


def piece_count(elements: int, pieces: int) -> int:
    """Return the number of `piece_bounds`."""
    return max(1, min(pieces, elements))


def owned_bounds(
    elements: int, shares: Sequence[float] | None, members: Sequence[int], block: int = 1
) -> list[int]:
    """Return the bounds of the elements that each member owns, in the members' order.

    `shares`: of every rank; None: equal ones. `members` may be a part of the ranks: their shares
    count relative to each other, or are equal if they sum to 0. Bounds are multiples of `block`,
    except `elements`. A member without a share owns nothing.
    """
    weights = [1.0 if shares is None else shares[rank] for rank in members]
    if not any(weights):
        weights = [1.0] * len(members)
    sums = list(accumulate(weights))
    bounds = [0]
    for up_to in sums:
        cut = round(elements * (up_to / sums[-1]) / block) * block
        bounds.append(elements if up_to >= sums[-1] else min(cut, elements))
    return bounds


def shares_of_hosts(
    shares: Sequence[float] | None, hosts: Sequence[Sequence[int]], leaders: Sequence[int]
) -> Shares | None:
    """Return shares by which each host's leader owns what all ranks of its host own.

    `leaders`: one rank of each host, in any order. Equal shares, None, are equal shares of leaders.
    """
    if shares is None:
        return None
    together = [0.0] * len(shares)
    for host in hosts:
        (leader,) = set(host) & set(leaders)
        together[leader] = math.fsum(shares[rank] for rank in host)
    return tuple(together)


def shares_text(shares: Sequence[float], shown: int) -> str:
    """Write the first shares: "0.5, 0.25, 0.25, 0 and 2 more"."""
    more = f" and {len(shares) - shown} more" if len(shares) > shown else ""
    return ", ".join(f"{share:.3g}" for share in shares[:shown]) + more
