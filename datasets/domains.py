"""The domains of `collect.py`: a model on a cluster, with emulated accelerators or real ones.

Those of the outcome benchmark at ratio 1 come first: every model on every cluster. Two have ranks
with little memory, so that plans with large buffers really fail, and two compute for real.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from autotune.jobs.campaign.domains import RATIO, outcome_domains, setup_of
from autotune.jobs.campaign.setups import Setup, varied
from autotune.records import Accelerators

ROOT = Path(__file__).parents[1]
LOW_MEMORY = (("vgg", "two_hosts"), ("transformer", "four_hosts"))
SPARE_MEMORY_MIB = 64
"""What a rank may allocate once it trains; the gradients take 12 to 18 MB."""
REAL = (("resnet_digits", "two_hosts"), ("gpt_text", "two_hosts"))
"""With real computation: one rank per core of a machine with two cores."""


def _low_memory(model: str, cluster: str) -> Setup:
    setup = varied(setup_of(ROOT, model, cluster), spare_memory_mib=SPARE_MEMORY_MIB)
    return replace(setup, model=f"{model}_low_memory", ratio=RATIO)


_SETUPS = [setup for setup in outcome_domains(ROOT).values() if setup.ratio == RATIO]
_SETUPS += [_low_memory(*pair) for pair in LOW_MEMORY]
_SETUPS += [setup_of(ROOT, *pair, Accelerators.REAL) for pair in REAL]
DOMAINS: Mapping[str, Setup] = MappingProxyType({setup.name: setup for setup in _SETUPS})
