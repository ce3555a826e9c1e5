"""Figures of one case of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from benchmarks.op_fusion.sides import APART, FUSED, GRAPPLER, SideTimes


@dataclass(frozen=True)
class Figures:
    """One case. `sets`, `ops`: how many are fused. `ratios`: quartiles over the repeats.

    `exact`: whether exactly these sets were compiled, and of those that pay, exactly these.
    `chosen`: how many sets pay alone, and the ratio if only these are fused. `uncompiled`: whether
    these do not compile together.
    """

    name: str
    elements: int
    sets: int
    ops: int
    apart_us: float
    grappler_us: float
    fused_us: float
    rival: str
    ratios: tuple[float, ...]
    chosen: int
    chosen_ratio: float
    exact: bool
    uncompiled: bool


def figures_of(
    name: str,
    elements: int,
    sets: Sequence[Any],
    times: SideTimes,
    paying: Sequence[Any],
    together: SideTimes | None,
) -> Figures:
    """Return a case's figures. `together`: the times with all sets that pay, if they compile."""
    uncompiled = bool(paying) and together is None
    chosen = times.ratios(APART) if together is None else together.ratios(FUSED)
    return Figures(
        name=name,
        elements=elements,
        sets=len(sets),
        ops=sum(len(one.ops) for one in sets),
        apart_us=1e6 * times.median_s(APART),
        grappler_us=1e6 * times.median_s(GRAPPLER),
        fused_us=1e6 * times.median_s(FUSED),
        rival=times.rival,
        ratios=tuple(quantiles(times.ratios(FUSED), n=4)),
        chosen=len(paying),
        chosen_ratio=median(chosen),
        exact=times.exact and not uncompiled and (together is None or together.exact),
        uncompiled=uncompiled,
    )


def line_of(figure: Figures) -> str:
    """Return a case's line of output."""
    low, middle, high = figure.ratios
    remarks = ("OTHER CLUSTERS", "SETS DO NOT COMPILE TOGETHER")
    remark = "" if figure.exact else f"  {remarks[figure.uncompiled]}"
    return (
        f"{figure.name:18s} {figure.elements * 4 / 2**10:7.0f} KiB  {figure.ops:3d} ops in "
        f"{figure.sets} sets  apart {figure.apart_us:9.0f} us  Grappler "
        f"{figure.grappler_us:9.0f} us  fused {figure.fused_us:9.0f} us  ratio to {figure.rival} "
        f"{middle:5.2f} ({low:.2f} to {high:.2f})  {figure.chosen} sets pay: "
        f"{figure.chosen_ratio:.2f}{remark}"
    )
