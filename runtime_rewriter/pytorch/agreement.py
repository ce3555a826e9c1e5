"""Checks before a plan is used: it fits the module, and every rank holds the same one."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.errors import (
    AutotuneError,
    InvalidInput,
    InvalidStrategy,
    ModelMismatch,
    PlanMismatch,
    SynchronizationError,
)
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.plan import Plan, TensorSlice
from autotune.workload import Variable, Workload
from runtime_rewriter.pytorch.exchange.ranks import SynchronizerGroups

_MASK = 2**32 - 1


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter with a gradient, by DDP's rule; tied weights share one name."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    named = module.named_parameters()
    trainable = {name: p for name, p in named if p.requires_grad and name not in ignored}
    if not trainable:
        raise InvalidInput(
            "synchronization needs a module with at least one parameter that requires a gradient, "
            "but it has none"
        )
    return trainable


def assumed_workload(module: nn.Module) -> Workload:
    """The module's variables in reverse definition order, without measurements."""
    return workload_of(type(module).__name__, trainable_parameters(module))


def workload_of(name: str, parameters: Mapping[str, nn.Parameter]) -> Workload:
    """The workload of these variables, which are in definition order."""
    variables = tuple(
        Variable(name, tuple(p.shape), dtype_name(p))
        for name, p in reversed(tuple(parameters.items()))
    )
    return Workload(name, variables, device=next(iter(parameters.values())).device.type)


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_fit(plan: Plan, parameters: Mapping[str, nn.Parameter], world_size: int) -> None:
    """Raise `InvalidStrategy` if the runtime cannot enact the plan, `ModelMismatch` if it is for
    another model or world size.

    `parameters`: those that are synchronized, by name.
    """
    reason = refusal_reason(plan)
    if reason is not None:
        raise InvalidStrategy(f"plan {plan.id} cannot be enacted: {reason}")
    if plan.world_size != world_size:
        raise ModelMismatch(
            f"plan {plan.id} is for {plan.world_size} ranks, but {world_size} take part; tune for "
            "this world size",
            anchor="wrong-world-size",
        )
    devices = sorted({str(parameter.device) for parameter in parameters.values()})
    if len(devices) > 1:
        raise InvalidStrategy(
            "a replica must be on one device for plans, but the model's parameters are on "
            f"{', '.join(devices)}"
        )
    slices: dict[str, list[TensorSlice]] = defaultdict(list)
    for message in plan.messages:
        for part in message.slices:
            slices[part.variable].append(part)
            parameter = parameters.get(part.variable)
            if parameter is not None and dtype_name(parameter) != message.dtype:
                raise ModelMismatch(
                    f"plan {plan.id} holds {part.variable!r} as {message.dtype}, but the model's "
                    f"is {dtype_name(parameter)}; tune again"
                )
    _check_names(plan, slices, parameters)
    for name, parts in slices.items():
        _check_cover(plan, name, parts, parameters[name])
    workload_id = workload_of("", parameters).id
    if plan.workload_id != workload_id:
        raise ModelMismatch(
            f"plan {plan.id} is for {plan.workload_id}, but the model is {workload_id} (shapes "
            "differ); tune again"
        )


def _check_names(
    plan: Plan, slices: Mapping[str, object], parameters: Mapping[str, Tensor]
) -> None:
    unknown = sorted(set(slices) - set(parameters))
    lacking = sorted(set(parameters) - set(slices))
    problems = [f"names the unknown {', '.join(unknown[:3])}"] if unknown else []
    problems += [f"lacks {', '.join(lacking[:3])}"] if lacking else []
    if problems:
        raise ModelMismatch(
            f"plan {plan.id} must name exactly the model's {len(parameters)} trainable parameters, "
            f"but {' and '.join(problems)}; tune this model again"
        )


def _check_cover(plan: Plan, name: str, parts: list[TensorSlice], parameter: Tensor) -> None:
    """Check that the slices cover every element of the variable once."""
    axes = {part.axis for part in parts}
    axis = parts[0].axis
    fits = len(axes) == 1 and sum(part.elements for part in parts) == parameter.numel()
    if fits and axis is None:
        fits = len(parts) == 1
    elif fits and axis is not None:
        rows = sorted((part.start, part.stop) for part in parts)
        extent = parameter.shape[axis] if axis < parameter.dim() else -1
        stops = [0, *(stop for _, stop in rows)]
        fits = [start for start, _ in rows] == stops[:-1] and stops[-1] == extent
        fits = fits and all(
            part.elements * extent == parameter.numel() * (part.stop - part.start) for part in parts
        )
    if not fits:
        raise ModelMismatch(
            f"plan {plan.id} must cover every element of {name!r} once, but its {len(parts)} "
            f"slice(s) do not fit shape {tuple(parameter.shape)}; tune again"
        )


def agree(
    ranks: SynchronizerGroups,
    plan: Plan | None,
    error: AutotuneError | None,
    byte_scale: float = 1.0,
    residuals: bool = False,
) -> None:
    """Return on every rank, or raise on every rank. Collective.

    `residuals`: whether compressed messages may have left some. Raises this rank's `error`, or the
    same class with the failing rank's message. Raises `PlanMismatch` with each rank's plan if
    plans, byte scales or `residuals` differ, and `SynchronizationError` if a rank is gone or does
    not call it within the control timeout.
    """
    number = int(plan.id.rpartition("-")[2], 16) if plan is not None and error is None else 0
    local = [-1, -1] if plan is None else [number >> 32, number & _MASK]
    local += [*struct.unpack("<II", struct.pack("<d", byte_scale)), int(residuals)]
    # The largest of the negated words is the smallest word: equal on all ranks if both agree.
    words = [int(error is not None), *local, *(-word for word in local)]
    largest_words = torch.tensor(words, dtype=torch.int64, device="cpu")
    try:
        dist.all_reduce(largest_words, op=dist.ReduceOp.MAX, group=ranks.control)
        failed, *largest = largest_words.tolist()
        if not failed and largest[: len(local)] == [-word for word in largest[len(local) :]]:
            return
        shown = plan.id if plan is not None else "no plan"
        shown += "" if byte_scale == 1 else f" with bytes divided by {byte_scale:g}"
        shown += " and residuals" if residuals else ""
        problem = ("", "") if error is None else (type(error).__name__, str(error))
        reports: list[tuple[str, str, str]] = [("", "", "")] * ranks.size
        dist.all_gather_object(reports, (shown, *problem), group=ranks.control)
    except RuntimeError as cause:
        raise SynchronizationError(
            f"every rank must load a plan at the same step within {ranks.control_timeout_s:g} s, "
            f"but rank {ranks.rank} got no answer: {cause}"
        ) from cause
    if error is not None:
        raise error
    for rank, (_, kind, text) in enumerate(reports):
        if kind:
            family = ModelMismatch if kind == ModelMismatch.__name__ else InvalidStrategy
            raise family(f"rank {rank} cannot load the plan: {text}")
    listed = ", ".join(
        f"rank {rank} holds {plan_id}" for rank, (plan_id, _, _) in enumerate(reports)
    )
    raise PlanMismatch(
        f"every rank must hold the same plan, but {listed}; give all ranks the same export, and "
        "restore residuals on all ranks or on none"
    )
