"""Gradients of a plain module that no call of it has synchronized.

Only a call, `model(x)`, has its backward pass synchronized. A pass through `model.forward(x)` or a
part of the model leaves gradients of this rank alone.
"""

from __future__ import annotations

from collections.abc import Collection


class LocalGradients:
    """The variables whose gradients, since their last step, come from this rank alone.

    A local pass in the same step as a synchronized one does not count, as under DDP: a penalty on
    the parameters, or a second pass from the same outputs.
    """

    def __init__(self, count: int) -> None:
        self._everything = range(count)
        self._synchronized: set[int] = set()  # since their last step
        self._local: set[int] = set()

    def accumulated(self, position: int) -> None:
        """Note a gradient of a pass that is not synchronized."""
        if position not in self._synchronized:
            self._local.add(position)

    def synchronized(self) -> None:
        """Note the end of a synchronized pass, which averages all that was accumulated before."""
        self._synchronized.update(self._everything)
        self._local.clear()

    def take(self, positions: Collection[int]) -> set[int]:
        """Return the local ones of the variables that an optimizer steps now, and forget them."""
        local = self._local.intersection(positions)
        self._local -= local
        self._synchronized.difference_update(positions)
        return local
