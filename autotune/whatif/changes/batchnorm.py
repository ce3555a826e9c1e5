"""What if batch normalization were restructured and fused into its neighbours?"""

from __future__ import annotations

import numpy as np

from autotune.arrays import BoolArray
from autotune.dfg.graph import NONE, Kind
from autotune.whatif.base import Base
from autotune.whatif.kernels.layer_roles import Role, roles
from autotune.whatif.kernels.situations import require, stream_neighbours
from autotune.whatif.primitives import remove, scale
from autotune.whatif.question import Factor, Question, Reading
from autotune.whatif.registry import what_if

NORMALIZATION = Factor(0.5, 0.5, 0.725, "Daydream sec. 5.1; sec. 6.4 (12.7 % predicted, 7 % real)")
ACTIVATION_LEFT = 0.45
"""Share of the activations' time that stays in the pessimistic reading: the real gain of sec. 6.4
is 55 % of the predicted one."""


@what_if(
    "restructured_batchnorm",
    title="restructured batch normalization",
    source="Jung et al. (MLSys 2019); Daydream (USENIX ATC 2020), Alg. 5",
    enact="model = torch.compile(model) fuses a part of it; the rest needs kernels of your own",
)
def restructured_batchnorm(base: Base, question: Question) -> Base:
    """Batchnorm reads its input half as often, and convolutions take over the ReLUs next to it.

    A ReLU is next to a batchnorm if its kernels directly follow the batchnorm's forward or directly
    precede its backward kernels on their stream; others, such as those behind an addition, stay.
    Assumes that the fused convolutions take no longer, and that launches of batchnorms stay.
    """
    role = roles(base)
    norms = require(
        base.on_device & (role == Role.BATCHNORM), "the trace has no batch normalization"
    )
    relus = _next_to(base, norms, base.on_device & (role == Role.RELU))
    changed = scale(base, norms, NORMALIZATION.at(question.reading))
    if question.reading is Reading.PESSIMISTIC:
        return scale(changed, relus, ACTIVATION_LEFT)
    return remove(changed, relus)


def _next_to(base: Base, norms: BoolArray, relus: BoolArray) -> BoolArray:
    """(N,) ReLU kernels right behind the last, or right before the first, kernel of a batchnorm."""
    _, behind = stream_neighbours(base)
    first = np.flatnonzero(behind != NONE)
    second = behind[first]
    backward = base.kind == Kind.BACKWARD
    near = np.zeros(base.ops, dtype=np.bool_)
    near[second[norms[first] & relus[second] & ~backward[second]]] = True
    near[first[relus[first] & norms[second] & backward[first]]] = True
    return near
