"""The domains that `collect.py` knows: which model on which cluster, with emulated accelerators or real computation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from autotune.records import Accelerators
from benchmarks import generated_models
from benchmarks.testbed_processes import ROOT
from benchmarks.trial_session import Setup

EXAMPLES = ("resnet_digits", "gpt_text", "lstm_text", "ncf_ratings")
PAIRS = (
    ("resnet_digits", "four_hosts"),
    ("gpt_text", "four_hosts_uneven"),
    ("vgg_like", "two_hosts_two_devices"),
    ("densenet_like", "four_hosts"),
    ("transformer_like", "four_hosts_fast"),
    ("embedding_like", "four_hosts_half"),
    ("lstm_text", "four_hosts_mixed"),
    ("ncf_ratings", "two_hosts_two_devices"),
    ("layers", "four_hosts"),
    ("vgg_like", "four_hosts"),
    ("transformer_like", "four_hosts_uneven"),
    ("densenet_like", "two_hosts_two_devices_half"),
    ("resnet_digits", "four_hosts_uneven"),
    ("gpt_text", "two_hosts_two_devices"),
    ("vgg_like", "four_hosts_mixed"),
    ("embedding_like", "two_hosts_two_devices"),
    ("ncf_ratings", "four_hosts"),
    ("lstm_text", "four_hosts_half"),
    ("densenet_like", "four_hosts_mixed"),
    ("transformer_like", "two_hosts_two_devices_half"),
)
"""With emulated accelerators. The first twelve alone cover every model and every kind of cluster."""
REAL = (("resnet_digits", "two_hosts"), ("gpt_text", "two_hosts"))
"""With real computation: one rank per core of a machine of two."""


def setup_of(model: str, cluster_name: str, accelerators: Accelerators) -> Setup:
    own = ROOT / "datasets" / "clusters" / f"{cluster_name}.yaml"
    file = own if own.exists() else ROOT / "examples" / "clusters" / f"{cluster_name}.yaml"
    if model in EXAMPLES:
        return Setup(model, file, (f"examples/{model}.py", "--epochs", "100000"), accelerators)
    return Setup(model, file, ("benchmarks/layers_script.py", "--model", model), accelerators, partial(generated_models.profile, model))


_SETUPS = [setup_of(*pair, Accelerators.EMULATED) for pair in PAIRS] + [setup_of(*pair, Accelerators.REAL) for pair in REAL]
DOMAINS: Mapping[str, Setup] = MappingProxyType({setup.name: setup for setup in _SETUPS})
