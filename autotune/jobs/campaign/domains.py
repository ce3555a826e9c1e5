"""The domains of the outcome benchmark and of the dataset: every model on every cluster.

All domains have the ratio of computation to communication 1 (`balance`), where strategies differ
most. A third of them, drawn by `SEED`, is also measured at 0.5 and at 2. So no domain is chosen for
its result.

Each rank has the work of a core: time is dilated (`dilation`) by the ranks per core of a testbed
with two cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType

from autotune.errors import InvalidInput
from autotune.jobs.campaign import generated_models
from autotune.jobs.campaign.setups import Setup, generated_setup, script_setup
from autotune.records import Accelerators
from autotune.rng import generator

SEED = 24
GENERATED = ("vgg", "densenet", "embedding")
CLIPPED = "gpt_text_clipped"
SCRIPTS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "gpt_text": ("gpt_text", ()),
        CLIPPED: ("gpt_text", ("--clip-grad-norm", "1.0")),
        "resnet_digits": ("resnet_digits", ()),
    }
)
"""Model -> example script and its arguments. The second one is a language model that clips its
gradients by the global norm."""
MODELS = (*GENERATED, *SCRIPTS)
DILATIONS: Mapping[str, int] = MappingProxyType(
    {"two_hosts": 1, "four_hosts": 2, "four_hosts_mixed": 2, "four_hosts_two_devices": 4}
)
"""Cluster -> ranks per core of a testbed with two cores."""
RATIO, OTHER_RATIOS = 1.0, (0.5, 2.0)
SEEDED = 4
"""So many domains are searched with several seeds."""


def cluster_file(root: Path, name: str) -> Path:
    """Return the file of a cluster of `datasets/clusters` or `examples/clusters` below `root`."""
    file = root / "datasets" / "clusters" / f"{name}.yaml"
    return file if file.exists() else root / "examples" / "clusters" / f"{name}.yaml"


def setup_of(
    root: Path, model: str, cluster: str, accelerators: Accelerators = Accelerators.EMULATED
) -> Setup:
    """Return a generated model or an example script on a cluster, with its own times.

    `root`: a checkout of the repository. Raises `InvalidInput` for an unknown model.
    """
    file = cluster_file(root, cluster)
    if model in generated_models.MODELS:
        return generated_setup(model, file, accelerators)
    stem, arguments = SCRIPTS.get(model, (model, ()))
    script = root / "examples" / f"{stem}.py"
    if not script.exists():
        known = ", ".join((*generated_models.MODELS, *SCRIPTS))
        raise InvalidInput(
            f"a model must be generated or an example ({known}), but {model!r} is neither"
        )
    return script_setup(script, file, accelerators, arguments, model)


def outcome_domains(root: Path, dilation: bool = True) -> Mapping[str, Setup]:
    """Return name -> setup: all at `RATIO` first, then those drawn, at `OTHER_RATIOS`.

    Without `dilation`, the ranks of a cluster share the machine's cores in the clock's time.
    """
    pairs = list(product(MODELS, DILATIONS))
    drawn = drawn_of(len(pairs), -(-len(pairs) // 3), "ratios")
    at = [(pair, RATIO) for pair in pairs]
    at += [(pairs[number], ratio) for ratio, number in product(OTHER_RATIOS, drawn)]
    setups = (
        replace(
            setup_of(root, model, cluster),
            ratio=ratio,
            dilation=DILATIONS[cluster] if dilation else 1,
        )
        for (model, cluster), ratio in at
    )
    return MappingProxyType({setup.name: setup for setup in setups})


def seeded_domains(root: Path) -> frozenset[str]:
    """Return the names of the domains that are searched with several seeds."""
    names = [name for name, setup in outcome_domains(root).items() if setup.ratio == RATIO]
    return frozenset(names[number] for number in drawn_of(len(names), SEEDED, "seeds"))


def drawn_of(count: int, wanted: int, purpose: str) -> list[int]:
    """Return `wanted` numbers below `count`, ascending, by `SEED`."""
    order = generator(SEED, purpose).permutation(count).tolist()
    return sorted(order[:wanted])
