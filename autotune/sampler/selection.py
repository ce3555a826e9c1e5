"""Strategies to try: predicted to be fast, and different from each other.

Source: AutoSync, supplement sec. 7, Eq. 11, solved greedily:

    min over sets of K:  sum_i f_i + alpha sum_i sum_j sim_ij

| symbol | meaning | here |
|---|---|---|
| f_i | predicted step time | divided by the median of all candidates, so 0.1 means 10 % |
| sim_ij | similarity, 1 for equal strategies | shape (n, n), symmetric |
| alpha | trade-off | divided by K |

With alpha / K, alpha weighs a strategy's time against its mean similarity to the chosen ones, for
every K. With these scales alpha = 0.2 to 1.0 is useful for any model, cluster and K. The paper's
own alpha is alpha / K.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike

from autotune.arrays import FloatArray, IntArray
from autotune.errors import InvalidInput
from autotune.strategy_space.strategy import (
    Partition,
    Shard,
    SparseHandling,
    Strategy,
    VariableStrategy,
)

SimilarityRow = Callable[[int], FloatArray]
"""Similarity of one candidate to all, shape (n,): only chosen ones need it, so no (n, n) matrix."""
VariableChoices = tuple[Partition | None, SparseHandling, tuple[Shard, ...]]
CHOICES = 9
"""Choices of a variable."""


def select_diverse(
    predicted_step_s: ArrayLike, similarity: FloatArray | SimilarityRow, k: int, alpha: float
) -> list[int]:
    """Indices of min(k, n) candidates in the order of choice; the first is the predicted fastest.

    `predicted_step_s` (n,): positive seconds. Ties go to the lower index. alpha = 0 is the plain
    top K. Each step adds the candidate that raises the objective least: f_i + alpha / K (2 sum over
    chosen j of sim_ij + 1).
    """
    times = np.asarray(predicted_step_s, dtype=np.float64)
    _check(times, similarity, k, alpha)
    chosen: list[int] = []
    if len(times) == 0:
        return chosen
    increase = times / np.median(times)
    wanted = min(k, len(times))
    while len(chosen) < wanted:
        best = int(np.argmin(increase))
        chosen.append(best)
        if alpha > 0 and len(chosen) < wanted:
            row = similarity(best) if callable(similarity) else similarity[best]
            increase = increase + 2 * alpha / k * row
        increase[best] = np.inf
    return chosen


def objective(
    predicted_step_s: ArrayLike, similarity: FloatArray, chosen: Sequence[int], alpha: float
) -> float:
    """Eq. 11 on the scales above for a set of K strategies; lower is better."""
    times = np.asarray(predicted_step_s, dtype=np.float64)
    index = np.asarray(chosen, dtype=np.int64)
    similar = similarity[np.ix_(index, index)].sum()
    return float((times / np.median(times))[index].sum() + alpha / len(index) * similar)


def choice_codes(strategies: Sequence[Strategy]) -> IntArray:
    """Each choice as an integer, shape (n, choices): equal numbers in a column are equal choices.

    Choices of each variable: partition, sparse handling, and over its shards synchronizer,
    compressor, placement, group, priority, hierarchy, and shares and pieces. Choices of the
    strategy: cross-step, ring order, messages in flight, fused ops and local copies. Raises
    `InvalidInput` if the strategies are of different models.
    """
    if not strategies:
        return np.zeros((0, 0), dtype=np.int64)
    names = [choice.variable for choice in strategies[0].variables]
    for strategy in strategies:
        if [choice.variable for choice in strategy.variables] != names:
            raise InvalidInput(
                "only strategies of one model can be compared, "
                f"but {strategies[0].id} and {strategy.id} name other variables"
            )
    known: dict[VariableChoices, tuple[int, ...]] = {}
    numbers: list[dict[Hashable, int]] = [{} for _ in range(CHOICES)]
    rows = []
    for strategy in strategies:
        of_strategy = (
            strategy.cross_step,
            strategy.ring_order,
            strategy.in_flight,
            strategy.op_fusion,
            strategy.local_copies,
        )
        codes = [_numbered(choice, known, numbers) for choice in strategy.variables]
        codes.append(tuple(numbers[0].setdefault(value, len(numbers[0])) for value in of_strategy))
        rows.append(np.fromiter(chain.from_iterable(codes), dtype=np.int64))
    return np.stack(rows)


def choice_agreement(strategies: Sequence[Strategy]) -> FloatArray:
    """First similarity of the paper: share of equal choices, shape (n, n). Needs no simulator."""
    row = choice_agreement_rows(strategies)
    rows = [row(index) for index in range(len(strategies))]
    return np.array(rows).reshape(len(rows), len(rows))


def choice_agreement_rows(strategies: Sequence[Strategy]) -> SimilarityRow:
    """`choice_agreement` one row at a time, for many candidates."""
    codes = choice_codes(strategies)

    def row(index: int) -> FloatArray:
        agreement: FloatArray = (codes == codes[index]).mean(axis=1)
        return agreement

    return row


def hidden_cosine(embeddings: FloatArray) -> FloatArray:
    """Second similarity of the paper: cosine of hidden states (n, H), shape (n, n), in [-1, 1]."""
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    unit = embeddings / np.where(norms > 0, norms, 1.0)
    cosine: FloatArray = np.clip(unit @ unit.T, -1.0, 1.0)
    return cosine


def _choices(choice: VariableStrategy) -> tuple[Hashable, ...]:
    def over_shards(of: Callable[[Shard], Hashable]) -> Hashable:
        return tuple(of(shard) for shard in choice.shards)

    return (
        choice.partition,
        choice.sparse,
        over_shards(lambda shard: shard.synchronizer),
        over_shards(lambda shard: (shard.compressor, shard.ratio, shard.rank)),
        over_shards(lambda shard: shard.placement),
        over_shards(lambda shard: shard.group),
        over_shards(lambda shard: shard.priority),
        over_shards(lambda shard: shard.hierarchical),
        over_shards(lambda shard: (shard.shares, shard.pieces)),
    )


def _numbered(
    choice: VariableStrategy,
    known: dict[VariableChoices, tuple[int, ...]],
    numbers: Sequence[dict[Hashable, int]],
) -> tuple[int, ...]:
    """The choices of a variable as integers; most variables share those of another one."""
    key = choice.partition, choice.sparse, choice.shards
    codes = known.get(key)
    if codes is None:
        pairs = zip(numbers, _choices(choice), strict=True)
        codes = known[key] = tuple(of.setdefault(value, len(of)) for of, value in pairs)
    return codes


def _check(times: FloatArray, similarity: FloatArray | SimilarityRow, k: int, alpha: float) -> None:
    if times.ndim != 1 or not (np.isfinite(times).all() and (times > 0).all()):
        raise InvalidInput(
            "predicted step times must be a list of finite seconds above 0, but are not; "
            "drop strategies without a prediction"
        )
    if k < 1 or alpha < 0:
        raise InvalidInput(
            "a selection needs k of at least 1 and alpha of at least 0, "
            f"but got k={k} and alpha={alpha}"
        )
    if not callable(similarity) and similarity.shape != (len(times), len(times)):
        raise InvalidInput(
            f"similarity must have shape {(len(times), len(times))} for {len(times)} candidates, "
            f"but has {similarity.shape}"
        )
