"""A model whose gradients are synchronized, apart from any plan: its variables, its ranks, and who
follows or emulates its steps."""

# mypy: untyped-calls-exclude=torch, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autotune.workload import Library, Workload
from runtime_rewriter.emulation import Timetable
from runtime_rewriter.pytorch.agreement import trainable_parameters, workload_of
from runtime_rewriter.pytorch.autograd import by_identity
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.present_rows import sparse_parameters
from runtime_rewriter.pytorch.exchange.ranks import SynchronizerGroups, Timeouts
from runtime_rewriter.pytorch.exchange.residuals import Residuals
from runtime_rewriter.pytorch.observers import Accelerator, BackwardObserver, StepListener
from runtime_rewriter.pytorch.step_boundaries import StepBoundaries


class SynchronizedModel:
    """The trainable variables of `module`, and the ranks of `process_group` that train it.

    Building one is collective over the group. `lanes` builds the lanes on which messages travel.
    `on_byte_scale` scales the bytes that the module's wrapper itself sends. With `summed` gradients
    are summed instead of averaged.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None,
        waits: Timeouts,
        *,
        lanes: Callable[[SynchronizerGroups, Device], Lanes],
        on_byte_scale: Callable[[float], None],
        summed: bool,
    ) -> None:
        self.module = module
        named = trainable_parameters(module)
        self.names: tuple[str, ...] = tuple(named)
        self.parameters: tuple[nn.Parameter, ...] = tuple(named.values())
        self.index_of = by_identity(self.parameters)
        """The position of a parameter, or None."""
        sparse = sparse_parameters(module)
        self.sparse = [p for p, parameter in enumerate(self.parameters) if parameter in sparse]
        """Positions of the parameters whose gradients are sparse by DDP's rule."""
        self.device = Device(self.parameters[0].device)
        self.ranks = SynchronizerGroups.of(
            process_group, waits.message_s, waits.agreement_s, self.device.device
        )
        self.lanes = lanes(self.ranks, self.device)
        self.divisor = 1 if summed else self.ranks.size
        """Divides the sums of all ranks' gradients."""
        self.residuals = Residuals(named, self.ranks.rank, self.ranks.size)
        self._on_byte_scale = on_byte_scale
        self.byte_scale = 1.0
        """Only 1/`byte_scale` of all bytes are sent."""
        self._synchronizing = True
        self.world: Callable[[], AbstractContextManager[object]] = nullcontext
        """Inside it, torch's functions find the ranks of the job."""
        self.listeners: list[StepListener] = []
        self.boundaries = StepBoundaries(self.listeners)
        self.observers: list[BackwardObserver] = []
        self.library = Library.DDP
        self.records_graph = False
        """Whether steps are recorded as a graph of TensorFlow, not as operators of torch."""
        self.accelerator_of: Callable[[Any, Timetable | None], Any] | None = None
        """Builds an emulated accelerator of this model; None: that of a module of torch."""
        self.accelerator: Accelerator | None = None  # None: the module itself computes

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The script's group over which gradients are averaged."""
        return self.ranks.base

    @property
    def restarts(self) -> int:
        """How often a plan made the ranks restart their communication library."""
        return 0

    @property
    def model_id(self) -> str:
        """`Workload.id` of the module, which plans that fit it carry, too."""
        return self.workload.id

    @property
    def workload(self) -> Workload:
        """The synchronized variables in reverse definition order, without measurements.

        They stay the same if the script freezes some, or adds others, as in DDP.
        """
        return workload_of(type(self.module).__name__, self.named)

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, in definition order."""
        return dict(zip(self.names, self.parameters, strict=True))

    @property
    def direct_refused(self) -> str:
        """Why no plan with direct exchanges is proposed here ("" if one is)."""
        on_cpu = self.device.device.type == "cpu"
        return "" if on_cpu or self.lanes.queued else "gloo cannot send between GPUs; use NCCL"

    def scale_bytes(self, byte_scale: float) -> None:
        """Send only 1/`byte_scale` of all bytes from now on. Local, between two steps.

        A plan follows when it is next loaded. Only the elements that travelled are averages.
        Raises `InvalidInput` if the wrapper cannot do it.
        """
        self._on_byte_scale(byte_scale)
        self.byte_scale = byte_scale

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside without synchronizing them. For plain modules: a DDP has its
        own."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def mark_unclean(self) -> None:
        """Note that this step is not pure training: it has a forward pass without gradients,
        say."""
        self.boundaries.mark_unclean()

    @torch.compiler.disable(recursive=False)
    def compute(
        self, call: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the module's part of a forward pass: `call(*inputs, **kwargs)`, or its emulation."""
        accelerator = self.accelerator
        if accelerator is None or not torch.is_grad_enabled():
            return call(*inputs, **kwargs)
        return accelerator.run(call, inputs, kwargs)

    @torch.compiler.disable
    def forward_starts(self) -> None:
        """Call before the module computes in a forward pass with gradients, after buffers are
        sent."""
        for observer in tuple(self.observers):
            observer.on_forward_start()
