"""Norms and scaling of gradients whose averages are still to come.

All ranks know the norms before the averages (`exchange.norms`). So a script that clips by the
global norm, or whose `GradScaler` looks for infinities, need not wait for the averages: it gets the
norms, and its factors are applied when an average arrives, by the functions that it called.

A gradient that has arrived keeps answering with the same norm until the optimizer steps, or until
it may be changed uncounted. Otherwise ranks on which other averages have arrived, or that read
gradients, would scale by other factors, in the last bit, wherever a norm is a sum over parts.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from threading import RLock

import torch
from torch import Tensor

from runtime_rewriter.pytorch.exchange.norms import GradientNorms, NormExchange
from runtime_rewriter.pytorch.gradient_operations import PlainOperations
from runtime_rewriter.pytorch.reads import stop_operations, unwatch, watch

_LEAST_NORM = 1e-15
"""Below it, squares of single elements may underflow; scaling then changes the norm's last bits."""


class ScaledGradient:
    """The `GradientOperations` of one gradient between its backward pass and the optimizer's step.

    `norms()` waits for the norms of the pass. `flush()` waits for the average, and calls `arrive`.
    `lock` guards both states: before and after the arrival.
    """

    def __init__(
        self,
        gradient: Tensor,
        position: int,
        norms: Callable[[], GradientNorms],
        flush: Callable[[], object],
        lock: RLock,
    ) -> None:
        self.gradient = gradient
        self._position = position
        self._norms, self._flush, self._lock = norms, flush, lock
        self._plain = PlainOperations(gradient)
        self._deferred: list[Callable[[PlainOperations], None]] = []
        self._factors: list[Tensor] = []
        self._version: int | None = None  # of the values, from the arrival on
        self.ended = False

    def norm(self) -> Tensor:
        norms = self._norms()
        with self._lock:
            known = self._known_norm(norms)
            if known is not None:
                return known
            if self._version is None:
                self._flush()
            return self._plain.norm()

    def _known_norm(self, norms: GradientNorms) -> Tensor | None:
        """The norm by the norms of the pass; None unless torch's own would have the same bits, or
        if all ranks compute it.

        Multiplying by a power of two changes only exponents, so it commutes with the norm.
        """
        if self._position in norms.from_values:
            return None
        if self._version not in (None, self._plain.version):
            return None  # the script has changed the values in another way
        norm = norms.norms[self._position]
        if not self._factors:
            return norm.to(self.gradient.dtype)
        product = math.prod(float(factor) for factor in self._factors)
        overflown = not (norm.isfinite() or norms.non_finite[self._position])
        tiny = 0 < float(norm) * min(product, 1.0) < _LEAST_NORM
        if math.frexp(product)[0] != 0.5 or overflown or tiny:
            return None
        return (norm * product).to(self.gradient.dtype)

    def scale(self, factor: Tensor) -> None:
        factor = factor.clone()
        self._do(lambda plain: plain.scale(factor), factor)

    def unscale(self, found_inf: Tensor, inverse_scale: Tensor) -> None:
        found = self._norms().non_finite[self._position].to(found_inf.dtype)
        torch.maximum(found_inf, found, out=found_inf)
        factor, unused = inverse_scale.clone(), torch.zeros_like(found_inf)
        self._do(lambda plain: plain.unscale(unused, factor), factor)

    def _do(self, operation: Callable[[PlainOperations], None], factor: Tensor) -> None:
        with self._lock:
            self._factors.append(factor)
            if self._version is None:
                self._deferred.append(operation)
                return
            untouched = self._version == self._plain.version
            operation(self._plain)
            if untouched:
                self._version = self._plain.version

    @property
    def arrived(self) -> bool:
        return self._version is not None

    def arrive(self) -> None:
        """Apply what was deferred to the average, which the gradient now holds."""
        for operation in self._deferred:
            operation(self._plain)
        self._deferred = []
        self._version = self._plain.version


class AnsweringGradients:
    """The gradients of the last backward pass that answer with norms, under a plan with `results`.

    `wait(exchange)` waits for the norms of that pass.
    """

    def __init__(self, wait: Callable[[NormExchange], GradientNorms]) -> None:
        self._wait = wait
        self._exchange: NormExchange | None = None
        self._known: GradientNorms | None = None
        self._scaled: dict[int, ScaledGradient] = {}

    @property
    def loaded(self) -> bool:
        """Whether the plan sends norms."""
        return self._exchange is not None

    def load(self, exchange: NormExchange | None) -> None:
        """Use the norms of another plan; between two steps, with nothing pending."""
        self.end()
        self._exchange = exchange

    def begin(
        self, position: int, gradient: Tensor, flush: Callable[[], object], lock: RLock
    ) -> ScaledGradient | None:
        """Return the operations of a gradient of this pass; None if the plan sends no norms."""
        if self._exchange is None:
            return None
        scaled = ScaledGradient(gradient, position, self._norms, flush, lock)
        self._scaled[position] = scaled
        return scaled

    def _norms(self) -> GradientNorms:
        if self._known is None:
            assert self._exchange is not None
            self._known = self._wait(self._exchange)
        return self._known

    def arrived(self, position: int) -> None:
        """Let a gradient that is there still answer, if no optimizer has stepped."""
        scaled = self._scaled.get(position)
        if scaled is not None:
            watch(scaled.gradient, None, scaled)

    def end(self, positions: Iterable[int] | None = None) -> None:
        """Let the gradients at `positions` answer no more: what follows their update is a read.

        None: all of them, since a new pass begins.
        """
        for position in tuple(self._scaled if positions is None else positions):
            scaled = self._scaled.pop(position, None)
            if scaled is None:
                continue
            scaled.ended = True
            if scaled.arrived:
                unwatch(scaled.gradient)
            else:
                stop_operations(scaled.gradient)
        if positions is None:
            self._known = None
