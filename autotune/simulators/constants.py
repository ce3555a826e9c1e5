"""The physical constants of the replay that trials can correct, and how far they are trusted.

A positive constant c behaves as c e^x. Its x is 0 as probed or assumed; it has a prior of Student's
t, whose width says how much a probe is usually off, and whose heavy tails allow that it is
entirely wrong. An assumed cost of 0 behaves as the default's value times e^x - 1. Limits are
numbers, such as the collectives that run at once. Each changed one costs `LIMIT_COST`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.features.extract import Extractor
from autotune.lowering.costs import Constant, RuntimeCosts
from autotune.lowering.device_costs import costs_of
from autotune.lowering.link_rates import with_link_rates
from autotune.records import Constants

LINKS, START, COLLECTIVE_CPU = "links", "start", "collective cpu"
_LINK_OF = "link of "
OF_COSTS: Mapping[str, tuple[str, ...]] = {
    START: ("collective_s", "message_s"),
    "issue": ("lane_s", "lane_first_s", "piece_s", "issue_s", "issue_first_s"),
    "fill": ("fill_s", "bucket_s", "write_s", "wake_s"),
    "pack": (
        "pack_s_per_byte",
        "cast_s_per_byte",
        "unpack_s_per_byte",
        "hand_out_s_per_byte",
        "sum_s_per_byte",
    ),
    "settle": ("settle_s", "settle_first_s", "settle_each_s", "settle_s_per_byte", "defer_s"),
    "int8": (
        "int8_encode_s",
        "int8_encode_s_per_element",
        "int8_decode_s",
        "int8_decode_s_per_element",
    ),
    "top_k": ("top_k_find_s", "top_k_find_s_per_element", "top_k_add_s", "top_k_add_s_per_element"),
    "low_rank": ("low_rank_s", "low_rank_s_per_flop"),
    "rows": (
        "rows_take_s",
        "rows_take_s_per_byte",
        "rows_add_s",
        "rows_add_s_per_byte",
        "rows_write_s",
        "rows_write_s_per_byte",
    ),
}
"""Factor -> the costs of the runtime that it multiplies."""
LIMITS: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (
    (("threads", "star_threads"), (1, 2, 4, 2**20)),
    (("star_turns",), (0, 1)),
)
"""Costs that are numbers, changed together, and the values that are tried."""
_LIMITED = tuple(name for names, _ in LIMITS for name in names)

PROBED_LINKS, PROBED_LINK, PROBED_COST = 0.01, 0.03, 0.5
"""Widths of the priors of all links together, of one host's, and of costs per message and CPU time,
as probes were off on nine earlier domains (docs/decisions/calibration.md)."""
ASSUMED_LINK, ASSUMED_COST = 0.3, 1.0
"""The same without a probe."""
LIMIT_COST = 4.0
"""Negative log probability that a limit is not as stated: about 2 %."""
MOST_HOSTS = 16
"""Hosts whose links have factors of their own; each one takes more replays."""
_DEFAULTS = RuntimeCosts()


def link_of(host: str) -> str:
    """Return the factor of the seconds that a byte takes on this host's link."""
    return _LINK_OF + host


def widths(extractor: Extractor) -> dict[str, float]:
    """Return the width of the prior of each factor: narrow if probed, wide if assumed."""
    cluster, stated = extractor.cluster, stated_costs(extractor)
    hosts = cluster.hosts if len(cluster.hosts) <= MOST_HOSTS else ()
    assumed = cluster.source == "assumed"
    link = ASSUMED_LINK if assumed else PROBED_LINK
    return {
        LINKS: ASSUMED_LINK if assumed else PROBED_LINKS,
        **{link_of(host.name): link for host in hosts},
        **{
            factor: ASSUMED_COST if is_assumed(factor, cluster, stated) else PROBED_COST
            for factor in (COLLECTIVE_CPU, *OF_COSTS)
        },
    }


def is_assumed(factor: str, cluster: Cluster, stated: RuntimeCosts) -> bool:
    """Return whether any cost that the factor multiplies was assumed.

    Fits of collectives contain the cost of their start and their CPU time.
    """
    if factor in (START, COLLECTIVE_CPU):
        return not cluster.fits
    return any(getattr(stated, name).is_assumed for name in OF_COSTS[factor])


def with_constants(extractor: Extractor, constants: Constants) -> Extractor:
    """Return an extractor whose replays use the changed constants.

    Raises `InvalidInput` for unknown constants, and for those that leave no possible cluster.
    """
    _refuse_unknown(constants, extractor.cluster)
    logs = constants.logs
    stated = stated_costs(extractor)
    changed = {
        name: _changed(getattr(stated, name), getattr(_DEFAULTS, name), logs.get(factor, 0.0))
        for factor, names in OF_COSTS.items()
        for name in names
    }
    for name, value in constants.limits.items():
        changed[name] = Constant(value, "calibrated on the job's trials")
    try:
        cluster = _with_links(extractor.cluster, logs)
    except InvalidInput as error:
        changes = ", ".join(f"{name} {log:.3g}" for name, log in logs.items() if log)
        raise InvalidInput(
            f"calibrated constants must leave a possible cluster, but with the logarithms {changes}"
            f" {error}"
        ) from error
    return extractor.with_rates(cluster, replace(stated, **changed))


def stated_costs(extractor: Extractor) -> RuntimeCosts:
    """Return the costs of the runtime by which the extractor replays."""
    workload = extractor.workload
    return extractor.costs or costs_of(workload.device, workload.device_name)


def _refuse_unknown(constants: Constants, cluster: Cluster) -> None:
    links = (link_of(host.name) for host in cluster.hosts)
    factors = {LINKS, COLLECTIVE_CPU, *OF_COSTS, *links}
    unknown = [
        *(name for name in constants.logs if name not in factors),
        *(name for name in constants.limits if name not in _LIMITED),
    ]
    if unknown:
        known = ", ".join((LINKS, f"{_LINK_OF}HOST", COLLECTIVE_CPU, *OF_COSTS, *_LIMITED))
        raise InvalidInput(
            f"calibrated constants must be some of {known}, but one is {unknown[0][:40]!r}; "
            "replay with the version of autotune that stored it, or a newer one"
        )


def _changed(stated: Constant, default: Constant, x: float) -> Constant:
    if stated.value == 0.0 and stated.is_assumed:
        return replace(stated, value=max(default.value * math.expm1(x), 0.0))
    return replace(stated, value=stated.value * math.exp(x))


def _with_links(cluster: Cluster, logs: Mapping[str, float]) -> Cluster:
    slower: FloatArray = np.array([logs.get(link_of(host.name), 0.0) for host in cluster.hosts])
    slower += logs.get(LINKS, 0.0)
    if slower.any():
        cluster = with_link_rates(cluster, np.exp(-slower).tolist())
    start, cpu = math.exp(logs.get(START, 0.0)), math.exp(logs.get(COLLECTIVE_CPU, 0.0))
    return replace(
        cluster,
        hosts=tuple(replace(host, latency_s=host.latency_s * start) for host in cluster.hosts),
        fits=tuple(
            replace(
                fit,
                alpha_s=fit.alpha_s * start,
                cpu_alpha_s=fit.cpu_alpha_s * cpu,
                cpu_beta_s_per_byte=fit.cpu_beta_s_per_byte * cpu,
            )
            for fit in cluster.fits
        ),
        peer_fits=tuple(replace(fit, message_s=fit.message_s * start) for fit in cluster.peer_fits),
    )
