"""Sizes of sparse gradients sent as rows: the rows that a step touches, and their numbers.

| symbol | meaning |
|---|---|
| n | ranks that take part |
| t | share of the rows that one rank's step touches (`Variable.touched_share`) |
| u | share that any of n ranks touches, 1 - (1 - t)^n: ranks draw their rows independently |

The size of anything else is `Message.wire_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from autotune.arrays import FloatArray
from autotune.strategy_space.plan import Message
from autotune.strategy_space.strategy import SparseHandling
from autotune.workload import Variable, Workload

ROW_NUMBER_BYTES = 4
"""A row's number is sent as a 32-bit integer (64 bits for tables beyond 2^31 rows)."""


@overload
def summed_share(touched_share: float, ranks: int) -> float: ...
@overload
def summed_share(touched_share: FloatArray, ranks: FloatArray) -> FloatArray: ...
def summed_share(touched_share: float | FloatArray, ranks: int | FloatArray) -> float | FloatArray:
    """Return u; of arrays for each pair that numpy broadcasts."""
    return 1.0 - (1.0 - touched_share) ** ranks


def collective_share(variable: Variable, sparse: SparseHandling, ranks: int) -> float:
    """c(m) of Eq. 2 and 3 as a share of all rows.

    All-gathered: n t, which every rank has in the end. Served: the mean of both directions.
    """
    if sparse is SparseHandling.ALL_GATHER:
        return ranks * variable.touched_share
    return (variable.touched_share + summed_share(variable.touched_share, ranks)) / 2


class RowTraffic:
    """Message sizes of one workload. Rows of one variable are a message of their own (`plan`)."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def sent_bytes(self, message: Message) -> float:
        """Bytes that one rank sends of its own gradient."""
        if message.sparse is SparseHandling.DENSE:
            return float(message.wire_bytes)
        variable = self._variable(message)
        return variable.touched_share * _all_rows_bytes(message, variable)

    def summed_bytes(self, message: Message, ranks: int) -> float:
        """Bytes of the sum over all ranks, which a server sends back."""
        if message.sparse is SparseHandling.DENSE:
            return float(message.wire_bytes)
        variable = self._variable(message)
        share = summed_share(variable.touched_share, len(message.ranks) or ranks)
        return share * _all_rows_bytes(message, variable)

    def collective_bytes(self, messages: Sequence[Message], ranks: int) -> FloatArray:
        """c(m) of each message, shape (M,)."""
        return np.array(
            [self._collective_bytes(message, ranks) for message in messages], dtype=np.float64
        )

    def least_bytes(self, messages: Sequence[Message]) -> float:
        """Lower bound of the bytes that one rank sends, compressed as the messages are.

        It counts only the touched rows of sparse gradients, even if the messages send them dense.
        """
        return sum(message.wire_bytes * self._least_share(message) for message in messages)

    def _least_share(self, message: Message) -> float:
        variables, index = self._workload.variables, self._workload.index
        touched = sum(
            part.elements * variables[index[part.variable]].touched_share for part in message.slices
        )
        return touched / max(message.elements, 1)

    def _collective_bytes(self, message: Message, ranks: int) -> float:
        if message.sparse is SparseHandling.DENSE:
            return float(message.wire_bytes)
        variable = self._variable(message)
        share = collective_share(variable, message.sparse, len(message.ranks) or ranks)
        return share * _all_rows_bytes(message, variable)

    def _variable(self, message: Message) -> Variable:
        return self._workload.variables[self._workload.index[message.slices[0].variable]]


def _all_rows_bytes(message: Message, variable: Variable) -> float:
    rows = message.elements * variable.rows / max(variable.elements, 1)
    return message.wire_bytes + rows * ROW_NUMBER_BYTES
