"""Packs the gradients of a module into the messages of one plan, and unpacks the averages."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.strategy_space.plan import Plan, TensorSlice
from autotune.strategy_space.strategy import SparseHandling
from runtime_rewriter.pytorch.exchange.hierarchical import PlanGroups
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.norms import NormExchange
from runtime_rewriter.pytorch.exchange.present_rows import PresentRows
from runtime_rewriter.pytorch.exchange.residuals import Residuals, slice_of
from runtime_rewriter.pytorch.exchange.row_transfer import RowTransfer, waiting_rows, write_average
from runtime_rewriter.pytorch.exchange.rows import dense_of
from runtime_rewriter.pytorch.exchange.transfer import Transfer, pack_slice


def build_transfers(
    plan: Plan | None,
    parameters: Mapping[str, nn.Parameter],
    residuals: Residuals,
    lanes: Lanes,
    byte_scale: float,
) -> list[Transfer | RowTransfer]:
    """The plan's messages, in its order; none without a plan. Collective: they create process
    groups."""
    if plan is None:
        return []
    plan_groups = PlanGroups.of(plan, lanes)
    transfers: list[Transfer | RowTransfer] = []
    for number, message in enumerate(plan.messages):
        context = (parameters, residuals, lanes, plan_groups, byte_scale)
        if message.sparse is SparseHandling.DENSE:
            held_back = plan.results is not None
            transfers.append(Transfer(number, message, *context, held_back=held_back))
        else:
            transfers.append(RowTransfer(number, message, *context))
    return transfers


def build_norms(
    plan: Plan | None,
    parameters: Mapping[str, nn.Parameter],
    transfers: Sequence[Transfer | RowTransfer],
    lanes: Lanes,
) -> NormExchange | None:
    """The norms that a plan with `results` sends; None without."""
    if plan is None or plan.results is None:
        return None
    dense = [transfer for transfer in transfers if isinstance(transfer, Transfer)]
    return NormExchange(parameters, dense, lanes)


class Packing:
    """Packs local gradients, divided by `divisor`, and writes the sums back.

    `divisor`: w for averages. `sparse`: positions of the parameters whose gradients are sparse by
    DDP's rule. `messages_of`: the messages of each parameter, once per slice.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        transfers: Sequence[Transfer | RowTransfer],
        residuals: Residuals,
        divisor: int,
        sparse: Collection[int],
    ) -> None:
        self._names, self._parameters, self._residuals = names, parameters, residuals
        self._scale = 1.0 / divisor
        self._position_of = {name: position for position, name in enumerate(names)}
        self._slots: list[list[tuple[TensorSlice, Tensor]]] = [[] for _ in names]
        # Slices that are packed as soon as they are ready.
        self._packed_alone: list[list[tuple[TensorSlice, Tensor]]] = [[] for _ in names]
        # (Position, slice) of those that are packed together, in the order of `Transfer.batched`.
        self._packed_together: dict[int, list[tuple[int, TensorSlice]]] = {}
        self._rows: list[list[RowTransfer]] = [[] for _ in names]
        self.messages_of: list[list[Transfer | RowTransfer]] = [[] for _ in names]
        for transfer in transfers:
            self._place(transfer)
        self._present_rows = PresentRows(
            {position: parameters[position] for position in sparse if not self._rows[position]}
        )

    def _place(self, transfer: Transfer | RowTransfer) -> None:
        if isinstance(transfer, RowTransfer):
            position = self._position_of[transfer.part.variable]
            self._rows[position].append(transfer)
            self.messages_of[position].append(transfer)
            return
        batched = frozenset(transfer.batched)
        together = self._packed_together.setdefault(transfer.number, [])
        for number, (part, view) in enumerate(transfer.views):
            position = self._position_of[part.variable]
            self._slots[position].append((part, view))
            self.messages_of[position].append(transfer)
            if number in batched:
                together.append((position, part))
            else:
                self._packed_alone[position].append((part, view))

    def fill(self, position: int) -> bool:
        """Pack a variable's local gradient, zeros if it has none.

        Also packs the batched slices of messages that this completes. Returns whether there are
        any.
        """
        if self._packed_alone[position]:
            dense = self._dense(position)
            for part, view in self._packed_alone[position]:
                source = None if dense is None else slice_of(dense, part)
                pack_slice(source, self._scale, self._residuals.waiting(part), out=view)
        if self._rows[position]:
            rows = waiting_rows(
                self._parameters[position], self._scale, self._residuals.of(self._names[position])
            )
            for transfer in self._rows[position]:
                transfer.take(rows)
        complete = False
        for message in self.messages_of[position]:
            message.pending -= 1
            if message.pending == 0:
                complete = True
                if isinstance(message, Transfer) and message.batched:
                    self._pack_batched(message)
        return complete

    def _pack_batched(self, transfer: Transfer) -> None:
        sources: list[Tensor | None] = []
        packed, dense = -1, None
        for position, part in self._packed_together[transfer.number]:
            if position != packed:  # slices of one variable are adjacent
                packed, dense = position, self._dense(position)
            sources.append(dense if dense is None or part.axis is None else slice_of(dense, part))
        transfer.pack(sources, self._scale)

    def take_back(self, position: int) -> None:
        """Note that no rank has used the variable: it keeps its `.grad` and its residuals."""
        if not self._residuals.in_use:
            return
        gradient = self._parameters[position].grad
        packed = None if gradient is None else gradient * self._scale
        for message in self.messages_of[position]:
            message.take_back(self._names[position], packed)

    def _dense(self, position: int) -> Tensor | None:
        gradient = self._parameters[position].grad
        return None if gradient is None else dense_of(gradient)

    def ask_for_rows(self, group: dist.ProcessGroup) -> None:
        """Exchange the rows of sparse gradients that travel dense. Collective, with final
        gradients."""
        self._present_rows.ask(group)

    def write(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Copy the averages of arrived messages into these gradients, by position.

        None: the parameter gets a new `.grad`.
        """
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        sparse: list[tuple[int, Tensor, Tensor]] = []
        for position, gradient in gradients.items():
            parameter = self._parameters[position]
            if self._rows[position]:
                write_average(parameter, gradient, self._rows[position])
                continue
            if gradient is None:
                gradient = parameter.grad = torch.empty_like(parameter)
            dense = torch.empty_like(parameter) if gradient.is_sparse else gradient
            for part, view in self._slots[position]:
                targets.append(dense if part.axis is None else slice_of(dense, part))
                sources.append(view)
            if gradient.is_sparse:
                sparse.append((position, gradient, dense))
        if targets:
            torch._foreach_copy_(targets, sources)
        for position, gradient, dense in sparse:
            gradient.copy_(self._present_rows.only(position, dense))
