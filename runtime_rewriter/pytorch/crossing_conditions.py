"""Conditions under which a script's updates may cross the step, judged by what it has done so far.

All of them concern the script as a whole (`script_steps`), or a single variable: a variable whose
reads cannot be detected does not cross the step (`learned_reads`, `aliases`).
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runtime_rewriter.pytorch.aliases import COUNTS_ALIASES, NO_COUNT, without_alias
from runtime_rewriter.pytorch.learned_reads import LearnedReads
from runtime_rewriter.pytorch.process_hooks import OWN_HOOKS
from runtime_rewriter.pytorch.reads import can_watch
from runtime_rewriter.pytorch.script_steps import ScriptSteps


class CrossingConditions:
    """Decides for one synchronizer which of `parameters` may wait for their updates.

    It examines the script's first steps, and a forward pass under each plan that crosses the step.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._reads = LearnedReads(parameters)
        self.script = ScriptSteps(parameters, OWN_HOOKS)
        self.forbidden: str | None = None
        """Why updates can never cross the step here."""
        self._enabled = False
        self._norms = False

    def load(self, enabled: bool, norms: bool) -> None:
        """Judge by another plan: whether it crosses the step, and has `results`."""
        self._enabled, self._norms = enabled, norms
        self.forget_reads()

    def forget_reads(self) -> None:
        """Find anew in the next forward pass which reads are detected; with nothing pending."""
        self._reads.forget()

    # -- the script

    def refusal_reason(self, norms: bool) -> str | None:
        """Why this script's updates cannot cross the step, judged by its steps so far.

        `norms`: under a plan with `results`.
        """
        if self.forbidden is not None:
            return self.forbidden
        return self.script.refusal_reason(norms) if COUNTS_ALIASES else NO_COUNT

    def limits(self) -> tuple[str, bool]:
        """Why no plan can cross the step here ("" if one can), and whether it needs `results`."""
        return self.refusal_reason(norms=True) or "", self.script.reads_norms

    @property
    def learning(self) -> bool:
        """Whether more steps must be examined; `script.gradients_final` must be called before
        them."""
        return self.script.learning

    @property
    def defers(self) -> bool:
        """Whether the backward pass that ends now leaves its messages to the next forward pass."""
        return (
            self._enabled
            and self._reads.unseen is not None
            and self.refusal_reason(self._norms) is None
        )

    def look_at(self, optimizer: Optimizer, numbers: Mapping[int, int], closure: bool) -> None:
        """Examine a step of `optimizer`, before it runs, if more must be examined.

        `numbers`: identity of each of its parameters -> parameter group.
        """
        if not self.script.looking:
            return
        reason = self.script.look_at(optimizer, numbers, closure, self._norms)
        if reason is not None and self._enabled:
            warnings.warn(
                f"the plan's synchronization ends with each backward pass, since {reason}",
                RuntimeWarning,
                stacklevel=3,
            )

    # -- single variables

    def forward_begins(self, observable: bool) -> None:
        """`observable`: the module itself computes; otherwise its emulation reads the variables."""
        self.script.stop_looking()
        if (
            self._enabled
            and self._reads.unseen is None
            and self.script.seen > 0
            and self.refusal_reason(self._norms) is None
        ):
            self._reads.begin(observable)

    def forward_ended(self) -> None:
        self._reads.end()

    @property
    def unseen(self) -> frozenset[int]:
        """Variables whose reads are not detected, as found in a forward pass under the plan."""
        return frozenset(self._reads.unseen or ())

    def without_answer(self, positions: Iterable[int]) -> set[int]:
        """Those of `positions` whose gradients, as they are now, cannot answer with norms."""
        gradients = {position: self._parameters[position].grad for position in positions}
        return gradients.keys() - _watchable_of(gradients)

    def watchable(self, gradients: Mapping[int, Tensor | None]) -> tuple[set[int], set[int]]:
        """Variables with a gradient whose reads can be detected, and those that must not stay
        pending: all others, and variables whose own reads cannot be detected."""
        watchable = _watchable_of(gradients)
        unseen = self.unseen
        parameters = {
            position: self._parameters[position]
            for position in gradients
            if position in watchable
            and position not in unseen
            and can_watch(self._parameters[position])
        }
        return watchable, gradients.keys() - without_alias(parameters)


def _watchable_of(gradients: Mapping[int, Tensor | None]) -> set[int]:
    """The keys of the gradients whose reads can be detected.

    Without a gradient, step() would take the variable for unused.
    """
    return without_alias({p: g for p, g in gradients.items() if g is not None and can_watch(g)})
