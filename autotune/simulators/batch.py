"""Collate many strategies into flat tensors, so that no forward pass loops over strategies.

| symbol | meaning |
|---|---|
| n | strategies of the batch |
| S | shards of all of them |
| L | variables of the largest, the padded length |
| F, G | raw features of a shard, global features |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from autotune.arrays import BoolArray, FloatArray
from autotune.errors import InvalidInput
from autotune.features.extract import StrategyFeatures
from autotune.features.raw import RAW_FEATURES

CLAMP = 5.0
"""Limit of standardised features, in deviations: a new kind of strategy has a bounded score."""

_SHARDS_PER_CHUNK = 8_000  # with about 80 features, states and edges stay in a core's cache
_STRATEGIES_PER_CHUNK = 512


@dataclass(frozen=True)
class Scaling:
    """Mean and deviation of the training part; `base_scale` is the spread of ln(base) in a domain.

    Without shards theirs are 0 and 1. The base is the replayed time. A strategy that was not
    replayed has its analytic time times `replayed_per_analytic`, the median ratio over the training
    part (1 without any replay).
    """

    shard_mean: Tensor
    shard_std: Tensor
    global_mean: Tensor
    global_std: Tensor
    base_mean: float
    base_scale: float
    replayed_per_analytic: float = 1.0

    @staticmethod
    def of(
        features: Sequence[StrategyFeatures], domains: Sequence[str], with_shards: bool = True
    ) -> Scaling:
        shards = _shards(features) if with_shards else np.zeros((1, len(RAW_FEATURES)))
        numbers = np.stack([item.global_features for item in features])
        ratios = [
            item.replayed_step_s / item.analytic_step_s
            for item in features
            if item.replayed_step_s is not None
        ]
        ratio = float(np.median(ratios)) if ratios else 1.0
        base = np.log(base_step_s(features, ratio))
        names = np.array(domains)
        centred = np.concatenate(
            [base[names == name] - base[names == name].mean() for name in sorted(set(domains))]
        )
        # 5 %: smaller differences are hardly more than noise and must not be stretched to full
        # scale.
        return Scaling(
            *_moments(shards),
            *_moments(numbers),
            float(base.mean()),
            max(float(centred.std()), 0.05),
            ratio,
        )


def base_step_s(features: Sequence[StrategyFeatures], replayed_per_analytic: float) -> FloatArray:
    """Return the times that the learned residual corrects, shape (n,)."""
    return np.array(
        [
            replayed_per_analytic * item.analytic_step_s
            if item.replayed_step_s is None
            else item.replayed_step_s
            for item in features
        ]
    )


def disagreement(features: Sequence[StrategyFeatures], replayed_per_analytic: float) -> FloatArray:
    """Return how far the two models of a step differ, ln(analytic / base) less its usual, (n,)."""
    analytic_s = np.array([item.analytic_step_s for item in features])
    return np.log(replayed_per_analytic * analytic_s / base_step_s(features, replayed_per_analytic))


def constant_columns(features: Sequence[StrategyFeatures]) -> Tensor:
    """Return whether each raw feature has one value in all shards, shape (F,)."""
    return torch.from_numpy(_is_constant(_shards(features)))


def _shards(features: Sequence[StrategyFeatures]) -> FloatArray:
    """Return the raw features of all shards, shape (S, F)."""
    return np.concatenate([item.shards for item in features]).astype(np.float64)


def _is_constant(rows: FloatArray) -> BoolArray:
    constant: BoolArray = rows.std(axis=0) < 1e-12 * np.maximum(np.abs(rows).max(axis=0), 1e-300)
    return constant


def _moments(rows: FloatArray) -> tuple[Tensor, Tensor]:
    std = rows.std(axis=0)
    std[_is_constant(rows)] = 1.0  # only centred
    return torch.from_numpy(rows.mean(axis=0)).float(), torch.from_numpy(std).float()


@dataclass(frozen=True)
class FeatureBatch:
    """The tensors of a forward pass. Without shards, S is 0.

    | field | shape | |
    |---|---|---|
    | shards | (S, F) | standardised |
    | shard_slot | (S,) | row of each shard's variable in a padded (n * L) table |
    | shard_strategy | (S,) | |
    | lengths | (n,) | number of variables |
    | edges | (2, pairs) | both ways between shards, or None |
    | numbers | (n, G) | standardised |
    | base | (n,) | ln(base), centred, in units of its spread |
    | disagreement | (n,) | in the same units |
    """

    shards: Tensor
    shard_slot: Tensor
    shard_strategy: Tensor
    lengths: Tensor
    edges: Tensor | None
    numbers: Tensor
    base: Tensor
    disagreement: Tensor


def collate(
    features: Sequence[StrategyFeatures],
    scaling: Scaling,
    with_edges: bool,
    with_shards: bool = True,
) -> FeatureBatch:
    """Return one batch of n >= 1 strategies.

    Raises `InvalidInput` if it needs shards and a strategy's features have none.
    """
    if with_shards:
        require_shards(features)
    else:
        features = [item.without_shards() for item in features]
    counts = np.array([len(item.shard_variable) for item in features])
    lengths = np.array([item.variables for item in features])
    strategy = np.repeat(np.arange(len(features)), counts)
    slot = strategy * lengths.max() + np.concatenate([item.shard_variable for item in features])
    edges = None
    if with_edges:
        first = np.cumsum(counts) - counts
        pairs = np.concatenate(
            [item.shard_edges + start for item, start in zip(features, first, strict=True)]
        )
        edges = torch.from_numpy(np.concatenate([pairs, pairs[:, ::-1]]).T.copy())
    shards = torch.from_numpy(np.concatenate([item.shards for item in features]))
    numbers = torch.from_numpy(np.stack([item.global_features for item in features])).float()
    base = (
        np.log(base_step_s(features, scaling.replayed_per_analytic)) - scaling.base_mean
    ) / scaling.base_scale
    differing = disagreement(features, scaling.replayed_per_analytic) / scaling.base_scale
    return FeatureBatch(
        shards=((shards - scaling.shard_mean) / scaling.shard_std).clamp(-CLAMP, CLAMP),
        shard_slot=torch.from_numpy(slot),
        shard_strategy=torch.from_numpy(strategy),
        lengths=torch.from_numpy(lengths),
        edges=edges,
        numbers=((numbers - scaling.global_mean) / scaling.global_std).clamp(-CLAMP, CLAMP),
        base=torch.from_numpy(base).double(),
        disagreement=torch.from_numpy(differing).float().clamp(-CLAMP, CLAMP),
    )


def require_shards(features: Sequence[StrategyFeatures]) -> None:
    """Raise `InvalidInput` if a strategy's features have no shards."""
    if not all(len(item.shards) for item in features):
        raise InvalidInput("this simulator needs the features of shards; extract them, too")


def chunks(features: Sequence[StrategyFeatures]) -> Iterator[Sequence[StrategyFeatures]]:
    """Yield consecutive parts that bound the memory of one forward pass."""
    start, shards = 0, 0
    for stop, item in enumerate(features):
        if stop > start and (
            shards + len(item.shards) > _SHARDS_PER_CHUNK or stop - start == _STRATEGIES_PER_CHUNK
        ):
            yield features[start:stop]
            start, shards = stop, 0
        shards += len(item.shards)
    if features:
        yield features[start:]
