"""Times and sizes of a workload's variables that all of its plans share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray, FloatArray
from autotune.costs.timing import close_groups, needed_times_s, ready_times_s
from autotune.lowering.messages import SliceTable
from autotune.workload import DTYPE_BYTES, Workload


@dataclass(frozen=True, eq=False)
class PassTimes:
    """Times that all plans of a workload share, shape (V,).

    `wakes_ready`, `wakes_read`: whether an emulated accelerator wakes up for this variable's
    gradient or first read, and not for one just before it.
    """

    workload: Workload
    ready_s: FloatArray
    needed_s: FloatArray
    wakes_ready: BoolArray
    wakes_read: BoolArray
    elements: FloatArray
    grad_bytes: FloatArray
    computes_on_cpu: bool

    @staticmethod
    def of(workload: Workload) -> PassTimes:
        """A gradient is ready no earlier than those before it."""
        ready_s = np.maximum.accumulate(np.clip(ready_times_s(workload), 0.0, None))
        needed_s = needed_times_s(workload)
        variables = workload.variables
        elements = np.array([variable.elements for variable in variables], dtype=np.float64)
        element_bytes = np.array([DTYPE_BYTES[variable.dtype] for variable in variables])
        return PassTimes(
            workload=workload,
            ready_s=ready_s,
            needed_s=needed_s,
            wakes_ready=_first_of_groups(ready_s),
            wakes_read=_first_of_groups(needed_s),
            elements=elements,
            grad_bytes=elements * element_bytes,
            computes_on_cpu=workload.device == "cpu" and workload.threads > 0,
        )

    def share(self, slices: SliceTable) -> FloatArray:
        """The share of its variable that each slice holds."""
        elements = np.maximum(self.elements[slices.variable], 1.0)
        return slices.elements / elements


def _first_of_groups(times_s: FloatArray) -> BoolArray:
    """Whether each time is the first of its close group."""
    order = np.argsort(times_s, kind="stable")
    first = np.zeros(len(times_s), dtype=np.bool_)
    first[order[[group[0] for group in close_groups(times_s[order].tolist())]]] = True
    return first
