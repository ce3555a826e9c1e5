"""Train with the pairwise ranking loss, learning-rate steps, clipping and early stopping.

Source: AutoSync, supplement sec. 10; the pairwise loss and the batches are those of the paper's
code. The network learns a residual on top of the replay and starts at zero. A handful of trials
must not cost what the replay knows, so the recipe departs from the paper:

- It keeps the weights of the best validation epoch, the untrained start included.
- The loss multiplies a difference of scores by c, which `sharpness` fits to the start on the
  training part. Without c the loss is lowest if the residual copies the replay, to widen
  differences that have the right sign already.
- A prior: leaving the start costs `prior_weight` / n * mean((c d)^2) / 2. That is the -ln of a
  normal prior with deviation 1 / c, in the mean loss of n strategies. With few trials the start
  ranks.

| symbol | meaning |
|---|---|
| n | examples of the training part, of all domains |
| c | sharpness: the slope of the log odds that a pair is ordered as its scores say |
| d | score - score at the start of this training, less its mean over the batch |
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from autotune.errors import InvalidInput
from autotune.rng import generator
from autotune.simulators.evaluation import groups
from autotune.simulators.interface import Example, FitReport


@dataclass(frozen=True)
class TrainingRecipe:
    """Hyperparameters of a fit.

    - `warm_epochs`: epochs of a fit that continues from earlier weights (None: `epochs`).
    - `decay_at`: shares of the epochs; 0.4 and 0.8 of 200 are the paper's 80 and 160.
    - `tie_band`: two measured times that differ by less, relatively, count as equal.
    - `validation_share`: of the examples given to `fit`. After 15 % were held out for testing,
      15/85 of the rest are the paper's 15 %.
    - `threads`: torch threads during `fit` (None: unchanged). On a machine that is busy with
      trials, one thread is up to ten times faster than several.
    - `prior_weight`: the number of strategies that weigh as much as the prior for the start.
    """

    learning_rate: float = 1e-3
    epochs: int = 200
    warm_epochs: int | None = None
    decay: float = 0.3
    decay_at: tuple[float, ...] = (0.4, 0.8)
    clip_norm: float = 0.25
    batch_size: int = 64
    tie_band: float = 0.01
    validation_share: float = 0.15 / 0.85
    threads: int | None = None
    prior_weight: float = 10.0

    def __post_init__(self) -> None:
        if self.epochs < 0 or (self.warm_epochs or 0) < 0:
            raise InvalidInput(
                f"epochs must be at least 0, but are {self.epochs} (warm: {self.warm_epochs})"
            )
        if self.batch_size < 2:
            raise InvalidInput(
                "a batch needs at least 2 examples to form a pair, "
                f"but batch_size is {self.batch_size}"
            )
        if min(self.learning_rate, self.clip_norm) <= 0:
            values = f"{self.learning_rate} and {self.clip_norm}"
            raise InvalidInput(f"learning_rate and clip_norm must be above 0, but are {values}")
        if min(self.tie_band, self.prior_weight) < 0:
            values = f"{self.tie_band} and {self.prior_weight}"
            raise InvalidInput(f"tie_band and prior_weight must be at least 0, but are {values}")
        if self.threads is not None and self.threads < 1:
            raise InvalidInput(f"training needs at least 1 thread, but got {self.threads}")
        if not 0 <= self.validation_share < 1:
            raise InvalidInput(
                f"validation_share must lie in [0, 1), but is {self.validation_share}"
            )


PAPER_RECIPE = TrainingRecipe()
LINEAR_RECIPE = TrainingRecipe(learning_rate=0.01)

# scores differ by about 1, the replay errs by a few percent
_SHARPNESS: tuple[float, ...] = tuple(2.0 ** (step / 2) for step in range(13))
_SMALLEST_VALIDATION = 4  # a smaller part orders at most 3 pairs

Predict = Callable[[Sequence[int]], Tensor]


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Use `count` torch threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def split_off_validation(
    examples: Sequence[Example], share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Return (training, validation) indices, drawn within each domain.

    A domain too small for a useful validation part has none. A group that is in several domains
    goes where the first of them put it. `share` counts examples, and groups that are too large for
    what is left of it are for training.
    """
    group_of, is_held = groups(examples), dict[str, bool]()
    for domain in sorted({example.domain for example in examples}):
        members = np.flatnonzero([example.domain == domain for example in examples])
        held = round(share * len(members))
        held = held if held >= _SMALLEST_VALIDATION else 0
        mixed = generator(seed, "validation", domain).permutation(members).tolist()
        new = dict.fromkeys(group_of[index] for index in mixed if group_of[index] not in is_held)
        held -= sum(is_held.get(group_of[index], False) for index in mixed)
        sizes = Counter(group_of[index] for index in mixed)
        for group in new:
            is_held[group] = sizes[group] <= held
            held -= sizes[group] * is_held[group]
    if sum(is_held.values()) in (1, len(is_held)):
        # Repeats of one plan rank nothing, and without a training part nothing is learned.
        return list(range(len(examples))), []
    validation = [index for index, group in enumerate(group_of) if is_held[group]]
    return [index for index, group in enumerate(group_of) if not is_held[group]], validation


def pairwise_ranking_loss(scores: Tensor, log_measured: Tensor, tie_band: float) -> Tensor | None:
    """Return the mean of log(1 + exp(s_i - s_j)) over the pairs in which i was faster than j.

    The times of a pair differ by more than the tie band; None if there is no such pair. Both inputs
    have shape (n,) and are of one domain; a lower score means faster.
    """
    faster, slower = torch.nonzero(
        log_measured[:, None] < log_measured[None, :] - np.log1p(tie_band), as_tuple=True
    )
    if len(faster) == 0:
        return None
    return nn.functional.softplus(scores[faster] - scores[slower]).mean()


def train_ranking(
    network: nn.Module,
    predict: Predict,
    examples: Sequence[Example],
    recipe: TrainingRecipe,
    seed: int,
    epochs: int,
    limit_s: float = math.inf,
) -> FitReport:
    """Train `network` in place; `predict(indices)` returns its scores, shape (len(indices),).

    Training ends after the first epoch that passes `limit_s`.
    """
    began_s = time.monotonic()
    training, validation = split_off_validation(examples, recipe.validation_share, seed)
    log_measured = torch.log(
        torch.tensor([example.step_s for example in examples], dtype=torch.float64)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    steps = sorted(round(share * epochs) for share in recipe.decay_at)
    start = _scores_by_domain(predict, examples)
    sharp = sharpness(start, training, examples, log_measured, recipe.tie_band)
    best_epoch = 0
    best_loss = _mean_loss(start, sharp, validation, examples, log_measured, recipe)
    best_weights = copy.deepcopy(network.state_dict())
    order = generator(seed, "batches")
    epoch, stopped = 0, "all epochs done"
    for epoch in range(1, epochs + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * recipe.decay ** sum(epoch > step for step in steps)
        network.train()
        for batch in domain_batches(training, examples, recipe.batch_size, order):
            scores = predict(batch)
            loss = pairwise_ranking_loss(sharp * scores, log_measured[batch], recipe.tie_band)
            if loss is None:
                continue
            moved = sharp * (scores - start[batch])
            loss = loss + recipe.prior_weight / len(training) * moved.var(correction=0) / 2
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_norm)
            optimizer.step()
        scores = _scores_by_domain(predict, examples, validation)
        held_out = _mean_loss(scores, sharp, validation, examples, log_measured, recipe)
        if held_out is None or best_loss is None or held_out < best_loss:
            best_epoch = epoch
            best_loss = held_out
            best_weights = copy.deepcopy(network.state_dict())
        if time.monotonic() - began_s > limit_s:
            stopped = f"time limit of {limit_s} s"
            break
    network.load_state_dict(best_weights)
    return FitReport(epoch, best_epoch, time.monotonic() - began_s, stopped)


def domain_batches(
    indices: Sequence[int], examples: Sequence[Example], size: int, order: np.random.Generator
) -> list[list[int]]:
    """Return shuffled batches, each of one domain and of at least two examples.

    A domain that fits into one batch keeps its order, since all pairs of a batch count.
    """
    batches = []
    for domain in sorted({examples[index].domain for index in indices}):
        members = [index for index in indices if examples[index].domain == domain]
        if len(members) > size:
            members = order.permutation(members).tolist()
        batches += [members[start : start + size] for start in range(0, len(members), size)]
    useful = [batch for batch in batches if len(batch) > 1]
    return [useful[number] for number in order.permutation(len(useful))]


def sharpness(
    scores: Tensor,
    indices: Sequence[int],
    examples: Sequence[Example],
    log_measured: Tensor,
    tie_band: float,
) -> float:
    """Return the factor, 1 to 64, with which these scores best explain the order of all pairs."""
    domains = _members(indices, examples)

    def loss(factor: float) -> float:
        losses = [
            pairwise_ranking_loss(factor * scores[members], log_measured[members], tie_band)
            for members in domains
        ]
        return sum(float(each) for each in losses if each is not None)

    return min(_SHARPNESS, key=loss)


def _scores_by_domain(
    predict: Predict, examples: Sequence[Example], indices: Sequence[int] | None = None
) -> Tensor:
    """Return scores predicted domain by domain, shape (n,) for n examples; 0 outside `indices`."""
    scores = torch.zeros(len(examples), dtype=torch.float64)
    with torch.no_grad():
        for members in _members(range(len(examples)) if indices is None else indices, examples):
            scores[members] = predict(members)
    return scores


def _members(indices: Sequence[int], examples: Sequence[Example]) -> list[list[int]]:
    """Return the indices of each domain, in order of the domains' names."""
    members: dict[str, list[int]] = {}
    for index in indices:
        members.setdefault(examples[index].domain, []).append(index)
    return [members[domain] for domain in sorted(members)]


def _mean_loss(
    scores: Tensor,
    sharp: float,
    indices: Sequence[int],
    examples: Sequence[Example],
    log_measured: Tensor,
    recipe: TrainingRecipe,
) -> float | None:
    """Return the mean of the ranking loss over the domains of `indices`; None without a pair."""
    losses = [
        pairwise_ranking_loss(sharp * scores[members], log_measured[members], recipe.tie_band)
        for members in _members(indices, examples)
    ]
    values = [float(loss) for loss in losses if loss is not None]
    return float(np.mean(values)) if values else None
