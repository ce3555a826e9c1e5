"""The three simulators by name, with recipes that an online loop can afford between two rounds of trials.

The paper trains for 200 epochs offline. Trained on 60 strategies of a 62-variable model, on one thread of a
busy 2-core machine, these take 1 s (linear), 3 s (gat) and 4 s (rnn). The paper's own sizes and epochs are the defaults of
`rnn_simulator` and `gat_simulator`; the recurrent one then takes about a minute.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.simulators.interface import Simulator

_GAT_EPOCHS = 40
_RNN_EPOCHS = 60
_RNN_HIDDEN, _RNN_LAYERS = 64, 1


def simulators() -> dict[str, Callable[[], Simulator]]:
    """Makers of untrained simulators; torch is imported when one is made."""
    return {"linear": _linear, "rnn": _rnn, "gat": _gat}


def _linear() -> Simulator:
    from autotune.simulators.linear import linear_simulator
    from autotune.simulators.training import TrainingRecipe

    return linear_simulator(TrainingRecipe(learning_rate=0.01, threads=1))


def _rnn() -> Simulator:
    from autotune.simulators.rnn import rnn_simulator
    from autotune.simulators.training import TrainingRecipe

    return rnn_simulator(
        TrainingRecipe(epochs=_RNN_EPOCHS, threads=1), hidden=_RNN_HIDDEN, layers=_RNN_LAYERS
    )


def _gat() -> Simulator:
    from autotune.simulators.gat import gat_simulator
    from autotune.simulators.training import TrainingRecipe

    return gat_simulator(TrainingRecipe(epochs=_GAT_EPOCHS, threads=1))
