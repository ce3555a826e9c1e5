"""A plan as groups of `hvd.DistributedOptimizer`, and the code that a script needs for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Variable

FUSION_THRESHOLD_BYTES = 128 * 2**20
"""The default of Horovod 0.28.1; a larger group would be split."""


@dataclass(frozen=True)
class HorovodGroups:
    """`groups`: the variables of each operation, in plan order. `largest_bytes`: of one group.

    Horovod executes a group once all ranks have its gradients: the order is that of readiness.
    """

    groups: tuple[tuple[str, ...], ...]
    fp16: bool
    largest_bytes: int

    def script(self, model: str, strategy_id: str) -> str:
        """A Python module that enacts the groups in a PyTorch script of Horovod."""
        variables = {"HOROVOD_DISABLE_GROUP_FUSION": "1"}
        if 2 * self.largest_bytes > FUSION_THRESHOLD_BYTES:
            variables["HOROVOD_FUSION_THRESHOLD"] = str(2 * self.largest_bytes)
        settings = "\n".join(f'os.environ["{key}"] = "{text}"' for key, text in variables.items())
        groups = "\n".join(f"    {list(group)!r}," for group in self.groups)
        return _SCRIPT.format(
            strategy=strategy_id,
            model=model,
            settings=settings,
            groups=groups,
            compression="fp16" if self.fp16 else "none",
        )


def horovod_groups(plan: Plan, variables: Iterable[Variable]) -> HorovodGroups | None:
    """The groups that enact the plan; None if it needs more than Horovod's optimizer expresses.

    Each message must be an all-reduce of whole variables. All are uncompressed, or all fp16.
    """
    if plan.cross_step or plan.ring_order is not None:
        return None
    known = {variable.name: variable for variable in variables}
    compressors = {message.compressor for message in plan.messages}
    if compressors not in ({Compressor.NONE}, {Compressor.FP16}):
        return None
    if any(variable.sparse for variable in known.values()):
        return None
    largest_bytes = 0
    for message in plan.messages:
        if message.synchronizer is not Synchronizer.ALL_REDUCE or message.hierarchical:
            return None
        parts = [(part, known[part.variable]) for part in message.slices]
        if any(part.elements != variable.elements for part, variable in parts):
            return None
        largest_bytes = max(largest_bytes, sum(variable.grad_bytes for _, variable in parts))
    groups = tuple(tuple(part.variable for part in message.slices) for message in plan.messages)
    return HorovodGroups(groups, compressors == {Compressor.FP16}, largest_bytes)


_SCRIPT = '''"""{strategy} as groups of Horovod, without autotune. Written by `autotune export`.

Import it before `hvd.init()`, which reads the variables below, and wrap the optimizer by
`distributed`. Horovod executes each group as one operation, in the order of readiness.
"""

import os

{settings}

import horovod.torch as hvd  # noqa: E402

GROUPS = [
{groups}
]


def distributed(optimizer, model, **options):
    """Wrap the optimizer of `model`, the {model} that was tuned.

    `options`: the other arguments that the tuned script gives to `hvd.DistributedOptimizer`, such
    as `op` and `backward_passes_per_step`. Without them Horovod takes its defaults. Parameters,
    groups and compression are those of the strategy.
    """
    parameters = dict(model.named_parameters())
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        groups=[[parameters[name] for name in group] for group in GROUPS],
        compression=hvd.Compression.{compression},
        **options,
    )
'''
