"""The rivals of the direct exchange are swept as widely as it is, and judged by other rounds."""

from __future__ import annotations

import pytest

from benchmarks.direct_exchange.__main__ import CLUSTERS, PARTS, cluster_of, parsed
from benchmarks.direct_exchange.figures import compared
from benchmarks.direct_exchange.settings import only_error, wanted_settings

CLUSTER = cluster_of(CLUSTERS["mixed"])
DIRECT = "direct, 256 KiB, 2 in flight"


def test_rings_and_stars_have_every_limit_and_none() -> None:
    for part, rival in (("ring", "ring, 256 KiB"), ("servers", "star, 256 KiB")):
        settings = wanted_settings(part, CLUSTER, [])
        for limit in (1, 2, 4, 8):
            setting = settings[f"{rival}, {limit} in flight"]
            assert setting.plan.cross_step and setting.limit == limit
        unlimited = settings[f"{rival}, no limit"]
        assert unlimited.limit is None and not unlimited.plan.cross_step
    rings = [name for name in wanted_settings("ring", CLUSTER, []) if "16384 KiB" in name]
    assert rings == ["ring, 16384 KiB, no limit", "ring, 16384 KiB, 1 in flight"]


@pytest.mark.parametrize("part", PARTS)
def test_named_settings_keep_the_rivals(part: str) -> None:
    names = list(wanted_settings(part, CLUSTER, ["direct, 16 KiB, 2 in flight", DIRECT]))
    assert any(name.startswith(PARTS[part][0]) for name in names)
    assert [name for name in names if not name.startswith(("ring", "star"))] == [
        "direct, 16 KiB, 2 in flight" if part == "small" else DIRECT
    ]


def test_unknown_names_and_empty_parts_are_refused() -> None:
    assert only_error(["ring", "servers"], CLUSTER, [DIRECT]) is None
    assert only_error(list(PARTS), CLUSTER, []) is None
    unknown = only_error(["ring"], CLUSTER, ["direct, 3 KiB, 2 in flight"])
    assert unknown is not None and "'direct, 3 KiB, 2 in flight' is none" in unknown
    empty = only_error(["ring", "small"], CLUSTER, [DIRECT])
    assert empty is not None and "leaves none of 'small'" in empty


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "3"], "--rounds must be at least 4"),
        (["--only", "ring of gold"], "'ring of gold' is none"),
        (["--parts"], "expected at least one argument"),
    ],
)
def test_options_are_refused_before_anything_is_measured(words, message, capsys) -> None:
    with pytest.raises(SystemExit):
        parsed(words)
    assert message in capsys.readouterr().err


def test_the_first_half_of_the_rounds_chooses_and_the_others_are_reported() -> None:
    taken_s = {
        "ring, a": [1.0, 1.0, 4.0, 4.0],
        "ring, b": [2.0, 2.0, 1.0, 1.0],
        "direct, a": [3.0, 3.0, 2.0, 2.0],
        "shared direct, a": [0.1] * 4,
    }
    figures = compared("even", "ring", taken_s)
    assert figures["to_ring_even_best"] == {"ring": "ring, a", "direct": "direct, a"}
    assert figures["ratio_to_ring_even"] == 2.0
    assert figures["to_ring_even_best_s"] == {"ring": 4.0, "direct": 2.0}
