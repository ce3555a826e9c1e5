"""Times and sizes of a workload's variables that all of its plans share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.costs.timing import close_groups, needed_times_s, ready_times_s
from autotune.lowering.messages import SliceTable
from autotune.workload import DTYPE_BYTES, Workload


@dataclass(frozen=True, eq=False)
class PassTimes:
    """Times that all plans of a workload share, shape (V,).

    `ready_group`, `read_group`: an emulated accelerator wakes up once for all gradients, or first
    reads, of a group. Numbered in their order.
    """

    workload: Workload
    ready_s: FloatArray
    needed_s: FloatArray
    ready_group: IntArray
    read_group: IntArray
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
            ready_group=_groups(ready_s),
            read_group=_groups(needed_s),
            elements=elements,
            grad_bytes=elements * element_bytes,
            computes_on_cpu=workload.device == "cpu" and workload.threads > 0,
        )

    def share(self, slices: SliceTable) -> FloatArray:
        """The share of its variable that each slice holds."""
        elements = np.maximum(self.elements[slices.variable], 1.0)
        return slices.elements / elements


def first_of_groups(groups: IntArray) -> BoolArray:
    """Whether each is the first one of its group."""
    first = np.zeros(len(groups), dtype=np.bool_)
    first[np.unique(groups, return_index=True)[1]] = True
    return first


def _groups(times_s: FloatArray) -> IntArray:
    """The number of each time's close group."""
    order = np.argsort(times_s, kind="stable")
    sizes = [len(group) for group in close_groups(times_s[order].tolist())]
    groups = np.empty(len(times_s), dtype=np.int64)
    groups[order] = np.repeat(np.arange(len(sizes)), sizes)
    return groups
