"""The messages of two ranks, predicted from the recording of one.

For each model in `datasets/gpu_traces/*`, the messages that DDP would send are derived from the
single-rank fp32 recording: sizes of the gradients, their order, and the kernels that complete
them. They are compared with the kernels of NCCL in the recording of two ranks: number, bytes,
order, and the kernel that each follows. These ranks share one GPU, so their times are no cluster's.

A kernel is named by its place among those of its name in a step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.dfg.graph import Kind
from autotune.profiling.formats.rank_trace import MISSING, Category, RankTrace
from autotune.profiling.traces.job import read_job
from autotune.whatif.base import Base
from autotune.whatif.messages.collective_times import collective_of
from autotune.whatif.messages.ddp_buckets import buckets_of
from autotune.whatif.messages.synchronization import producers
from autotune.whatif.recording.gradients import gradients_of
from autotune.whatif.recording.recorded import recorded_base
from benchmarks.repository import ROOT

BROADCAST = "c10d::broadcast_"


@dataclass(frozen=True)
class Sent:
    """One message. `kernel`, `place`: the last kernel launched before it, "" in this step none."""

    collective: str
    size_bytes: float
    kernel: str
    place: int


@dataclass(frozen=True)
class Compared:
    """A model's messages of a step; exact if both lists are equal."""

    model: str
    predicted: tuple[Sent, ...]
    recorded: tuple[Sent, ...]

    @property
    def exact(self) -> bool:
        return self.predicted == self.recorded

    @property
    def equal(self) -> dict[str, bool]:
        """Each property alone."""
        lists = (self.predicted, self.recorded)
        return {
            "number": len(self.predicted) == len(self.recorded),
            "bytes": len({tuple(one.size_bytes for one in sent) for sent in lists}) == 1,
            "collective": len({tuple(one.collective for one in sent) for sent in lists}) == 1,
            "kernel": len({tuple((one.kernel, one.place) for one in sent) for sent in lists}) == 1,
        }


def compared_messages(folder: Path) -> Iterator[Compared]:
    """Every model of one GPU's folder that has both recordings."""
    for pair in sorted(folder.glob("*.two_ranks")):
        model = pair.name.removesuffix(".two_ranks")
        alone = folder / f"{model}.fp32"
        if alone.is_dir():
            yield Compared(model, predicted_messages(alone), recorded_messages(pair))


def recorded_messages(folder: Path) -> tuple[Sent, ...]:
    """What rank 0 sent in the base's step, in the order of the host."""
    return _sent(recorded_base(read_job([folder]), 0))


def _sent(base: Base) -> tuple[Sent, ...]:
    sent, counts, last = [], Counter[str](), ("", 0)
    for op in base.launched.tolist():
        name = base.names.ops[op]
        if base.kind[op] == Kind.COLLECTIVE:
            kind = collective_of(name)
            sent.append(Sent(str(kind), float(base.size_bytes[op]), *last))
        else:
            counts[name] += 1
            last = name, counts[name]
    return tuple(sent)


def predicted_messages(folder: Path) -> tuple[Sent, ...]:
    """What DDP would send in the step that a single rank recorded.

    Sums follow from the gradients. Broadcasts of buffers are in the recording: DDP issues them on a
    single rank, too, but they start no kernel.
    """
    job = read_job([folder])
    base = recorded_base(job, 0)
    gradients = gradients_of(job, 0, base)
    assert gradients is not None, f"{folder} states no sizes of gradients"
    buckets = buckets_of(gradients)
    kernels = _kernels(base)
    after = producers(base, gradients, buckets).tolist()
    return (
        *_broadcasts(base, job.ranks[0], kernels),
        *(
            Sent("all_reduce", float(bucket.size_bytes), *kernels[op])
            for bucket, op in zip(buckets, after, strict=True)
        ),
    )


def _kernels(base: Base) -> dict[int, tuple[str, int]]:
    """Device op -> its name, and its place among those of the name."""
    counts: Counter[str] = Counter()
    kernels = {}
    for op in base.launched.tolist():
        name = base.names.ops[op]
        counts[name] += 1
        kernels[op] = name, counts[name]
    return kernels


def _broadcasts(
    base: Base, trace: RankTrace, kernels: Mapping[int, tuple[str, int]]
) -> Iterator[Sent]:
    """The broadcasts that the step issues, each behind the kernel that was launched last."""
    calls = [op for op, name in enumerate(base.names.ops) if name == BROADCAST]
    step = trace.steps[-1]
    sizes = [
        trace.comms[trace.comm[event]].size_bytes
        for event in np.flatnonzero(trace.category == Category.HOST_MARK).tolist()
        if trace.comm[event] != MISSING
        and trace.comms[trace.comm[event]].name == "broadcast"
        and step.start_s <= trace.start_s[event] < step.end_s
    ]
    segments = len(calls) // max(len(sizes), 1)  # of one call: before and behind what it calls
    for size_bytes, call in zip(sizes, calls[::segments] if segments else [], strict=True):
        before = [op for op in base.launched.tolist() if base.launch[op] < call]
        yield Sent("broadcast", size_bytes, *(kernels[before[-1]] if before else ("", 0)))


def table(rows: Sequence[Compared]) -> str:
    lines = [
        "| model | messages | bytes | number | bytes | order and kernel |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        total = sum(one.size_bytes for one in row.recorded)
        shown = " | ".join(
            "exact" if row.equal[key] else "differs" for key in ("number", "bytes", "kernel")
        )
        lines.append(f"| {row.model} | {len(row.recorded)} | {total:.0f} | {shown} |")
    return "\n".join(lines)


def message_result() -> tuple[str, dict[str, object]]:
    """(table, keys for the benchmark's last line) of all GPUs' folders."""
    rows = [
        row
        for folder in sorted((ROOT / "datasets" / "gpu_traces").glob("*/"))
        for row in compared_messages(folder)
    ]
    keys: dict[str, object] = {
        "messages_exact": sum(row.exact for row in rows),
        "messages_models": len(rows),
    }
    return table(rows), keys


def main() -> None:
    text, keys = message_result()
    print(text)
    print(json.dumps(keys))


if __name__ == "__main__":
    main()
