"""Training scripts that do what a late update could be seen by, one short function for each.

A script builds its model by `run.wrap`, trains it, and shows what it looks at by `run.see`. It must
see the same under every plan as under plain DDP.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

from odd_scripts import (
    aliases,
    basics,
    copies,
    foreign,
    gradients,
    hooks,
    optimizers,
    passes,
    processes,
    readers,
    states,
    weights,
)
from odd_scripts.aliases import alias
from odd_scripts.basics import Script
from odd_scripts.states import held, moment_view

_SCRIPTS_OF_STATES: dict[str, Script] = {
    "held state": partial(held, take=lambda optimizer, parameter: optimizer.state),
    "held state of a parameter": partial(held, take=lambda optimizer, p: optimizer.state[p]),
    "held moment": partial(held, take=lambda optimizer, p: optimizer.state[p]["exp_avg"]),
    "held view of a moment": partial(held, take=moment_view),
    "held state_dict": partial(held, take=lambda optimizer, p: optimizer.state_dict()),
}
_SCRIPTS_OF_ALIASES: dict[str, Script] = {
    "flat view": partial(alias, take=lambda parameter: parameter.detach().view(-1)),
    "data": partial(alias, take=lambda parameter: parameter.data),
    "array": partial(alias, take=lambda parameter: parameter.detach().numpy()),
    "DLPack": partial(alias, take=lambda p: torch.from_dlpack(p.detach())),
}


def _scripts_in(topic: ModuleType) -> dict[str, Script]:
    return {
        function.__name__: function
        for function in vars(topic).values()
        if getattr(function, "__module__", None) == topic.__name__
        and getattr(function, "__annotations__", {}) == {"run": "Run", "return": "None"}
    }


TOPICS: dict[str, dict[str, Script]] = {
    "basics": _scripts_in(basics),
    "hooks": _scripts_in(hooks),
    "states": _scripts_in(states) | _SCRIPTS_OF_STATES,
    "aliases": _scripts_in(aliases) | _SCRIPTS_OF_ALIASES,
    "readers": _scripts_in(readers),
    "weights": _scripts_in(weights),
    "gradients": _scripts_in(gradients),
    "passes": _scripts_in(passes),
    "optimizers": _scripts_in(optimizers),
    "processes": _scripts_in(processes),
    "copies": _scripts_in(copies),
    "foreign": _scripts_in(foreign),
}
"""The scripts by the module that has them, then by name."""
