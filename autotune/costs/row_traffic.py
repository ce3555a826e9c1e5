"""What sparse gradients weigh that travel as rows: the rows that a step touches, and their numbers.

| symbol | meaning |
|---|---|
| n | ranks that take part |
| t | share of the rows that one rank's step touches (`Variable.touched_share`) |
| u | share of those that any of n ranks touches, 1 - (1 - t)^n: ranks draw their rows independently |

What does not travel as rows weighs what `Message.wire_bytes` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.arrays import FloatArray
from autotune.strategy_space.plan import Message
from autotune.strategy_space.strategy import SparseHandling
from autotune.workload import Variable, Workload

ROW_NUMBER_BYTES = 4
"""A row's number travels as a 32-bit integer (`runtime_rewriter/pytorch/exchange/rows.py`; 64 bits for tables beyond 2^31 rows)."""


def summed_share(variable: Variable, ranks: int) -> float:
    """u."""
    return 1.0 - (1.0 - variable.touched_share) ** ranks


def collective_share(variable: Variable, sparse: SparseHandling, ranks: int) -> float:
    """c(m) of Eq. 2 and 3 over what all rows weigh. All-gathered: n t, what everybody has in the end; served: the mean of both ways."""
    if sparse is SparseHandling.ALL_GATHER:
        return ranks * variable.touched_share
    return (variable.touched_share + summed_share(variable, ranks)) / 2


class RowTraffic:
    """Sizes of the messages of one workload. Rows of one variable are a message of their own (`plan`)."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def sent_bytes(self, message: Message) -> float:
        """What one rank has to send of its own."""
        if message.sparse is SparseHandling.DENSE:
            return float(message.wire_bytes)
        variable = self._variable(message)
        return variable.touched_share * _all_rows_bytes(message, variable)

    def summed_bytes(self, message: Message, ranks: int) -> float:
        """The sum over all ranks, which a server sends back; `ranks` of the world where the message names none."""
        if message.sparse is SparseHandling.DENSE:
            return float(message.wire_bytes)
        variable = self._variable(message)
        return summed_share(variable, len(message.ranks) or ranks) * _all_rows_bytes(
            message, variable
        )

    def collective_bytes(self, messages: Sequence[Message], ranks: int) -> FloatArray:
        """c(m) of every message, shape (M,)."""
        return np.array(
            [self._collective_bytes(message, ranks) for message in messages], dtype=np.float64
        )

    def least_bytes(self, messages: Sequence[Message]) -> float:
        """What one rank has to send at least, compressed as they are: of sparse gradients the rows that it touches, even if they are dense
        here."""
        return sum(message.wire_bytes * self._least_share(message) for message in messages)

    def _least_share(self, message: Message) -> float:
        shares = {
            part.variable: self._workload.variables[
                self._workload.index[part.variable]
            ].touched_share
            for part in message.slices
        }
        return sum(part.elements * shares[part.variable] for part in message.slices) / max(
            message.elements, 1
        )

    def _collective_bytes(self, message: Message, ranks: int) -> float:
        if message.sparse is SparseHandling.DENSE:
            return float(message.wire_bytes)
        variable = self._variable(message)
        return collective_share(
            variable, message.sparse, len(message.ranks) or ranks
        ) * _all_rows_bytes(message, variable)

    def _variable(self, message: Message) -> Variable:
        return self._workload.variables[self._workload.index[message.slices[0].variable]]


def _all_rows_bytes(message: Message, variable: Variable) -> float:
    rows = message.elements * variable.rows / max(variable.elements, 1)
    return message.wire_bytes + rows * ROW_NUMBER_BYTES
