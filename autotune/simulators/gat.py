"""Graph-attention simulator on the partitioned graph of variables.

Source: AutoSync, supplement sec. 5, Eq. 8-10. A node is a shard with z^raw and z^pre;
`StrategyFeatures.shard_edges` are the edges, used both ways. There are two attention layers, as in
the graph attention networks that the paper cites; the paper gives no sizes.

| tensor | shape | |
|---|---|---|
| shards | (S, F) | |
| states | (S, heads * hidden) | Eq. 8 |
| pooled | (n, heads * hidden) | Eq. 9, mean over the shards of a strategy |
| residual | (n,) | Eq. 10 |
"""

from __future__ import annotations

import warnings

from torch import Tensor, nn
from torch.nn import functional

from autotune.features.raw import RAW_FEATURES
from autotune.simulators.batch import FeatureBatch
from autotune.simulators.residual import Architecture, ResidualSimulator
from autotune.simulators.training import PAPER_RECIPE, TrainingRecipe

with warnings.catch_warnings():
    # torch-geometric 2.8 compiles with torch.jit, which torch 2.13 deprecates
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.", category=DeprecationWarning)
    from torch_geometric.nn import GATConv, global_mean_pool


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.first = GATConv(len(RAW_FEATURES), hidden, heads=heads)
        self.second = GATConv(heads * hidden, hidden, heads=heads)
        self.out = nn.Linear(heads * hidden, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
        states = functional.elu(self.first(batch.shards, batch.edges))
        states = functional.elu(self.second(states, batch.edges))
        pooled = global_mean_pool(states, batch.shard_strategy, len(batch.lengths))
        return self.out(pooled).squeeze(1), pooled


def gat_simulator(
    recipe: TrainingRecipe = PAPER_RECIPE, hidden: int = 32, heads: int = 4
) -> ResidualSimulator:
    """Return an untrained graph-attention simulator."""
    return ResidualSimulator(
        Architecture(
            "gat",
            (hidden, heads),
            lambda sizes: _Attention(*sizes),
            with_edges=True,
            first_weights="first.lin.weight",
        ),
        recipe,
    )
