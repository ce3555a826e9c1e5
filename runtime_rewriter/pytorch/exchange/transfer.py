"""One message of a plan between the gradients and the wire.

| symbol | meaning |
|---|---|
| w | number of ranks |
| wire | flat buffer of one message in the dtype that travels; holds this rank's part / w before, the sum over ranks after |
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autotune.strategy_space.plan import Message, TensorSlice
from runtime_rewriter.emulation import travelling
from runtime_rewriter.pytorch.exchange.hierarchical import PlanGroups, sum_of
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.payloads import padded_elements
from runtime_rewriter.pytorch.exchange.residuals import Feedback, Residuals
from runtime_rewriter.pytorch.exchange.sending import Sending, wire_dtype

BATCHED_BYTES = 64 * 1024
"""Slices up to here are packed together once the last of their message is ready: one by one, calls would cost more than copies."""


class Transfer(Sending):
    """One message: its wire buffer, a view of it per slice, and the collectives in flight.

    `batched`: numbers of the slices that wait for the last of them. With a `byte_scale` of k only the first
    part of the wire, 1/k of it, travels; the rest keeps this rank's own part / w.
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
        dtype = getattr(torch, message.dtype)
        multiple = plan_groups.multiple(message)
        wire = torch.zeros(
            padded_elements(message, multiple),
            dtype=wire_dtype(message) or dtype,
            device=lanes.device.device,
        )
        self.views = list(_views(wire, message, parameters))
        # What is cast is scaled on its way, one by one, so that it is rounded once.
        most = BATCHED_BYTES // wire.element_size() if wire.dtype == dtype else 0
        self.batched = tuple(
            number for number, (part, _) in enumerate(self.views) if part.elements <= most
        )
        self._scaled = _runs(
            wire, [part.elements for part, _ in self.views], frozenset(self.batched)
        )
        real = torch.view_as_real(wire).flatten() if wire.is_complex() else wire
        real = real[: travelling(real.numel(), byte_scale, multiple)]
        self._feedback = Feedback(residuals, self.views)
        steps = (
            sum_of(message, real, lanes, plan_groups, self._feedback).steps()
            if message.elements
            else []
        )
        super().__init__(number, message, residuals, lanes, steps)

    def pack(self, sources: Sequence[Tensor | None], scale: float) -> None:
        """Fill the batched slices, in their order: scaled, with what waited; None is a gradient of zeros."""
        views = [self.views[number][1] for number in self.batched]
        for view, source in zip(views, sources, strict=True):
            if source is None:
                view.zero_()
        found = [
            (view, source)
            for view, source in zip(views, sources, strict=True)
            if source is not None
        ]
        if found:
            torch._foreach_copy_([view for view, _ in found], [source for _, source in found])
        for run in self._scaled:
            run.mul_(scale)
        if self._residuals:
            waiting = [
                (self.views[number][1], self._residuals.waiting(self.views[number][0]))
                for number in self.batched
            ]
            pairs = [(view, residual) for view, residual in waiting if residual is not None]
            if pairs:
                torch._foreach_add_(
                    [view for view, _ in pairs], [residual for _, residual in pairs]
                )

    def _sent(self) -> None:
        self._feedback.sent()

    def _put_back(self, variables: frozenset[str]) -> None:
        for part, view in self.views:
            if part.variable in variables:
                self._residuals.residual_of(part).add_(view)


def pack_slice(source: Tensor | None, scale: float, waiting: Tensor | None, out: Tensor) -> None:
    """One slice of a gradient, None for zeros, scaled, with what waited of it, into its view of a message; rounded once to its dtype."""
    if source is None:
        out.zero_() if waiting is None else out.copy_(waiting)
    elif waiting is None:
        torch.mul(source, scale, out=out)
    else:
        torch.add(waiting, source, alpha=scale, out=out)


def slice_of(tensor: Tensor, part: TensorSlice) -> Tensor:
    """The view of `tensor` that `part` means."""
    return (
        tensor
        if part.axis is None
        else tensor.narrow(part.axis, part.start, part.stop - part.start)
    )


def _views(
    wire: Tensor, message: Message, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[TensorSlice, Tensor]]:
    """A view per slice. Whole channels-last tensors keep their strides, so that copies run along memory."""
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


def _runs(wire: Tensor, elements: Sequence[int], chosen: frozenset[int]) -> list[Tensor]:
    """The stretches of the wire that the chosen slices cover."""
    runs: list[tuple[int, int]] = []
    offset = 0
    for number, count in enumerate(elements):
        if number in chosen:
            if runs and runs[-1][1] == offset:
                runs[-1] = (runs[-1][0], offset + count)
            else:
                runs.append((offset, offset + count))
        offset += count
    return [wire[start:stop] for start, stop in runs if stop > start]


def _is_channels_last(tensor: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(tensor.dim())
    return (
        layout is not None
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=layout)
    )
