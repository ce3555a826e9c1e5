"""A host's link as its ranks tell it: by the number of the host, since they do not know its name."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.profiling.fits.host_links import PairCost


@dataclass(frozen=True)
class ProbedLink:
    """The link of host number `host`, or (`inside`) the one between two of its devices; `probes`: pairs of hosts that told.

    `told`: (the other host, cost) of each of these pairs. The ranks do not know which pairs have a link of their own.
    """

    __pydantic_config__ = {"extra": "forbid"}

    host: int
    inside: bool
    cost: PairCost
    probes: int = 1
    told: tuple[tuple[int, PairCost], ...] = ()
