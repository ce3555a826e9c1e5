"""The numerics gate: a plan's synchronized gradients against a plain all-reduce of the same local
gradients.

| symbol | meaning |
|---|---|
| w | number of ranks |
| g_r | local gradient of one variable on rank r |
| e_r, e'_r | its residual on rank r before and after the step (exchange/residuals.py), or 0 |
| a, b | synchronized gradient by plan and by reference: sum over r of g_r / w + e_r - e'_r |
| M | max over ranks and elements of abs(g_r + w e_r); M_model: the largest finite M |
| u, u_wire | unit roundoff of the variable's dtype and of the dtype that travels |

The error of a variable is max|a - b| / M. M replaces max|b| because gradients of different ranks
may cancel: the rounding of a sum is bounded by the size of its terms (Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., Eq. 4.4: |fl(sum x_i) - sum x_i| <= (n - 1) u sum|x_i| +
O(u^2)). Tolerances:

- uncompressed, w <= 2: 0, since one addition has no order;
- uncompressed, w > 2: 2 w u, both sums reordered (float32: 4.8e-7 at 4 ranks, below 1e-5 up to 83
  ranks);
- fp16, bf16: (w + 1) u_wire + 2 w u: w roundings to the wire's dtype, w - 1 additions there, then
  as above. Gradients that underflow in fp16 fail. One exception: a cast variable that is pure
  rounding noise, M <= 64 u M_model (the bias of a layer before BatchNorm, whose true gradient is
  0), is measured against M_model instead of M;
- error feedback: 16 (w + 4) u. The loss is known: it is e'_r, so only sums are rounded. Each rank
  rounds v_r, what it sends, e'_r and the reference's difference of these, at most 4 u |v_r|; both
  sums as above. PowerSGD adds a few terms per element of up to |P_ik Q_jk|, which may be larger
  than v. 16 is a margin: 1e-5 for float32 at 6 ranks;
- with residuals of an earlier plan and w > 2: 4 u more, since g_r / w + e_r rounds differently than
  g_r + w e_r.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.errors import SynchronizationError
from autotune.strategy_space.strategy import SparseHandling
from runtime_rewriter.pytorch.exchange.rows import dense_of, rows_of
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.observers import BackwardObserver
from runtime_rewriter.tolerances import (
    NOISE_ROUNDOFFS,
    WAITING_ROUNDOFFS,
    GateResult,
    coarsest_compressors,
    judge,
    tolerance_of,
    wire_roundoff,
)


class GradientGate(BackwardObserver):
    """Checks the next synchronized backward pass under the synchronizer's plan.

    Costs a copy of all gradients, an all-reduce and a broadcast of their size in that step.
    """

    def __init__(self, synchronizer: GradientSynchronizer) -> None:
        self._synchronizer = synchronizer
        self._local: dict[int, Tensor] = {}  # g_r + w e_r
        # The compared rows of variables whose rows travel.
        self._summed: dict[int, Tensor] = {}
        # Variables whose rows travel; None: not known yet.
        self._in_rows: frozenset[int] | None = None
        self._result: GateResult | None = None

    def arm(self) -> None:
        """Check the next pass; call it between two steps, on every rank."""
        self._local = {}
        self._result = None
        self._in_rows = None
        if self not in self._synchronizer.observers:
            self._synchronizer.observers.append(self)

    def error(self) -> GateResult:
        """The result, equal on all ranks, after a synchronized backward pass has ended."""
        if self._result is None:
            raise SynchronizationError(
                "the numerics gate needs a synchronized backward pass under a plan between arm() "
                "and error()"
            )
        return self._result

    def on_ready(self, index: int, gradient: Tensor | None) -> None:
        if self._travels_as_rows(index):
            self._local[index] = (
                _no_rows(self._synchronizer.parameters[index])
                if gradient is None
                else gradient.clone()
            )
        elif gradient is None:
            self._local[index] = torch.zeros_like(self._synchronizer.parameters[index])
        else:
            self._local[index] = dense_of(gradient).clone()
        waiting = self._synchronizer.residuals.of(self._synchronizer.names[index])
        if waiting is not None:
            self._local[index] = dense_of(self._local[index]).add_(
                waiting, alpha=self._synchronizer.divisor
            )

    def on_synchronized(self, unused: frozenset[int]) -> None:
        synchronizer, ranks = self._synchronizer, self._synchronizer.ranks
        synchronizer.observers.remove(self)
        assert synchronizer.plan is not None
        compared = sorted(set(self._local) - unused)
        for position in compared:
            if self._travels_as_rows(position):
                self._take_rows(position)
        largest = torch.zeros(len(synchronizer.names), dtype=torch.float64)
        for position in compared:
            largest[position] = _largest(self._local[position])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=ranks.control)
        finite = largest[torch.isfinite(largest)]
        of_model = float(finite.max()) if len(finite) else 0.0
        choices = coarsest_compressors(synchronizer.plan, synchronizer.names)
        self._subtract_what_stayed(compared)
        errors = torch.zeros_like(largest)
        for dtype in dict.fromkeys(self._local[position].dtype for position in compared):
            positions = [position for position in compared if self._local[position].dtype == dtype]
            noise = NOISE_ROUNDOFFS * torch.finfo(dtype).eps / 2 * of_model
            excused = [largest[i] <= noise and wire_roundoff(choices[i]) > 0 for i in positions]
            scales = [
                of_model if out else float(largest[i])
                for i, out in zip(positions, excused, strict=True)
            ]
            errors[positions] = self._errors(positions, scales)
        self._local, self._summed = {}, {}
        dist.all_reduce(errors, op=dist.ReduceOp.MAX, group=ranks.control)
        dtypes = (
            str(parameter.dtype).removeprefix("torch.") for parameter in synchronizer.parameters
        )
        tolerances = [
            tolerance_of(dtype, choice, ranks.size)
            for dtype, choice in zip(dtypes, choices, strict=True)
        ]
        if ranks.size > 2 and synchronizer.residuals.in_use:
            for position, parameter in enumerate(synchronizer.parameters):
                tolerances[position] += WAITING_ROUNDOFFS * torch.finfo(parameter.dtype).eps / 2
        self._result = judge(errors.tolist(), tolerances, synchronizer.names)

    def _subtract_what_stayed(self, positions: list[int]) -> None:
        for position in positions:
            stayed = self._synchronizer.residuals.of(self._synchronizer.names[position])
            if stayed is not None and position not in self._summed:  # rows leave nothing
                self._local[position].sub_(stayed, alpha=self._synchronizer.divisor)

    def _travels_as_rows(self, position: int) -> bool:
        if self._in_rows is None:  # a plan may be loaded after `arm`
            plan, names = self._synchronizer.plan, self._synchronizer.names
            messages = plan.messages if plan is not None else ()
            sparse = [m for m in messages if m.sparse is not SparseHandling.DENSE]
            variables = {part.variable for message in sparse for part in message.slices}
            self._in_rows = frozenset(n for n, name in enumerate(names) if name in variables)
        return position in self._in_rows

    def _take_rows(self, position: int) -> None:
        """Reduce both gradients to the rows of any rank, without allocating the variable's size."""
        local, summed = self._local[position], _gradient(self._synchronizer, position)
        touched = torch.zeros(local.shape[0], dtype=torch.uint8)
        local, summed = (one.coalesce() if one.is_sparse else one for one in (local, summed))
        for gradient in (local, summed):
            touched[rows_of(gradient, gradient, 1.0).indices.cpu()] = 1
        dist.all_reduce(touched, op=dist.ReduceOp.MAX, group=self._synchronizer.ranks.control)
        rows = touched.nonzero().flatten().to(local.device)
        self._local[position], self._summed[position] = (
            dense_of(gradient.index_select(0, rows)) for gradient in (local, summed)
        )

    def _errors(self, positions: list[int], scales: list[float]) -> Tensor:
        """max|a - b| / scale of variables of one dtype, shape (len(positions),), float64."""
        ranks = self._synchronizer.ranks
        local = [self._local[position] for position in positions]
        result = [
            self._summed[i] if i in self._summed else dense_of(_gradient(self._synchronizer, i))
            for i in positions
        ]
        sizes = [tensor.numel() for tensor in local]
        divisor = self._synchronizer.divisor
        reference = torch.cat([tensor.reshape(-1) for tensor in local]) * (1.0 / divisor)
        dist.all_reduce(reference, group=ranks.first)
        synchronized = torch.cat([tensor.reshape(-1) for tensor in result])
        root = synchronized.clone()
        dist.broadcast(root, group=ranks.first, group_src=0)
        tensors = (synchronized, root, reference)
        parts = zip(*(tensor.split(sizes) for tensor in tensors), scales, strict=True)
        return torch.tensor([_error(*part) for part in parts], dtype=torch.float64)


def _gradient(synchronizer: GradientSynchronizer, position: int) -> Tensor:
    gradient = synchronizer.parameters[position].grad
    assert gradient is not None
    return gradient


def _no_rows(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, layout=torch.sparse_coo)


def _error(a: Tensor, root: Tensor, b: Tensor, scale: float) -> float:
    """Error of one variable; infinity where ranks differ. A non-finite reference (a skipped AMP
    step) is no error."""
    if not torch.equal(_bits(a), _bits(root)):
        return math.inf
    if torch.equal(a, b) or not bool(torch.isfinite(b).all()):
        return 0.0
    if not bool(torch.isfinite(a).all()) or scale == 0.0:
        return math.inf
    return float((a - b).abs().amax().double()) / scale


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _largest(tensor: Tensor) -> float:
    largest = float(tensor.abs().amax()) if tensor.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf  # a maximum over ranks may drop NaN
