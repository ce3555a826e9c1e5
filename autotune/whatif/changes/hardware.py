"""What if the GPU were faster, or data were always loaded in time?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autotune.dfg.graph import Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.kernels.situations import kernels, positive_amount
from autotune.whatif.primitives import scale, select
from autotune.whatif.question import Question
from autotune.whatif.registry import what_if


@what_if(
    "faster_gpu",
    title="a faster GPU (2 times, or faster_gpu=TIMES)",
    source="Daydream (USENIX ATC 2020), sec. 4.4: shrink",
    enact="run the script on the other GPU",
)
def faster_gpu(base: Base, question: Question) -> Base:
    """Every kernel takes 1 / `faster_gpu` of its time, by default half.

    Assumes that all kernels gain equally. The host, copies between host and device, launch
    latencies and collectives stay as recorded.
    """
    times = positive_amount(question, "faster_gpu", "how many times as fast the GPU is", 2.0)
    return scale(base, kernels(base), 1 / times)


@what_if(
    "no_data_loading",
    title="data loaded in time",
    source="Daydream (USENIX ATC 2020), sec. 4.2.1: data loading tasks",
    enact="DataLoader(..., num_workers=N, pin_memory=True, prefetch_factor=K)",
)
def no_data_loading(base: Base, question: Question) -> Base:
    """The training loop never waits for its next batch.

    Loading is what the profiler annotates as `enumerate(DataLoader)`. Assumes that it runs in other
    processes at no cost for this one. Copies of the batch to the device stay.
    """
    loading = select(base, kinds=[Kind.LOAD], on_device=False)
    if not loading.any() and not base.loading_s.any():
        raise InvalidInput(
            "the trace shows no data loading; record a loop over a torch DataLoader, whose "
            "enumerate(DataLoader) annotations show it"
        )
    gap_s = base.gap_s.copy()
    recorded = len(base.loading_s)
    gap_s[:recorded] = np.maximum(gap_s[:recorded] - base.loading_s, 0.0)
    return scale(replace(base, gap_s=gap_s), loading, 0.0)
