"""autotune: finds the fastest gradient synchronization for a training script on a cluster.

`import autotune` is light and has no effects; frameworks load when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from runtime_rewriter.apply import Applied

__version__ = "0.1.0"
__all__ = ["__version__", "apply"]


def apply(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: str | Path | None = None,
) -> Applied:
    """Synchronize `model`'s gradients from now on, as the exported `strategy` says: the one line in a training script.

    Call it once on every rank, after `init_process_group`, with the bare model (not wrapped in DDP). Parameters
    and buffers are broadcast from rank 0. Without a strategy the gradients are sent as torch's DDP would; under
    `autotune tune` the tuner decides. Raises `ModelMismatch` if the strategy is for another model or world size.
    """
    from runtime_rewriter.apply import apply as apply_to_torch

    return apply_to_torch(model, optimizer, strategy)
