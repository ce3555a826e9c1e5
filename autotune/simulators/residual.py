"""One `Simulator` around any network that scores a `FeatureBatch`: a residual on the replay.

score = (ln(base) - mean) / spread + network(batch)    lower is faster; the last layer starts at 0
seconds = exp(slope * score + intercept)                slope > 0, fitted in log space
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn

from autotune.arrays import FloatArray
from autotune.costs.sync_cost import GLOBAL_FEATURES
from autotune.errors import InvalidInput
from autotune.features.extract import StrategyFeatures
from autotune.features.raw import RAW_FEATURES
from autotune.files import read_bytes
from autotune.parsing import parse, read_json
from autotune.simulators.batch import (
    FeatureBatch,
    Scaling,
    chunks,
    collate,
    constant_columns,
    require_shards,
)
from autotune.simulators.interface import Example, FitReport
from autotune.simulators.training import (
    TrainingRecipe,
    split_off_validation,
    torch_threads,
    train_ranking,
)
from autotune.simulators.widening import are_widened_by, widened

_WEIGHTS = "weights.safetensors"
_DESCRIPTION = "simulator.json"
_MOMENTS = ("shard_mean", "shard_std", "global_mean", "global_std")
SCHEMA = 2  # the residual is on top of the replay
MAX_WEIGHTS_BYTES = 64 * 2**20
"""The largest network (rnn) has 0.26 MB."""
_SMALLEST_SLOPE = 1e-3  # for scores that disagree with the times: monotone, nearly flat


@dataclass(frozen=True)
class Architecture:
    """`build(sizes)` returns a network: `FeatureBatch` -> (residual (n,), hidden (n, H)).

    Without `with_shards`, its batches have no shards and no edges. `first_weights`: name of the
    parameter, shape (..., F), that weighs the raw features of a shard; "" for a network that reads
    none, or starts at 0.
    """

    name: str
    sizes: tuple[int, ...]
    build: Callable[[tuple[int, ...]], nn.Module]
    with_edges: bool = False
    with_shards: bool = True
    first_weights: str = ""


@dataclass(frozen=True)
class _Description:
    __pydantic_config__ = {"extra": "forbid"}

    architecture: str
    sizes: tuple[int, ...]
    raw_features: tuple[str, ...]
    global_features: tuple[str, ...]
    base_mean: float
    base_scale: float
    replayed_per_analytic: float
    slope: float
    intercept: float
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if not (self.slope > 0 and self.base_scale > 0 and self.replayed_per_analytic > 0):
            raise InvalidInput(
                "slope, base_scale and replayed_per_analytic must be above 0, but are "
                f"{self.slope}, {self.base_scale} and {self.replayed_per_analytic}"
            )


@dataclass(frozen=True)
class _Fitted:
    network: nn.Module
    scaling: Scaling
    slope: float
    intercept: float


class ResidualSimulator:
    """Implements `Simulator`; see there for the contract."""

    def __init__(self, architecture: Architecture, recipe: TrainingRecipe) -> None:
        self.architecture = architecture
        self.recipe = recipe
        self._fitted: _Fitted | None = None

    @property
    def name(self) -> str:
        return self.architecture.name

    @property
    def reads_shards(self) -> bool:
        return self.architecture.with_shards

    def fit(
        self,
        examples: Sequence[Example],
        seed: int,
        warm_start: bool = False,
        limit_s: float = math.inf,
    ) -> FitReport:
        if len(examples) < 2:
            raise InvalidInput(
                "a simulator learns from pairs and needs at least 2 examples, "
                f"but got {len(examples)}; run more trials first"
            )
        features = [example.features for example in examples]
        if self.architecture.with_shards:
            require_shards(features)
        with torch.random.fork_rng(devices=[]), torch_threads(self.recipe.threads):
            # Not `torch.manual_seed`, which would also reseed the GPUs' generators for good.
            torch.default_generator.manual_seed(seed)
            if warm_start and self._fitted is not None:
                network, scaling = copy.deepcopy(self._fitted.network), self._fitted.scaling
                warm_epochs = self.recipe.warm_epochs
                epochs = self.recipe.epochs if warm_epochs is None else warm_epochs
            else:
                network = self.architecture.build(self.architecture.sizes)
                training, _ = split_off_validation(examples, self.recipe.validation_share, seed)
                scaling = self._scaling([examples[index] for index in training])
                self._ignore_constants(network, [features[index] for index in training])
                epochs = self.recipe.epochs

            # A domain that fits into one batch is the same batch in every epoch. A cache smaller
            # than the batches of an epoch would keep none.
            domains = {example.domain for example in examples}
            batches = 2 * len(domains) + len(examples) // self.recipe.batch_size

            @lru_cache(maxsize=batches)
            def batch_of(indices: tuple[int, ...]) -> FeatureBatch:
                return self._collated([features[index] for index in indices], scaling)

            def predict(indices: Sequence[int]) -> Tensor:
                return _scores(network, batch_of(tuple(indices)))[0]

            report = train_ranking(network, predict, examples, self.recipe, seed, epochs, limit_s)
        self._fitted = _Fitted(network.eval(), scaling, 1.0, 0.0)
        log_step_s = np.log([example.step_s for example in examples])
        slope, intercept = calibrate(self._forward(features)[0], log_step_s)
        self._fitted = _Fitted(network, scaling, slope, intercept)
        return report

    def predict_step_s(self, features: Sequence[StrategyFeatures]) -> FloatArray:
        fitted = self._require_fitted()
        seconds: FloatArray = np.exp(fitted.slope * self._forward(features)[0] + fitted.intercept)
        return seconds

    def embed(self, features: Sequence[StrategyFeatures]) -> FloatArray:
        self._require_fitted()
        hidden = self._forward(features)[1]
        norms = np.linalg.norm(hidden, axis=1, keepdims=True)
        unit: FloatArray = hidden / np.where(norms > 0, norms, 1.0)
        return unit

    def save(self, path: Path) -> None:
        fitted = self._require_fitted()
        path.mkdir(parents=True, exist_ok=True)
        scaling = fitted.scaling
        tensors = {
            f"network.{name}": tensor.contiguous()
            for name, tensor in fitted.network.state_dict().items()
        }
        for name in _MOMENTS:
            tensors[f"scaling.{name}"] = getattr(scaling, name)
        save_file(tensors, path / _WEIGHTS)
        description = _Description(
            architecture=self.name,
            sizes=self.architecture.sizes,
            raw_features=RAW_FEATURES,
            global_features=GLOBAL_FEATURES,
            base_mean=scaling.base_mean,
            base_scale=scaling.base_scale,
            replayed_per_analytic=scaling.replayed_per_analytic,
            slope=fitted.slope,
            intercept=fitted.intercept,
        )
        (path / _DESCRIPTION).write_text(
            json.dumps(asdict(description), indent=1), encoding="utf-8"
        )

    def load(self, path: Path) -> None:
        stored = parse(_Description, read_json(path / _DESCRIPTION), str(path / _DESCRIPTION))
        known = are_widened_by(stored.raw_features, RAW_FEATURES)
        if not known or (stored.schema, stored.global_features) != (SCHEMA, GLOBAL_FEATURES):
            raise InvalidInput(
                f"{path}: the simulator was trained on features that differ from this version's; "
                "train it again"
            )
        sizes = self.architecture.sizes
        if (stored.architecture, stored.sizes) != (self.name, sizes):
            raise InvalidInput(
                f"{path}: expected a {self.name!r} simulator of sizes {sizes}, "
                f"but a {stored.architecture!r} simulator of sizes {stored.sizes} is stored; "
                "load it with the simulator that saved it"
            )
        with torch.random.fork_rng(devices=[]):
            network = self.architecture.build(self.architecture.sizes)
        try:
            tensors = load(read_bytes(path / _WEIGHTS, MAX_WEIGHTS_BYTES))
            weights = {
                name.removeprefix("network."): tensor
                for name, tensor in tensors.items()
                if name.startswith("network.")
            }
            shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
            features = stored.raw_features, RAW_FEATURES
            network.load_state_dict(widened(weights, shapes, *features))
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
                raise ValueError("a weight is not finite")
            moments = {name: tensors[f"scaling.{name}"] for name in _MOMENTS}
            length = torch.Size([len(RAW_FEATURES)])
            for name, fill in (("shard_mean", 0.0), ("shard_std", 1.0)):
                moments |= widened({name: moments[name]}, {name: length}, *features, fill)
            _check_moments(moments)
            scaling = Scaling(
                **moments,
                base_mean=stored.base_mean,
                base_scale=stored.base_scale,
                replayed_per_analytic=stored.replayed_per_analytic,
            )
        except (SafetensorError, RuntimeError, KeyError, ValueError) as error:
            raise InvalidInput(
                f"{path / _WEIGHTS} must hold the weights that {_DESCRIPTION} describes, "
                f"but does not: {error}"
            ) from error
        self._fitted = _Fitted(network.eval(), scaling, stored.slope, stored.intercept)

    def _scaling(self, training: Sequence[Example]) -> Scaling:
        return Scaling.of(
            [example.features for example in training],
            [example.domain for example in training],
            self.architecture.with_shards,
        )

    def _ignore_constants(self, network: nn.Module, training: Sequence[StrategyFeatures]) -> None:
        """Start at 0 the weights of raw features that are constant in the training part.

        Their gradient is 0, so random weights would stay, and move the score of the first strategy
        with another value. A later fit in which the feature varies moves them.
        """
        if self.architecture.first_weights:
            weights = network.get_parameter(self.architecture.first_weights)
            with torch.no_grad():
                weights.masked_fill_(constant_columns(training), 0.0)

    def _collated(self, features: Sequence[StrategyFeatures], scaling: Scaling) -> FeatureBatch:
        architecture = self.architecture
        return collate(features, scaling, architecture.with_edges, architecture.with_shards)

    def _forward(self, features: Sequence[StrategyFeatures]) -> tuple[FloatArray, FloatArray]:
        """Return the scores, shape (n,), and the hidden states, shape (n, H)."""
        fitted = self._require_fitted()
        scores, hidden = [np.zeros(0)], []
        with torch.inference_mode():
            for part in chunks(features):
                score, state = _scores(fitted.network, self._collated(part, fitted.scaling))
                scores.append(score.numpy())
                hidden.append(state.double().numpy())
        return np.concatenate(scores), np.concatenate(hidden) if hidden else np.zeros((0, 0))

    def _require_fitted(self) -> _Fitted:
        if self._fitted is None:
            raise InvalidInput(f"the {self.name!r} simulator is untrained; call fit or load first")
        return self._fitted


def _check_moments(moments: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` unless these are tensors as `Scaling.of` computes them."""
    for name, moment in moments.items():
        length = len(RAW_FEATURES if name.startswith("shard") else GLOBAL_FEATURES)
        if moment.shape != (length,) or moment.dtype != torch.float32:
            raise ValueError(
                f"scaling.{name} must hold {length} numbers of float32, but has shape "
                f"{tuple(moment.shape)} of {moment.dtype}"
            )
        if name.endswith("std") and not bool((moment > 0).all()):
            raise ValueError(f"scaling.{name} must be above 0, but is {float(moment.min())}")


def _scores(network: nn.Module, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
    residual, hidden = network(batch)
    return batch.base + residual.double(), hidden


def calibrate(scores: FloatArray, log_step_s: FloatArray) -> tuple[float, float]:
    """Return (slope > 0, intercept) of the least-squares line from scores to log seconds, (n,)."""
    centred = scores - scores.mean()
    spread = float(centred @ centred)
    slope = float(centred @ (log_step_s - log_step_s.mean())) / spread if spread > 0 else 1.0
    slope = max(slope, _SMALLEST_SLOPE)
    return slope, float(log_step_s.mean() - slope * scores.mean())
