"""One dense message of a plan, between the gradients and the wire.

| symbol | meaning |
|---|---|
| w | number of ranks |
| wire | flat buffer in the dtype that travels: this rank's gradient / w, then the sum |
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autotune.strategy_space.plan import Message, TensorSlice
from autotune.strategy_space.shares import piece_bounds
from runtime_rewriter.emulation import travelling
from runtime_rewriter.pytorch.exchange.hierarchical import PlanGroups, sum_of
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.owned_sum import OwnedSum
from runtime_rewriter.pytorch.exchange.payloads import padded_elements
from runtime_rewriter.pytorch.exchange.residuals import Feedback, Residuals, slice_of
from runtime_rewriter.pytorch.exchange.sending import Sending, wire_dtype

BATCHED_BYTES = 64 * 1024
"""Slices up to this size are packed together once their message is complete: one by one, the calls
would cost more than the copies."""


class Transfer(Sending):
    """One message: its wire buffer, a view of it per slice, and the pieces under way.

    `batched`: the slices that are packed together, by number. With a `byte_scale` of k only the
    first 1/k of the wire travels. The rest keeps this rank's own gradient / w.
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
        held_back: bool = False,
    ) -> None:
        """Collective: it may create process groups. `held_back`: `issue` leaves the sum with its
        owners, if the message's exchange has any, until `issue_results`."""
        dtype = getattr(torch, message.dtype)
        multiple = plan_groups.multiple(message)
        length = padded_elements(message, multiple)
        wire_type = wire_dtype(message) or dtype
        wire = torch.zeros(length, dtype=wire_type, device=lanes.device.device)
        self.views = list(_views(wire, message, parameters))
        # A cast slice is scaled and packed alone, so that it is rounded once.
        most = BATCHED_BYTES // wire.element_size() if wire.dtype == dtype else 0
        sizes = [part.elements for part, _ in self.views]
        self.batched = tuple(n for n, elements in enumerate(sizes) if elements <= most)
        self._batched_runs = _runs(wire, sizes, frozenset(self.batched))
        real = torch.view_as_real(wire).flatten() if wire.is_complex() else wire
        real = real[: travelling(real.numel(), byte_scale, multiple)]
        self._feedback = Feedback(residuals, self.views)
        bounds = piece_bounds(real.numel(), message.pieces) if message.elements else ()
        exchanges = [
            sum_of(message, real[start:stop], lanes, plan_groups, self._feedback)
            for start, stop in bounds
        ]
        # Place in the wire, and the own part of the sum, of each piece that has owners.
        self._owned = [
            (start, exchange.owned)
            for (start, _), exchange in zip(bounds, exchanges, strict=True)
            if exchange.owned is not None and not wire.is_complex()
        ]
        pieces = [exchange.steps() for exchange in exchanges]
        results = []
        if held_back and self._owned:
            counts = [owned.steps for _, owned in self._owned]
            results = [s[count:] for s, count in zip(pieces, counts, strict=True) if s[count:]]
            pieces = [s[:count] for s, count in zip(pieces, counts, strict=True)]
        super().__init__(number, message, residuals, lanes, pieces, results)

    def own_parts(self) -> list[tuple[TensorSlice, Tensor, bool]]:
        """Return this rank's parts of the sum: (slice, its values, whether a whole variable's).

        Call it once, when the sum is complete on its owners. Without owners, rank 0 counts as one.
        """
        if not self._owned:
            owns = self._lanes.ranks.rank == 0
            return [(part, view, part.axis is None) for part, view in self.views if owns]
        return [part for at, owned in self._owned for part in self._parts_of(owned, at)]

    def _parts_of(self, owned: OwnedSum, at: int) -> Iterator[tuple[TensorSlice, Tensor, bool]]:
        """The parts in one piece, which begins at element `at` of the wire."""
        start, values = at + owned.start, owned.values()
        offset = 0
        for part, _ in self.views:
            first, last = max(offset - start, 0), min(offset + part.elements - start, len(values))
            if first < last:
                whole = part.axis is None and last - first == part.elements
                yield part, values[first:last], whole
            offset += part.elements

    def pack(self, sources: Sequence[Tensor | None], scale: float) -> None:
        """Fill the batched slices in order, scaled and with their residuals; None: zeros."""
        views = [self.views[number][1] for number in self.batched]
        pairs = []
        for view, source in zip(views, sources, strict=True):
            if source is None:
                view.zero_()
            else:
                pairs.append((view, source))
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [source for _, source in pairs])
        for run in self._batched_runs:
            run.mul_(scale)
        if not self._residuals:
            return
        parts = [self.views[number][0] for number in self.batched]
        residuals = [self._residuals.waiting(part) for part in parts]
        pairs = [(v, r) for v, r in zip(views, residuals, strict=True) if r is not None]
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [residual for _, residual in pairs])

    def _release_residuals(self) -> None:
        self._feedback.sent()

    def _add_to_residuals(self, variables: Collection[str]) -> None:
        for part, view in self.views:
            if part.variable in variables:
                self._residuals.residual_of(part).add_(view)


def pack_slice(source: Tensor | None, scale: float, residual: Tensor | None, out: Tensor) -> None:
    """Write `source * scale + residual` into a slice's view, rounded once; None: zeros."""
    if source is None:
        out.zero_() if residual is None else out.copy_(residual)
    elif residual is None:
        torch.mul(source, scale, out=out)
    else:
        torch.add(residual, source, alpha=scale, out=out)


def _views(
    wire: Tensor, message: Message, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[TensorSlice, Tensor]]:
    """A view per slice. Whole channels-last tensors keep their strides for contiguous copies."""
    offset = 0
    for part in message.slices:
        parameter = parameters[part.variable]
        flat = wire[offset : offset + part.elements]
        if part.axis is None and _is_channels_last(parameter):
            view = flat.as_strided(parameter.size(), parameter.stride())
        else:
            view = flat.view(slice_of(parameter, part).shape)
        yield part, view
        offset += part.elements


def _runs(wire: Tensor, sizes: Sequence[int], chosen: frozenset[int]) -> list[Tensor]:
    """The longest contiguous parts of the wire that the chosen slices cover."""
    runs: list[tuple[int, int]] = []
    offset = 0
    for number, elements in enumerate(sizes):
        if number in chosen:
            start = runs.pop()[0] if runs and runs[-1][1] == offset else offset
            runs.append((start, offset + elements))
        offset += elements
    return [wire[start:stop] for start, stop in runs if stop > start]


def _is_channels_last(tensor: Tensor) -> bool:
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if layout is None or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=layout)
