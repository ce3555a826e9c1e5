"""Find the fastest gradient synchronization for a training script on a cluster.

`import autotune` is light and has no side effects. Frameworks load when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from runtime_rewriter.rank.apply import Applied
    from runtime_rewriter.recording.api import P, R, Recorder

Step = TypeVar("Step")

__version__ = "0.1.0"
__all__ = ["Recorder", "__version__", "apply", "distribute", "profile"]


def __getattr__(name: str) -> Any:
    """Load `Recorder` on first access."""
    if name == "Recorder":
        from runtime_rewriter.recording.api import Recorder

        return Recorder
    raise AttributeError(f"module 'autotune' has no attribute {name!r}")


def apply(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: str | Path | None = None,
    find_unused_parameters: bool = False,
) -> Applied:
    """Synchronize the gradients of `model` by an exported strategy from now on.

    This is the one line to add to a training script. Call it once on every rank, after
    `init_process_group`, with the bare model (not wrapped in DDP). It broadcasts parameters and
    buffers from rank 0. `strategy`: path of the export. Without one, gradients are sent as torch's
    DDP sends them. Under `autotune tune` the tuner chooses the strategy, and an export that does
    not fit is not used. `find_unused_parameters`: as DDP's, for a model with parameters that a
    forward pass may leave unused.

    In a Horovod script, call it after `hvd.init()` with the optimizer of
    `hvd.DistributedOptimizer`. Parameters stay as they are. Without a strategy, Horovod's own
    operations stay.

    Raises `ModelMismatch` if the strategy is for another model or world size.
    """
    from runtime_rewriter.rank.apply import apply as apply_to_torch

    return apply_to_torch(model, optimizer, strategy, find_unused_parameters)


def distribute(step: Step, strategy: str | Path | None = None) -> Step:
    """Train by `step`, a TensorFlow function of one batch, on all ranks from now on.

    This is the one line to add to a single-device TensorFlow script, before its loop:
    `train_step = autotune.distribute(train_step)`. The step computes gradients with
    `tf.GradientTape` (or `tf.gradients`) and updates variables. Its batch is split between the
    ranks, so that training is that of one device with the same batch. Its loss must therefore be a
    mean over the rows of the batch, by `tf.reduce_mean` for example. The first call checks this: a
    sum, a mean by a fixed batch size, and a loss that compares rows are refused. `strategy`: path
    of an export. Under `autotune tune` the tuner chooses the strategy, and the export is not used.
    A script that no launcher started gets its own step back.

    Raises `InvalidInput` if TensorFlow is missing, or the step cannot be rewritten or split.
    """
    from importlib.util import find_spec

    from autotune.errors import MissingExtra, install_extra

    if find_spec("tensorflow") is None:
        raise MissingExtra(
            "autotune.distribute needs TensorFlow, which is not installed; "
            + install_extra("tensorflow")
        )
    from runtime_rewriter.rank.tensorflow_step import distribute as distribute_step

    distributed: Step = distribute_step(step, strategy)
    return distributed


def profile(recorder: Recorder) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the function that runs one training step: each call is a step of `recorder`.

    recorder = autotune.Recorder(model)

    @autotune.profile(recorder)
    def train_one_step(batch): ...
    """
    from runtime_rewriter.recording.api import profile as profile_steps

    return profile_steps(recorder)
