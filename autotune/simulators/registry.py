"""The simulators by name: three of our own, and those of installed plugins.

The paper trains for 200 epochs offline. Our three use recipes that a job can afford between two
rounds of trials. Trained on 60 strategies of a 62-variable model, on one thread of a busy 2-core
machine, they take 1 s (linear), 3 s (gat) and 4 s (rnn). The defaults of `rnn_simulator` and
`gat_simulator` are the paper's sizes and epochs; with them the rnn takes about a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from autotune.plugins import Registry

if TYPE_CHECKING:
    from autotune.simulators.interface import Simulator

_GAT_EPOCHS = 40
_RNN_EPOCHS = 60
_RNN_HIDDEN = 64
_RNN_LAYERS = 1


def _linear() -> Simulator:
    from autotune.simulators.linear import linear_simulator
    from autotune.simulators.training import TrainingRecipe

    return linear_simulator(TrainingRecipe(learning_rate=0.01, threads=1))


def _rnn() -> Simulator:
    from autotune.simulators.rnn import rnn_simulator
    from autotune.simulators.training import TrainingRecipe

    recipe = TrainingRecipe(epochs=_RNN_EPOCHS, threads=1)
    return rnn_simulator(recipe, hidden=_RNN_HIDDEN, layers=_RNN_LAYERS)


def _gat() -> Simulator:
    from autotune.simulators.gat import gat_simulator
    from autotune.simulators.training import TrainingRecipe

    return gat_simulator(TrainingRecipe(epochs=_GAT_EPOCHS, threads=1))


SIMULATORS: Registry[Callable[[], Simulator]] = Registry("autotune.simulators", "simulator")
"""Functions that build an untrained simulator; torch is imported when one is called.

A plugin's entry point names such a function. Its simulator must pass
`tests/contract/test_simulator_contract.py`; a job trains it if its setting `simulators` names it.
"""
SIMULATORS.register("linear", _linear)
SIMULATORS.register("rnn", _rnn)
SIMULATORS.register("gat", _gat)
