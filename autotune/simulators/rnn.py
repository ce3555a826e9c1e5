"""Recurrent simulator: a bidirectional LSTM over the variables in backward order.

Source: AutoSync, supplement sec. 4, Eq. 4-7; sizes from the paper's code (128, 32, 3 layers of
128).

| tensor | shape | |
|---|---|---|
| shards | (S, F) | z^raw and z^pre of every shard |
| z | (n, L, 32) | Eq. 4: MLP of each shard, summed over the shards of its variable |
| h | (n, 2 * hidden) | Eq. 5-6: last state of both directions of the top layer |
| residual | (n,) | Eq. 7 |
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autotune.features.raw import RAW_FEATURES
from autotune.simulators.batch import FeatureBatch
from autotune.simulators.residual import Architecture, ResidualSimulator
from autotune.simulators.training import PAPER_RECIPE, TrainingRecipe

_MLP_HIDDEN = 128
_SHARD_STATE = 32


class _Recurrent(nn.Module):
    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.shard_mlp = nn.Sequential(
            nn.Linear(len(RAW_FEATURES), _MLP_HIDDEN),
            nn.ReLU(),
            nn.Linear(_MLP_HIDDEN, _SHARD_STATE),
            nn.ReLU(),
        )
        self.lstm = nn.LSTM(_SHARD_STATE, hidden, layers, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
        count, length = len(batch.lengths), int(batch.lengths.max())
        states = self.shard_mlp(batch.shards)
        table = states.new_zeros(count * length, _SHARD_STATE).index_add(
            0, batch.shard_slot, states
        )
        sequence = table.view(count, length, _SHARD_STATE)
        if bool((batch.lengths == length).all()):
            _, (last, _) = self.lstm(sequence)
        else:  # models of different sizes in one batch: skip the padding
            packed = nn.utils.rnn.pack_padded_sequence(
                sequence, batch.lengths, batch_first=True, enforce_sorted=False
            )
            _, (last, _) = self.lstm(packed)
        hidden = torch.cat([last[-2], last[-1]], dim=1)
        return self.out(hidden).squeeze(1), hidden


def rnn_simulator(
    recipe: TrainingRecipe = PAPER_RECIPE, hidden: int = 128, layers: int = 3
) -> ResidualSimulator:
    """Return an untrained recurrent simulator; the defaults are the paper's."""
    return ResidualSimulator(
        Architecture(
            "rnn",
            (hidden, layers),
            lambda sizes: _Recurrent(*sizes),
            first_weights="shard_mlp.0.weight",
        ),
        recipe,
    )
