"""Features and replayed times of a domain's strategies, by what its campaign measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.dataset.trials import Domain
from autotune.features.extract import Extractor
from autotune.lowering.costs import EMULATED_COSTS, Constant, RuntimeCosts


def domain_extractor(domain: Domain) -> Extractor:
    """Return the extractor for the domain's own profile, probe and costs of the runtime.

    Its hosts are emulated on one machine.
    """
    cluster = replace(domain.cluster, machine_cores=domain.cores)
    costs = stored_costs(dict(domain.costs), cluster.world_size)
    return Extractor(domain.workload, cluster, costs)


def stored_costs(measured: Mapping[str, float], ranks: int) -> RuntimeCosts:
    """Return the costs that `runtime_costs.measured_costs` found, with defaults for the others.

    Without `bucket_s`, `write_s` was measured for an average that is written alone, and `fill_s`
    included the time that emulated accelerators took to wake up for a gradient of any sender.
    Without `real_update`, ranks with emulated accelerators updated their variables for real.
    Without `early_update`, an emulated update passed before the forward pass, whatever had arrived.
    Without `lane_first_s`, `lane_s` was measured with a sleeping thread; it is divided in the
    proportion of `EMULATED_COSTS`.
    """
    source = (
        f"measured by benchmarks.runtime_costs, {ranks} processes at once "
        "on the machine of the ranks"
    )
    used = dict(measured)
    if "bucket_s" not in measured:
        used.pop("write_s", None)
        used |= {"bucket_s": measured["fill_s"]} if "fill_s" in measured else {}
    if "lane_s" in measured and "lane_first_s" not in measured:
        behind_s, first_s = EMULATED_COSTS["lane_s"], EMULATED_COSTS["lane_first_s"]
        used["lane_s"] = measured["lane_s"] * behind_s / (behind_s + first_s)
        used["lane_first_s"] = measured["lane_s"] - used["lane_s"]
    used.setdefault("real_update", 1.0)
    used.setdefault("early_update", 1.0)
    constants = {name: Constant(value, source) for name, value in used.items()}
    return replace(RuntimeCosts(), **constants)
