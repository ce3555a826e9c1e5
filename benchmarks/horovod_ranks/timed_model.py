"""A module and an optimizer that compute as emulated accelerators do: by timed waits.

Gradients are real tensors, which autograd accumulates and whose hooks run when they are ready. So
`hvd.DistributedOptimizer` works on them as on any model's. Waits end at absolute times.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autotune.workload import Variable, Workload
from runtime_rewriter.emulation import Timetable, timetable_of


class TimedModel(nn.Module):
    """Parameters of a workload. A step's times count from `forward` and from the backward pass.

    `marks_s`: begin of the forward pass, of the backward pass, and end of the last hook.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.names = [variable.name for variable in workload.variables]
        self.values = nn.ParameterList(
            nn.Parameter(torch.zeros(variable.shape)) for variable in workload.variables
        )
        self.table: Timetable = timetable_of(workload)
        self.gradients = [gradient_of(variable) for variable in workload.variables]
        self.marks_s = [0.0, 0.0, 0.0]
        self._groups = _groups(self.names, self.table)

    def forward(self) -> Tensor:
        self.marks_s[0] = time.perf_counter()
        token = _End.apply(torch.zeros((), requires_grad=True), self)
        for positions, ready_s in reversed(self._groups):
            parameters = [self.values[position] for position in positions]
            token = _HandOut.apply(token, self, positions, ready_s, *parameters)
        wait_until(self.marks_s[0] + self.table.forward_s)
        output: Tensor = _Begin.apply(token, self)
        return output

    def named_trainable(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) in the order of definition, as `named_parameters` gives them."""
        return list(zip(self.names, self.values, strict=True))[::-1]


def gradient_of(variable: Variable) -> Tensor:
    """Return a gradient; a sparse one has as many rows as a step of one rank touches."""
    if not variable.sparse:
        return torch.randn(variable.shape) * 1e-3
    rows, *inner = variable.shape
    touched = rows if variable.touched_rows is None else round(variable.touched_rows)
    indices = torch.randperm(rows)[:touched].sort().values
    values = torch.randn(touched, *inner) * 1e-3
    return torch.sparse_coo_tensor(
        indices[None], values, variable.shape, check_invariants=False
    ).coalesce()


class TimedUpdate(torch.optim.SGD):
    """An optimizer whose step takes `update_s`."""

    update_s = 0.0

    def step(self, closure: Any = None) -> Any:
        wait_until(time.perf_counter() + self.update_s)


def wait_until(deadline_s: float) -> None:
    if (left_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(left_s)


def _groups(names: list[str], table: Timetable) -> list[tuple[list[int], float]]:
    """(positions, ready time) of variables that are ready together, in this order."""
    place = {name: position for position, name in enumerate(names)}
    groups: list[tuple[list[int], float]] = []
    for name, ready_s in table.ready:
        if not groups or groups[-1][1] != ready_s:
            groups.append(([], ready_s))
        groups[-1][0].append(place[name])
    return groups


class _Begin(Function):
    @staticmethod
    def forward(context: Any, token: Tensor, model: TimedModel) -> Tensor:
        context.model = model
        return token.clone()

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.model.marks_s[1] = time.perf_counter()
        return gradient, None


class _HandOut(Function):
    @staticmethod
    def forward(
        context: Any,
        token: Tensor,
        model: TimedModel,
        positions: list[int],
        ready_s: float,
        *parameters: Tensor,
    ) -> Tensor:
        context.model, context.positions, context.ready_s = model, positions, ready_s
        return token.clone()

    @staticmethod
    @once_differentiable
    def backward(context: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        model = context.model
        handed = [model.gradients[position].clone() for position in context.positions]
        wait_until(model.marks_s[1] + context.ready_s)
        return token, None, None, None, *handed


class _End(Function):
    @staticmethod
    def forward(context: Any, token: Tensor, model: TimedModel) -> Tensor:
        context.model = model
        return token.clone()

    @staticmethod
    @once_differentiable
    def backward(context: Any, token: Tensor) -> tuple[None, None]:
        model = context.model
        wait_until(model.marks_s[1] + model.table.backward_s)
        model.marks_s[2] = time.perf_counter()
        return None, None
