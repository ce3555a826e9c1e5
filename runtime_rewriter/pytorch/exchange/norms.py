"""The 2-norms of all averaged gradients, from their owners to all ranks.

A norm needs the sum of a gradient, but not on every rank. So between the two halves of an exchange,
owners take the norms of what they own, and one small all-reduce hands them to all ranks. Only then
are the sums sent.

| symbol | meaning |
|---|---|
| V | variables, in the order of the model |

A variable that one rank owns whole has the bits of torch's norm of its gradient. One in parts has
the root of the sum of their squares, so it differs in the order of the reduction. All ranks must
scale by the same bits. So where one rank must compute a norm from the values, all ranks do.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.errors import SynchronizationError
from runtime_rewriter.pytorch.clipping_norms import aligned, all_finite, norms_of
from runtime_rewriter.pytorch.exchange.lanes import Flight, Lanes
from runtime_rewriter.pytorch.exchange.transfer import Transfer

_WHOLE, _SQUARES, _NON_FINITE, _FROM_VALUES = range(4)


@dataclass(frozen=True)
class GradientNorms:
    """`norms` (V,): float64. `non_finite` (V,): whether the gradient has an infinity or NaN.

    `from_values`: positions of the variables whose norm every rank computes from the average.
    """

    norms: Tensor
    non_finite: Tensor
    from_values: frozenset[int]


class NormExchange:
    """Takes and sends the norms of the gradients that `transfers` average, once per pass.

    `parameters`: name -> parameter, in the order of the model. Building one is collective.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], transfers: Sequence[Transfer], lanes: Lanes
    ) -> None:
        self._position_of = {name: position for position, name in enumerate(parameters)}
        self._dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
        self._transfers, self._lanes = transfers, lanes
        self.lane = 1 + max(transfer.last_lane for transfer in transfers)
        """The lane of the norms. No sum is sent on an earlier one."""
        self._group = lanes.norms()
        # By position: norms of whole variables, squares of parts, numbers of non-finite parts, and
        # of ranks that compute the norm from the values.
        self._sent = torch.zeros(
            4, len(parameters), dtype=torch.float64, device=lanes.device.device
        )
        self._flight: Flight | None = None
        self._from_values: list[int] = []
        # By the owned parts of a transfer: positions, and whether they are whole variables.
        self._places: dict[tuple[tuple[int, bool], ...], tuple[Tensor, Tensor]] = {}

    def issue(self, from_values: Collection[int]) -> None:
        """Start behind all messages of the pass. Every rank calls it, whatever it reads.

        `from_values`: positions of the variables whose norm this rank computes from the average.
        """
        self._from_values = sorted(from_values)
        self._flight = self._lanes.run([(self.lane, self._exchange)], number=None)

    def wait(self) -> GradientNorms:
        """Wait for the norms of the last pass. Raises `SynchronizationError` if a rank is gone."""
        assert self._flight is not None, "norms are issued with every pass"
        self.end_last()
        whole, squares, non_finite, ranks = self._sent.clone()
        from_values = frozenset(ranks.nonzero().flatten().tolist())
        return GradientNorms(whole + squares.sqrt(), non_finite > 0, from_values)

    def end_last(self) -> None:
        """Wait until the norms of the last pass, if any, need its sums no more.

        Raises as `wait`.
        """
        if self._flight is None:
            return
        try:
            self._flight.wait()
        except RuntimeError as error:
            raise SynchronizationError(
                "the norms of all gradients must arrive on every rank, but failed on rank "
                f"{self._lanes.ranks.rank}: {error}; is every other rank alive and at the same "
                "step?"
            ) from error

    def _exchange(self) -> dist.Work | None:
        """Runs on the lane's thread; later messages on the lane wait until it has ended."""
        self._sent.zero_()
        if self._from_values:
            self._sent[_FROM_VALUES, self._from_values] = 1
        for transfer in self._transfers:
            transfer.wait_for_sum()
            self._take(transfer)
        if self._group is not None:
            dist.all_reduce(self._sent, group=self._group)
        return None

    def _take(self, transfer: Transfer) -> None:
        owned = transfer.own_parts()
        if not owned:
            return
        parts = [aligned(values.to(self._dtypes[part.variable])) for part, values, _ in owned]
        norms = torch.stack([norm.double() for norm in norms_of(parts)])
        finite = all_finite(parts, norms)
        index, whole = self._places_of(
            tuple((self._position_of[part.variable], whole) for part, _, whole in owned)
        )
        self._sent[_WHOLE].index_add_(0, index, torch.where(whole, norms, 0.0))
        self._sent[_SQUARES].index_add_(0, index, torch.where(whole, 0.0, norms.square()))
        self._sent[_NON_FINITE].index_add_(0, index, (~finite).double())

    def _places_of(self, owned: tuple[tuple[int, bool], ...]) -> tuple[Tensor, Tensor]:
        """Both columns, on the device: to copy them there, the host would wait for it."""
        if owned not in self._places:
            index, whole = (
                torch.tensor(column, device=self._sent.device)
                for column in zip(*owned, strict=True)
            )
            self._places[owned] = index, whole
        return self._places[owned]
