"""One message of a sparse variable, between its gradient and the wire."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from autotune.strategy_space.plan import Message
from autotune.strategy_space.shares import owned_bounds
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.emulation import travelling
from runtime_rewriter.pytorch.exchange.hierarchical import PlanGroups
from runtime_rewriter.pytorch.exchange.lanes import Lanes, Step
from runtime_rewriter.pytorch.exchange.owned_rows import RowsFromOwners, RowsToOwners
from runtime_rewriter.pytorch.exchange.ranks import RankGroups
from runtime_rewriter.pytorch.exchange.residuals import Residuals
from runtime_rewriter.pytorch.exchange.row_sums import (
    GatherRows,
    RowStage,
    ScatterRows,
    Source,
    SpreadRows,
)
from runtime_rewriter.pytorch.exchange.rows import (
    Form,
    GradientRows,
    RowBuffers,
    gradient_of,
    joined_rows,
    rows_of,
    values_of,
)
from runtime_rewriter.pytorch.exchange.sending import Sending, wire_dtype


class RowTransfer(Sending):
    """A message of one slice whose rows travel; it allocates nothing of the variable's size.

    `take` the local rows, issue and wait; then `total` is the sum over ranks. With a `byte_scale`
    of k the first 1/k of each rank's rows travels, and the others are left out.
    """

    rows = True

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
        """Collective: it may create process groups."""
        (self.part,) = message.slices
        self._parameter = parameter = parameters[self.part.variable]
        self._byte_scale = byte_scale
        whole = self.part.axis is None
        self._bounds = (0, parameter.shape[0]) if whole else (self.part.start, self.part.stop)
        self._local: GradientRows | None = None
        self._total: GradientRows | None = None
        buffers = RowBuffers.of(parameter, wire_dtype(message))
        steps, self._result = row_sum(
            message, self._bounds, self._taken, buffers, lanes, plan_groups
        )
        steps.append((steps[-1][0] + 1, self._finish))
        super().__init__(number, message, residuals, lanes, [steps])

    def take(self, rows: GradientRows) -> None:
        """`rows`: the local rows of the whole variable, scaled by 1/w."""
        local = rows.between(*self._bounds)
        self._local = local.first(travelling(local.count, self._byte_scale))

    @property
    def total(self) -> GradientRows:
        """The sum over ranks, after `wait`."""
        assert self._total is not None
        return self._total

    def wait(self) -> None:
        super().wait()
        self._lanes.device.keep(self.total.indices, self.total.values)
        self._local = None

    def _add_to_residuals(self, variables: Collection[str]) -> None:
        self._residuals.residual_of(self.part)
        whole = self._residuals.of(self.part.variable)
        assert whole is not None
        whole.index_add_(0, self.total.indices, values_of(self.total, self._parameter))

    def _taken(self) -> GradientRows:
        assert self._local is not None
        return self._local

    def _finish(self) -> None:
        self._total = self._result()


def row_sum(
    message: Message,
    rows: tuple[int, int],
    source: Source,
    buffers: RowBuffers,
    lanes: Lanes,
    plan_groups: PlanGroups,
) -> tuple[list[tuple[int, Step]], Source]:
    """Build the steps of a sparse message, and a function that returns the sum. Collective.

    `rows`: the first row of the variable that the message may send, and the first behind them.
    """
    two_level = plan_groups.two_level(message)
    among = plan_groups.leaders(message.owner) if two_level else plan_groups.world
    hosts, leaders = plan_groups.hosts, among.parts[0]
    stages: list[tuple[Callable[..., RowStage], RankGroups]] = []
    if message.synchronizer is Synchronizer.PARAMETER_SERVER:
        assert message.owner is not None, "a parameter server has an owner"
        stages += [(partial(kind, roots=(message.owner,)), among) for kind in _SERVED]
    elif message.synchronizer is Synchronizer.DIRECT_EXCHANGE:
        owned = plan_groups.owned_by_leaders(message) if two_level else message
        bounds = [rows[0] + cut for cut in owned_bounds(rows[1] - rows[0], owned.shares, leaders)]
        stages += [(partial(kind, bounds=bounds), among) for kind in _OWNED]
    else:
        stages += [(GatherRows, among)]
    if two_level:
        assert hosts is not None
        inside = (partial(kind, roots=leaders) for kind in (GatherRows, SpreadRows))
        stages = [(next(inside), hosts), *stages, (next(inside), hosts)]
    steps: list[tuple[int, Step]] = []
    result = source
    for build, groups in stages:
        stage = build(result, buffers, lanes, groups, len(steps))
        steps.extend(stage.steps())
        result = stage.result
    return steps, result


_SERVED = (GatherRows, ScatterRows)
_OWNED = (RowsToOwners, RowsFromOwners)


def waiting_rows(parameter: Tensor, scale: float, residual: Tensor | None) -> GradientRows:
    """The rows of the gradient times `scale` plus its residual, which may have any row."""
    gradient = parameter.grad
    if residual is None:
        return rows_of(gradient, parameter, scale)
    if gradient is None:
        return replace(rows_of(residual, parameter, 1.0), form=Form.NONE)
    rows = rows_of(residual.add(gradient, alpha=scale), parameter, 1.0)
    return replace(rows, form=Form.COO) if gradient.is_sparse else rows


def write_average(
    parameter: Tensor, gradient: Tensor | None, transfers: Sequence[RowTransfer]
) -> None:
    """Write the sums of a variable's messages into its gradient: dense if it was dense, else COO.

    None: the parameter gets a new `.grad`, in the form of another rank's.
    """
    ordered = sorted(transfers, key=lambda transfer: transfer.part.start)
    totals = [transfer.total for transfer in ordered]
    rows = totals[0] if len(totals) == 1 else joined_rows(totals)
    if gradient is None:
        if rows.form is Form.COO:
            parameter.grad = gradient_of(rows, parameter)
            return
        gradient = parameter.grad = torch.empty_like(parameter)
    elif gradient.is_sparse:
        gradient.copy_(gradient_of(rows, parameter))  # the object stays the same
        return
    gradient.zero_().index_copy_(0, rows.indices, values_of(rows, parameter))
