"""Notices that a script trains another of its models, and no longer the first one.

A GAN trains its models by turns. A script with phases, with folds or with a search of the learning
rate wraps one model after the other, and never trains the first one again.
"""

from __future__ import annotations

from collections.abc import Callable

UNBEGUN_STEPS = 256
"""Steps of further models in which the first one may make none at all. The critic of a Wasserstein
GAN makes 100 before each of the generator's first ones (Arjovsky et al., 2017; its code)."""
SLACK_STEPS = 8
"""Steps of further models beyond twice the most that came between two of the first one."""


class FurtherModels:
    """Counts the steps of the models that a script wraps after the first one.

    All ranks make the same steps, so that they notice the end of the first model's training in the
    same one. `stepped` gets the number of a further model, from 2 on, and the time of its boundary.
    """

    def __init__(self, stepped: Callable[[int, float], None]) -> None:
        self._stepped = stepped
        self.count = 0
        self._steps = 0
        """Steps of further models since the first one's last step."""
        self._most_steps: int | None = None
        """The most of them between two steps of the first model; None before its first step."""

    def add(self) -> FurtherModel:
        """The listener to the steps of one more model."""
        self.count += 1
        return FurtherModel(self, self.count + 1)

    def first_stepped(self) -> None:
        """Account for a step of the first model."""
        self._most_steps = max(self._most_steps or 0, self._steps)
        self._steps = 0

    def model_stepped(self, number: int, now_s: float) -> None:
        """Account for a step of a further model."""
        self._steps += 1
        self._stepped(number, now_s)

    @property
    def replaced_the_first(self) -> bool:
        """Whether the first model's training has ended."""
        if self._most_steps is None:
            return self._steps > UNBEGUN_STEPS
        return self._steps > 2 * self._most_steps + SLACK_STEPS


class FurtherModel:
    """Listens to the steps of one further model."""

    def __init__(self, models: FurtherModels, number: int) -> None:
        self._models = models
        self._number = number

    def on_backward_end(self) -> None:
        """Nothing to do: a step ends at the next forward pass."""

    def on_boundary(self, now_s: float, clean: bool) -> None:
        self._models.model_stepped(self._number, now_s)
