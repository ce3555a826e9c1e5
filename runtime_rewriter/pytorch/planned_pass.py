"""One backward pass under a plan that our own hooks carry out: what is ready, what is sent, and when all of it has arrived."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.errors import SynchronizationError
from runtime_rewriter.pytorch.cross_step import CrossStepUpdates
from runtime_rewriter.pytorch.exchange.row_transfer import RowTransfer
from runtime_rewriter.pytorch.exchange.transfer import Transfer
from runtime_rewriter.pytorch.observers import BackwardObserver
from runtime_rewriter.pytorch.packing import Packing


class PlannedPass:
    """Issues the messages of a plan in its order as they become complete, and waits for them or leaves them to `cross_step`.

    `find_unused` and `static` as in DDP. Raises `SynchronizationError`, after which the ranks must be started again.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        observers: list[BackwardObserver],
        cross_step: CrossStepUpdates,
        *,
        find_unused: bool,
        static: bool,
    ) -> None:
        self._names, self._parameters, self._observers, self._cross_step = (
            names,
            parameters,
            observers,
            cross_step,
        )
        self._find_unused, self._static = find_unused, static
        self._transfers: Sequence[Transfer | RowTransfer] = ()
        self._packing: Packing
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
    ) -> None:
        """Between two steps. `votes` carries what ranks agree on at the end of a pass; `deferred`: nothing is issued before that."""
        self._transfers, self._packing, self._votes, self._deferred = (
            transfers,
            packing,
            votes,
            deferred,
        )
        self._reset()

    def _reset(self) -> None:
        count = len(self._names)
        self._fired = [0] * count
        self._filled = [False] * count
        self._expected = (
            list(self._learned) if self._static and self._learned is not None else [1] * count
        )
        self._next = 0
        self._accumulated = False
        for transfer in self._transfers:
            transfer.reset()

    @property
    def under_way(self) -> bool:
        """Gradients have come and the pass has not ended."""
        return self._accumulated

    @property
    def _late(self) -> bool:
        """Messages wait for the end of the pass: when profiling, and in the first pass of a static graph."""
        return self._deferred or (self._static and self._learned is None)

    def note_use(self, position: int) -> None:
        """A backward pass, to be synchronized or not, has a gradient for this variable."""
        self._used[position] = True

    def begin(self, reachable: Collection[int]) -> None:
        """`reachable`: positions of the variables that this pass can reach; empty where nobody looked."""
        self._cross_step.flush()
        for observer in tuple(self._observers):
            observer.on_backward_start()
        if reachable:
            self._expected = [int(position in reachable) for position in range(len(self._names))]

    def ready(self, position: int) -> None:
        """The variable's gradient has been accumulated."""
        if not self._accumulated:
            self._accumulated = True
            self._fill_unreachable()
        self._fired[position] += 1
        learning = self._static and self._learned is None
        if self._fired[position] > self._expected[position] and not learning:
            raise self._ready_again(position)
        if self._late:
            for observer in tuple(self._observers):
                observer.on_ready(position, self._parameters[position].grad)
        elif self._fired[position] == self._expected[position] and self._fill(position):
            self._drain()

    def _fill_unreachable(self) -> None:
        """Only now, with the first gradient, is it certain that the pass accumulates: torch.autograd.grad does not."""
        if not self._late:
            for position, times in enumerate(self._expected):
                if times == 0:
                    self._fill(position)
            self._drain()

    def _ready_again(self, position: int) -> SynchronizationError:
        return SynchronizationError(
            f"a gradient must become ready once in a backward pass, but that of {self._names[position]!r} did {self._fired[position]} "
            "times; use checkpoint(use_reentrant=False), or static_graph=True if the graph never changes"
        )

    def _fill(self, position: int) -> bool:
        """Pack the variable's local gradient, which is final; whether a message is complete with it."""
        if self._observers and not self._late:
            gradient = self._parameters[position].grad
            for observer in tuple(self._observers):
                observer.on_ready(position, gradient)
        self._filled[position] = True
        return self._packing.fill(position)

    def _drain(self) -> None:
        """Issue in plan order whatever is complete."""
        while self._next < len(self._transfers) and self._transfers[self._next].pending == 0:
            self._transfers[self._next].issue()
            self._next += 1

    def finish(self) -> bool | None:
        """End of the pass: send what is left, wait for everything and write the averages into `.grad`, or leave that to the next step.

        Whether every `.grad` is final; None: nothing was accumulated (torch.autograd.grad), and nothing has happened.
        """
        if not self._accumulated:
            self._reset()
            return None
        crossing = self._cross_step.defers and not self._observers and not self._late
        missing = self._complete(crossing)
        if self._static and self._learned is None:
            self._learned = list(self._fired)
        self._used = [False] * len(self._names)
        self._reset()
        if missing and not self._find_unused:
            raise self._unused(missing)
        return not crossing

    def _complete(self, crossing: bool) -> list[int]:
        """Returns the variables that got no gradient in this pass."""
        for observer in tuple(self._observers):
            observer.on_computed()
        missing = [position for position, times in enumerate(self._fired) if times == 0]
        for position, filled in enumerate(self._filled):
            if not filled:
                self._fill(position)
        self._drain()
        assert self._next == len(self._transfers)
        kept = self._agree_on_unused() if self._find_unused else frozenset()
        for position in kept:
            for transfer in self._packing.messages_of[position]:
                transfer.take_back(self._names[position])
        self._packing.ask_for_rows(self._votes)
        averaged = [position for position in range(len(self._names)) if position not in kept]
        if crossing:
            self._cross_step.defer(self._transfers, averaged)
            return missing
        for transfer in self._transfers:
            transfer.wait()
        self._packing.write(averaged)
        for observer in tuple(self._observers):
            observer.on_synchronized(kept)
        return missing

    def _agree_on_unused(self) -> frozenset[int]:
        """Variables that no rank used since the last synchronization."""
        used: Tensor = torch.tensor(
            self._used, dtype=torch.int32, device=self._parameters[0].device
        )
        try:
            dist.all_reduce(used, group=self._votes)
        except RuntimeError as error:
            raise SynchronizationError(
                f"the ranks must agree on unused parameters, but it failed: {error}"
            ) from error
        return frozenset(position for position, ranks in enumerate(used.tolist()) if ranks == 0)

    def _unused(self, missing: list[int]) -> SynchronizationError:
        names = ", ".join(self._names[position] for position in missing[:5])
        return SynchronizationError(
            f"every parameter must receive a gradient in each synchronized backward pass, but {len(missing)} did not: {names}; make every "
            "output of forward take part in the loss, or pass find_unused_parameters=True"
        )
