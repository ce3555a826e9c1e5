"""Step time over bandwidth and over workers (Daydream, Figs. 8 and 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.cluster import Cluster, Where
from autotune.errors import InvalidInput
from autotune.whatif.answers.answers import Answer
from autotune.whatif.answers.predict import changed
from autotune.whatif.base import Base, steady
from autotune.whatif.question import Question

NETWORK_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Curve:
    """The predicted step times of one what-if: (amount, seconds), ascending in the amount.

    The amount is a number of workers, or the rate of the slowest host's link in bytes per second.
    """

    name: str
    points: tuple[tuple[float, float], ...]


def worker_curves(base: Base, answers: Sequence[Answer], workers: Sequence[int]) -> list[Curve]:
    """One curve for each combination whose prediction depends on the number of workers."""
    curves = []
    for one in _one_each(answers):
        questions = [(float(n), replace(one.question, workers=n)) for n in sorted(set(workers))]
        curves.append(_curve(base, one, questions))
    return [curve for curve in curves if len(curve.points) > 1]


def bandwidth_curves(
    base: Base, answers: Sequence[Answer], factors: Sequence[float] = NETWORK_FACTORS
) -> list[Curve]:
    """One curve for each of these combinations, on the cluster with a slower or faster network."""
    curves = []
    for one in _one_each(answers):
        cluster = one.question.cluster
        if cluster is None:
            continue
        clusters = [scaled_network(cluster, factor) for factor in factors]
        questions = [
            (slowest_link_bytes_per_s(scaled), replace(one.question, cluster=scaled))
            for scaled in clusters
        ]
        curves.append(_curve(base, one, questions))
    return [curve for curve in curves if len(curve.points) > 1]


def _one_each(answers: Sequence[Answer]) -> list[Answer]:
    """Of each combination that depends on the workers, the answer with the fewest of them."""
    fewest: dict[str, Answer] = {}
    for one in answers:
        if one.prediction is not None and one.workers is not None:
            fewest.setdefault(one.asked.text, one)
    return list(fewest.values())


def _curve(base: Base, answer: Answer, questions: Sequence[tuple[float, Question]]) -> Curve:
    """Amounts at which the what-if does not apply have no point."""
    points = []
    for amount, question in questions:
        try:
            points.append((amount, steady(changed(base, answer.what_ifs, question)).step_s))
        except InvalidInput:
            continue
    return Curve(answer.asked.text, tuple(points))


def slowest_link_bytes_per_s(cluster: Cluster) -> float:
    return min(host.link_bytes_per_s for host in cluster.hosts)


def scaled_network(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with `factor` times the bandwidth between hosts; latencies stay.

    Fits of collectives between hosts cost 1 / factor as much per byte. Raises `InvalidInput` unless
    the factor is above 0 and the rates stay within their bounds.
    """
    if not factor > 0:
        raise InvalidInput(f"a network is scaled by a factor above 0, but it is {factor}")
    return replace(
        cluster,
        hosts=tuple(
            replace(host, link_bytes_per_s=factor * host.link_bytes_per_s) for host in cluster.hosts
        ),
        pair_links=tuple(
            replace(link, link_bytes_per_s=factor * link.link_bytes_per_s)
            for link in cluster.pair_links
        ),
        fits=tuple(
            fit
            if fit.where is Where.HOST or len(cluster.hosts) == 1
            else replace(
                fit,
                beta_s_per_byte=fit.beta_s_per_byte / factor,
                bends=tuple(
                    replace(bend, s_per_byte=bend.s_per_byte / factor) for bend in fit.bends
                ),
            )
            for fit in cluster.fits
        ),
        link_fits=tuple(
            fit if fit.inside else replace(fit, bytes_per_s=factor * fit.bytes_per_s)
            for fit in cluster.link_fits
        ),
        peer_fits=tuple(
            replace(fit, bytes_per_s=factor * fit.bytes_per_s) for fit in cluster.peer_fits
        ),
    )
