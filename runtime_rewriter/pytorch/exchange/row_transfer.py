"""One message of a sparse variable between its gradient and the wire."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autotune.strategy_space.plan import Message
from runtime_rewriter.emulation import travelling
from runtime_rewriter.pytorch.exchange.hierarchical import PlanGroups
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.residuals import Residuals
from runtime_rewriter.pytorch.exchange.row_sums import row_sum
from runtime_rewriter.pytorch.exchange.rows import (
    Form,
    GradientRows,
    RowBuffers,
    gradient_of,
    rows_of,
    values_of,
)
from runtime_rewriter.pytorch.exchange.sending import Sending, wire_dtype


class RowTransfer(Sending):
    """A message of one slice whose rows travel; nothing of the size of the variable is made.

    `take` the local rows, issue, wait, then `total` is the sum over ranks. With a `byte_scale` of k the first part of the
    rows of each rank travels, 1/k of them, and the others are left out.
    """

    def __init__(
        self,
        number: int,
        message: Message,
        parameters: Mapping[str, Tensor],
        residuals: Residuals,
        lanes: Lanes,
        plan_groups: PlanGroups,
        byte_scale: float = 1.0,
    ) -> None:
        """Collective: it may make process groups."""
        (self.part,) = message.slices
        self._parameter = parameter = parameters[self.part.variable]
        self._byte_scale = byte_scale
        self._bounds = (
            (0, parameter.shape[0]) if self.part.axis is None else (self.part.start, self.part.stop)
        )
        self._local: GradientRows | None = None
        self._total: GradientRows | None = None
        buffers = RowBuffers.of(parameter, wire_dtype(message))
        steps, self._result = row_sum(message, self._taken, buffers, lanes, plan_groups)
        super().__init__(
            number, message, residuals, lanes, [*steps, (steps[-1][0] + 1, self._finish)]
        )

    def take(self, rows: GradientRows) -> None:
        """The local rows of the whole variable, scaled by 1/w."""
        mine = rows.between(*self._bounds)
        self._local = mine.first(travelling(mine.count, self._byte_scale))

    @property
    def total(self) -> GradientRows:
        """The sum over ranks, after `wait`."""
        assert self._total is not None
        return self._total

    def wait(self) -> None:
        super().wait()
        self._lanes.device.keep(self.total.indices, self.total.values)
        self._local = None

    def _put_back(self, variables: frozenset[str]) -> None:
        self._residuals.residual_of(self.part)
        whole = self._residuals.of(self.part.variable)
        assert whole is not None
        whole.index_add_(0, self.total.indices, values_of(self.total, self._parameter))

    def _taken(self) -> GradientRows:
        assert self._local is not None
        return self._local

    def _finish(self) -> None:
        self._total = self._result()


def waiting_rows(parameter: Tensor, scale: float, waiting: Tensor | None) -> GradientRows:
    """The rows of the parameter's gradient times `scale`, with what waited of it, which may have any row."""
    gradient = parameter.grad
    if waiting is None:
        return rows_of(gradient, parameter, scale)
    if gradient is None:
        return replace(rows_of(waiting, parameter, 1.0), form=Form.NONE)
    rows = rows_of(waiting.add(gradient, alpha=scale), parameter, 1.0)
    return replace(rows, form=Form.COO) if gradient.is_sparse else rows


def write_average(parameter: Tensor, transfers: Sequence[RowTransfer]) -> None:
    """Write the sums of a variable's messages into its `.grad`: dense where it was dense, else COO.

    Where this rank had no gradient it gets the form that another rank's has.
    """
    totals = [
        transfer.total for transfer in sorted(transfers, key=lambda transfer: transfer.part.start)
    ]
    rows = totals[0]
    if len(totals) > 1:
        indices, values = (
            torch.cat([total.indices for total in totals]),
            torch.cat([total.values for total in totals]),
        )
        rows = GradientRows(indices, values, max(total.form for total in totals))
    gradient = parameter.grad
    if gradient is None:
        if rows.form is Form.COO:
            parameter.grad = gradient_of(rows, parameter)
            return
        gradient = parameter.grad = torch.empty_like(parameter)
    elif gradient.is_sparse:
        gradient.copy_(
            gradient_of(rows, parameter)
        )  # the object stays the same, as a dense one does
        return
    gradient.zero_().index_copy_(0, rows.indices, values_of(rows, parameter))
