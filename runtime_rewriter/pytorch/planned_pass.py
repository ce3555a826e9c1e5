"""The backward pass under a plan that our own hooks execute: ready gradients, issue and arrival.

As in DDP, several calls of `backward()` are one pass if each parameter gets its gradient in one of
them.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.errors import SynchronizationError
from runtime_rewriter.pytorch.cross_step import CrossStepUpdates
from runtime_rewriter.pytorch.exchange.norms import NormExchange
from runtime_rewriter.pytorch.exchange.row_transfer import RowTransfer
from runtime_rewriter.pytorch.exchange.transfer import Transfer
from runtime_rewriter.pytorch.loss_scales import LossScales
from runtime_rewriter.pytorch.observers import BackwardObserver
from runtime_rewriter.pytorch.packing import Packing


class PlannedPass:
    """Issues complete messages in plan order, and waits for them or leaves them to `cross_step`.

    `find_unused` and `static` as in DDP. With `unused_as_zeros` every pass sends and writes all
    variables, even those without a gradient. After a `SynchronizationError` the ranks must restart.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        observers: list[BackwardObserver],
        cross_step: CrossStepUpdates,
        loss_scales: LossScales,
        *,
        find_unused: bool,
        static: bool,
        unused_as_zeros: bool = False,
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._observers = observers
        self._cross_step = cross_step
        self._loss_scales = loss_scales
        self._find_unused = find_unused
        self._static = static
        self._unused_as_zeros = unused_as_zeros
        self._transfers: Sequence[Transfer | RowTransfer] = ()
        self._packing: Packing
        self._results: Sequence[int] = ()
        self._norms: NormExchange | None = None
        self._votes: dist.ProcessGroup
        self._deferred = False
        self._learned: list[int] | None = None  # accumulations per backward pass of a static graph
        self._used = [False] * len(names)  # since the last synchronization, by any backward pass
        self._reset()

    def load(
        self,
        transfers: Sequence[Transfer | RowTransfer],
        packing: Packing,
        votes: dist.ProcessGroup,
        deferred: bool,
        results: Sequence[int] = (),
        norms: NormExchange | None = None,
    ) -> None:
        """Use these messages from now on; between two steps. `results`, `norms`: see `Plan`.

        `votes`: the group on which ranks agree at the end of a pass. `deferred`: issue only then.
        """
        self._transfers = transfers
        self._packing = packing
        self._votes = votes
        self._deferred = deferred
        self._results, self._norms = results, norms
        self._reset()

    def _reset(self) -> None:
        count = len(self._names)
        self._fired = [0] * count
        self._filled = [False] * count
        self._expected = [1] * count
        if self._static and self._learned is not None:
            self._expected = list(self._learned)
        self._learning = self._static and self._learned is None
        # Whether messages wait for the end of the pass: when profiling, and while learning.
        self._late = self._deferred or self._learning
        self._next = 0
        self._accumulated = False
        self._called_back = False  # autograd has ended a call of backward() in this pass
        for transfer in self._transfers:
            transfer.reset()

    @property
    def under_way(self) -> bool:
        """Whether gradients have been accumulated and the pass has not ended."""
        return self._accumulated

    def unfinished(self) -> SynchronizationError:
        """Return why the pass, which is under way, will not end."""
        missing = self._missing()
        return self._unused(missing) if self._called_back and missing else interrupted()

    def _missing(self) -> list[int]:
        """The variables that have had no gradient in this pass."""
        return [position for position, times in enumerate(self._fired) if times == 0]

    def note_use(self, position: int) -> None:
        """Note that a backward pass, synchronized or not, has reached this variable.

        As in DDP, it counts as used if it then has a gradient, which may be an earlier one.
        """
        if self._find_unused and self._parameters[position].grad is not None:
            self._used[position] = True

    def begin(self, reachable: Collection[int]) -> None:
        """`reachable`: positions of the variables that this pass can reach; empty if unknown."""
        self._cross_step.flush()
        self._loss_scales.pass_begins()
        if self._norms is not None:
            self._norms.end_last()
        for observer in tuple(self._observers):
            observer.on_backward_start()
        if reachable:
            self._expected = [int(position in reachable) for position in range(len(self._names))]

    def ready(self, position: int) -> None:
        """Call when the variable's gradient has been accumulated."""
        if not self._accumulated:
            self._accumulated = True
            self._fill_unreachable()
        fired = self._fired[position] = self._fired[position] + 1
        if fired > self._expected[position] and not self._learning:
            raise self._ready_again(position)
        if self._late:
            for observer in tuple(self._observers):
                observer.on_ready(position, self._parameters[position].grad)
        elif fired == self._expected[position] and self._fill(position):
            self._drain()

    def _fill_unreachable(self) -> None:
        """Fill variables without a gradient, once the pass accumulates; torch.autograd.grad does
        not."""
        if not self._late:
            for position, times in enumerate(self._expected):
                if times == 0:
                    self._fill(position)
            self._drain()

    def _ready_again(self, position: int) -> SynchronizationError:
        return SynchronizationError(
            f"a gradient must become ready once in a backward pass, but that of "
            f"{self._names[position]!r} did {self._fired[position]} times; use "
            "checkpoint(use_reentrant=False), or static_graph=True if the graph never changes"
        )

    def _fill(self, position: int) -> bool:
        """Pack the variable's final local gradient. Returns whether that completes a message."""
        if self._observers and not self._late:
            gradient = self._parameters[position].grad
            for observer in tuple(self._observers):
                observer.on_ready(position, gradient)
        self._filled[position] = True
        return self._packing.fill(position)

    def _drain(self) -> None:
        """Issue complete messages in plan order."""
        while self._next < len(self._transfers) and self._transfers[self._next].pending == 0:
            self._transfers[self._next].issue()
            self._next += 1

    def finish(self) -> bool | None:
        """End the pass: send the rest, then wait and write the averages, or defer that.

        Returns whether every `.grad` is final. None: nothing was accumulated (torch.autograd.grad),
        and nothing has happened; or gradients are missing, which another `backward()` must bring,
        and the pass is still under way.
        """
        if not self._accumulated and not self._unused_as_zeros:
            self._reset()
            return None
        missing = self._missing()
        if missing and not (self._find_unused or self._unused_as_zeros):
            self._called_back = True
            return None
        crossing = self._cross_step.conditions.defers and not self._observers and not self._late
        self._complete(crossing)
        if self._learning:
            self._learned = list(self._fired)
        self._used = [False] * len(self._names)
        self._reset()
        return not crossing

    def _complete(self, crossing: bool) -> None:
        """Send the rest, and wait for the averages unless the pass crosses the step."""
        for observer in tuple(self._observers):
            observer.on_computed()
        for position, filled in enumerate(self._filled):
            if not filled:
                self._fill(position)
        self._drain()
        assert self._next == len(self._transfers)
        if self._norms is not None:
            everything = range(len(self._names))
            conditions = self._cross_step.conditions
            from_values = conditions.without_answer(everything) if crossing else everything
            self._norms.issue(from_values)
            for number in self._results:
                self._transfers[number].issue_results(self._norms.lane)
        unused = self._agree_on_unused() if self._find_unused else frozenset()
        for position in unused:
            self._packing.take_back(position)
        self._packing.ask_for_rows(self._votes)
        averaged = [position for position in range(len(self._names)) if position not in unused]
        if crossing:
            order = self._results or range(len(self._transfers))
            self._cross_step.defer([self._transfers[number] for number in order], averaged)
            return
        for transfer in self._transfers:
            transfer.wait()
        self._packing.write({position: self._parameters[position].grad for position in averaged})
        for observer in tuple(self._observers):
            observer.on_synchronized(unused)

    def _agree_on_unused(self) -> frozenset[int]:
        """Variables that no rank used since the last synchronization."""
        used: Tensor = torch.tensor(
            self._used, dtype=torch.int32, device=self._parameters[0].device
        )
        try:
            dist.all_reduce(used, group=self._votes)
        except RuntimeError as error:
            raise SynchronizationError(
                f"the ranks must agree on unused parameters, but one got no answer: {error}; is "
                "every other rank alive and at the same step?"
            ) from error
        return frozenset(position for position, ranks in enumerate(used.tolist()) if ranks == 0)

    def _unused(self, missing: list[int]) -> SynchronizationError:
        names = ", ".join(self._names[position] for position in missing[:5])
        return SynchronizationError(
            "every parameter must receive a gradient before the next forward pass begins, but "
            f"{len(missing)} did not: {names}; make every output of forward take part in the loss, "
            "or pass find_unused_parameters=True"
        )


def interrupted() -> SynchronizationError:
    """Return the error of a forward pass behind a backward pass that did not end."""
    return SynchronizationError(
        "a backward pass must end before the next forward pass begins, but the last one was "
        "interrupted, by an exception of the script or of torch; other ranks wait for its "
        "messages, so start all ranks again"
    )
