"""Judge the mapping of tasks to layers: `python -m benchmarks.layer_coverage`.

`coverage`: share of the device time of a step that belongs to a layer, for every recording of
`benchmarks.whatif_baseline`; collectives count.

`accuracy`: where module frames were recorded, they are hidden, and layers are found again from the
operators, once with autograd's sequence numbers (`layer_accuracy`) and once without them
(`without_numbers`). Instances found and modules recorded are paired one to one, such that they
share as much time as possible. The accuracy is the share of the time of modules that have
parameters on which the pairs agree; the rest (activations, additions, pooling) belongs to modules
without parameters, which only frames name. Recordings with frames are those among the reference
traces, and models that this benchmark records on the processor (`--models`).

`by_kernels`: operators are hidden, too, and layers are found again from the sequence of kernels'
names. The accuracy is the share of the device time of layers on which the pairs agree.

`parameters_agree`: where our recorder named the parameters, the share of the parameters' bytes
whose gradients are accumulated in an instance that has all parameters of one module, and only them.

`refused`: ranks without a base, with the reasons; the exit status is 1 unless all of them have
fewer than two complete, consecutive steps.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.optimize import linear_sum_assignment

from autotune.arrays import BoolArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.profiling.formats.rank_trace import MISSING, Category, RankTrace
from autotune.profiling.graph.host_units import ACCUMULATE
from autotune.profiling.traces.job import TraceJob, assemble, read_job
from autotune.whatif.base import Base
from autotune.whatif.kernels.kernel_layers import with_kernel_layers
from autotune.whatif.recording.gradients import gradients_of
from autotune.whatif.recording.recorded import recorded_base
from benchmarks.layer_coverage.framed_models import MODELS, recorded
from benchmarks.repository import machine, option_parser
from benchmarks.whatif_baseline import Refused, recordings, status_of


@dataclass(frozen=True)
class Row:
    """One rank of a recording; None where the recording does not show the figure."""

    name: str
    coverage: float
    layers: int
    accuracy: float | None
    without_numbers: float | None
    by_kernels: float | None
    parameters_agree: float | None


def rows_of(job: TraceJob, name: str) -> Iterator[Row | Refused]:
    for place, rank in enumerate(job.rank_numbers):
        shown = name + (f" rank {rank}" if len(job.ranks) > 1 else "")
        try:
            base = recorded_base(job, place)
        except InvalidInput as error:
            yield Refused.of(shown, job.ranks[place], error)
            continue
        framed = bool(np.any(job.ranks[place].category == Category.MODULE))
        yield Row(
            shown,
            covered(base),
            len(np.unique(base.layer[_measured(base)])),
            accuracy(job, place, numbered=True) if framed else None,
            accuracy(job, place, numbered=False) if framed else None,
            by_kernels(base),
            parameters_agree(job, place, base),
        )


def _measured(base: Base) -> BoolArray:
    """(N,) the ops whose time counts: those of the device, or of the host without one."""
    return base.on_device if base.on_device.any() else ~base.on_device


def covered(base: Base) -> float:
    """The share of the time that belongs to a layer."""
    spent_s = base.duration_s[_measured(base)]
    return float(spent_s[base.layer[_measured(base)] != NONE].sum() / spent_s.sum())


def accuracy(job: TraceJob, place: int, *, numbered: bool) -> float:
    """Agreement of the layers found without frames with those that the frames name."""
    trace = job.ranks[place]
    shown = recorded_base(assemble([trace]), 0)
    kept = np.flatnonzero(trace.category != Category.MODULE)
    hidden = recorded_base(assemble([_without_frames(trace, kept, numbered)]), 0)
    layer_of = {
        int(kept[event]): hidden.names.layers[layer]
        for event, layer in zip(hidden.event.tolist(), hidden.layer.tolist(), strict=True)
        if layer != NONE and event != NONE
    }
    modules = _with_parameters(shown)
    shared_s: defaultdict[tuple[str, str], float] = defaultdict(float)
    for op in np.flatnonzero(_measured(shown)).tolist():
        layer = int(shown.layer[op])
        if layer != NONE and shown.names.layers[layer] in modules:
            pair = shown.names.layers[layer], layer_of.get(int(shown.event[op]), "")
            shared_s[pair] += float(shown.duration_s[op])
    return _agreement(shared_s)


def by_kernels(base: Base) -> float | None:
    """Agreement of layers by kernels' names with the recorded ones; None if nothing matches."""
    nothing = np.full(base.ops, NONE, dtype=np.int32)
    kernels = base.on_device & (base.kind != Kind.COLLECTIVE)
    kind = np.where(kernels, Kind.OTHER, base.kind).astype(np.int32)
    names = replace(base.names, layers=())
    hidden = replace(base, operator=nothing, layer=nothing, kind=kind, names=names)
    named = with_kernel_layers(hidden)
    if named is hidden:
        return None
    shared_s: defaultdict[tuple[str, str], float] = defaultdict(float)
    for op in np.flatnonzero(kernels & (base.layer != NONE) & (base.queue != NONE)).tolist():
        instance = "" if named.layer[op] == NONE else named.names.layers[named.layer[op]]
        pair = base.names.layers[base.layer[op]], instance
        shared_s[pair] += float(base.duration_s[op])
    return _agreement(shared_s)


def _with_parameters(base: Base) -> set[str]:
    """Layers that accumulate gradients."""
    names, layers = base.names.ops, base.layer.tolist()
    return {
        base.names.layers[layer]
        for name, layer in zip(names, layers, strict=True)
        if name == ACCUMULATE and layer != NONE
    }


def _agreement(shared_s: dict[tuple[str, str], float]) -> float:
    """The most time on which a pairing of modules with instances can agree, as a share."""
    modules, found = (sorted({pair[k] for pair in shared_s}) for k in (0, 1))
    table = np.zeros((len(modules), len(found)))
    for (module, instance), spent_s in shared_s.items():
        if instance:
            table[modules.index(module), found.index(instance)] = spent_s
    rows, columns = linear_sum_assignment(table, maximize=True)
    return float(table[rows, columns].sum() / sum(shared_s.values()))


def _without_frames(trace: RankTrace, kept: np.ndarray, numbered: bool) -> RankTrace:
    names = (
        *("start_s", "duration_s", "category", "lane", "name", "correlation", "external"),
        *("function", "sequence", "size_bytes", "comm", "sync", "inputs"),
    )
    arrays = {name: getattr(trace, name)[kept] for name in names}
    if not numbered:
        arrays["sequence"] = np.full(len(kept), MISSING)
    return replace(trace, **arrays)


def parameters_agree(job: TraceJob, place: int, base: Base) -> float | None:
    """Whether instances hold the parameters of one module each; None without named parameters."""
    gradients = gradients_of(job, place, base)
    if job.details is None or gradients is None:
        return None
    module_of = {one.name: one.name.rpartition(".")[0] for one in gradients}
    instances: defaultdict[str, set[str]] = defaultdict(set)
    modules: defaultdict[str, set[str]] = defaultdict(set)
    for one in gradients:
        instances[module_of[one.name]].add(one.layer)
        modules[one.layer].add(module_of[one.name])
    right = sum(
        one.size_bytes
        for one in gradients
        if one.layer and len(instances[module_of[one.name]]) == len(modules[one.layer]) == 1
    )
    return right / sum(one.size_bytes for one in gradients)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| recording | coverage | layers | accuracy | without numbers | by kernels "
        "| parameters agree |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        judged = (row.accuracy, row.without_numbers, row.by_kernels, row.parameters_agree)
        cells = " | ".join("" if value is None else f"{value:.1%}" for value in judged)
        lines.append(f"| {row.name} | {row.coverage:.1%} | {row.layers} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("traces", nargs="*", type=Path, help="by default all recordings")
    parser.add_argument(
        "--models", nargs="*", help="models to record with frames; by default all, none for none"
    )
    options = parser.parse_args()
    judged = [
        one
        for path in options.traces or recordings()
        for one in rows_of(read_job([path]), f"{path.parent.name}/{path.name}")
    ]
    rows = [one for one in judged if isinstance(one, Row)]
    if not rows:
        sys.exit("no recording has two complete steps")
    judged += [one for name in _models(options.models) for one in rows_of(recorded(name), name)]
    framed = [one for one in judged if isinstance(one, Row)][len(rows) :]
    refused = [one for one in judged if isinstance(one, Refused)]
    print(table([*rows, *framed]))
    kinds: dict[str, list[float]] = {
        "layer_accuracy": [row.accuracy for row in (*rows, *framed) if row.accuracy is not None],
        "without_numbers": [
            row.without_numbers for row in (*rows, *framed) if row.without_numbers is not None
        ],
        "by_kernels": [row.by_kernels for row in rows if row.by_kernels is not None],
        "parameters_agree": [
            row.parameters_agree for row in rows if row.parameters_agree is not None
        ],
    }
    line = {
        "coverage_mean": fmean(row.coverage for row in rows),
        "coverage_min": min(row.coverage for row in rows),
        **{key: fmean(values) if values else None for key, values in kinds.items()},
        "recordings": len(rows),
        "framed": len(kinds["layer_accuracy"]),
        "refused": {one.name: one.reason for one in refused},
        **machine(),
    }
    print(json.dumps(line))
    return status_of(refused)


def _models(given: Sequence[str] | None) -> Sequence[str]:
    return list(MODELS) if given is None else given


if __name__ == "__main__":
    sys.exit(main())
