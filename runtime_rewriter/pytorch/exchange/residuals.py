"""Residuals: what compressed messages have not sent yet, one per rank and variable.

| symbol | meaning |
|---|---|
| w | number of ranks |
| g_r | local gradient of a variable on rank r |
| e_r, e'_r | its residual on rank r before and after a step, in units of the averaged gradient |

A message compresses v_r = g_r / w + e_r. The compressor's loss becomes e'_r (error feedback:
Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, Alg. 2). If a sum is compressed again
on its way back, that loss is added to the residual of the rank that compressed it. So for every
compressor the synchronized gradient is, up to rounding,

    sum over r of (g_r / w + e_r - e'_r)

An uncompressed message has e'_r = 0, so it sends every residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autotune.errors import InvalidInput
from autotune.strategy_space.plan import Plan, TensorSlice
from runtime_rewriter.compression import start_key

STATE_FORMAT = 1


class Feedback:
    """The residuals of one message's slices on this rank."""

    def __init__(self, residuals: Residuals, slices: Sequence[tuple[TensorSlice, Tensor]]) -> None:
        """`slices` with their views of the message's values."""
        self.residuals = residuals
        self._slices = slices
        self._fed: tuple[int, ...] = ()

    @property
    def shapes(self) -> list[torch.Size]:
        return [view.shape for _, view in self._slices]

    def feed(self, numbers: Iterable[int]) -> None:
        """Set the slices, by number, that may leave a residual on this rank."""
        self._fed = tuple(numbers)

    def keep(self) -> None:
        """Store the values, which hold what is not sent, as the residuals."""
        slices = [self._slices[number] for number in self._fed]
        if slices:
            torch._foreach_copy_(
                [self.residuals.residual_of(part) for part, _ in slices],
                [view for _, view in slices],
            )

    def sent(self) -> None:
        """Release the residuals of the other slices, which the arrived message has sent."""
        if self.residuals:
            fed = frozenset(self._fed)
            for number, (part, _) in enumerate(self._slices):
                if number not in fed:
                    self.residuals.release(part)


class Residuals:
    """The residuals of one rank, and the matrices with which PowerSGD starts its next step.

    A variable has a residual from its first compressed message until an uncompressed one has sent
    all of it. Nothing here is collective; plans are the same on all ranks, and so are the calls.
    """

    def __init__(self, parameters: Mapping[str, Tensor], rank: int, world_size: int) -> None:
        # Not the parameters: reading one waits for its messages while they cross the step.
        self._like = {
            name: torch.empty_like(tensor, device="meta", requires_grad=False)
            for name, tensor in parameters.items()
        }
        self._device = next((tensor.device for tensor in parameters.values()), torch.device("cpu"))
        self._rank, self._world_size = rank, world_size
        self._tensors: dict[str, Tensor] = {}
        # variable -> start of each slice that was sent uncompressed -> its elements
        self._released: dict[str, dict[int, int]] = {}
        self._factors: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        # variable with a copy for the case that its step is skipped -> whether it had a residual
        self._copied: dict[str, bool] = {}
        self.in_use = False
        """Whether a plan since the last `clear` has error feedback. The same on all ranks."""

    def __bool__(self) -> bool:
        """Whether this rank holds a residual."""
        return bool(self._tensors)

    def clear(self) -> None:
        """Drop all residuals and starts; between two steps, on every rank."""
        self._tensors, self._factors, self._released = {}, {}, {}
        self._copies, self._copied = {}, {}
        self.in_use = False

    def plan_loaded(self, plan: Plan | None) -> None:
        """Note that variables are cut into the slices of `plan` from now on."""
        self._released = {}
        self.in_use |= plan is not None and any(
            message.compressor.error_feedback for message in plan.messages
        )

    def of(self, variable: str) -> Tensor | None:
        """The residual of a whole variable, in its shape; None means zeros."""
        return self._tensors.get(variable)

    def waiting(self, part: TensorSlice) -> Tensor | None:
        """View of the slice's residual, or None if the variable has none."""
        whole = self._tensors.get(part.variable)
        return None if whole is None else slice_of(whole, part)

    def residual_of(self, part: TensorSlice) -> Tensor:
        """View of the slice's residual, created as zeros if the variable has none."""
        whole = self._tensors.get(part.variable)
        if whole is None:
            zeros = torch.zeros_like(self._like[part.variable], device=self._device)
            if self._device.type == "cuda":
                # Once per variable: another lane's stream may write into it next.
                torch.cuda.current_stream(self._device).synchronize()
            # Other lanes may ask for other slices at the same time; setdefault is atomic.
            whole = self._tensors.setdefault(part.variable, zeros)
        self._released.get(part.variable, {}).pop(part.start, None)
        return slice_of(whole, part)

    def release(self, part: TensorSlice) -> None:
        """Note that the slice's residual was sent; free the variable's once all slices are."""
        whole = self._tensors.get(part.variable)
        if whole is None:
            return
        released = self._released.setdefault(part.variable, {})
        released[part.start] = part.elements
        if sum(released.values()) == whole.numel():
            del self._tensors[part.variable], self._released[part.variable]
        else:
            slice_of(whole, part).zero_()

    def factor(self, part: TensorSlice, rank: int, initial: Callable[[], Tensor]) -> Tensor:
        """PowerSGD's warm start for a slice: the same tensor every time, changed in place."""
        key = start_key(part, rank)
        if key not in self._factors:
            self._factors[key] = initial()
        return self._factors[key]

    # -- steps that may be skipped, as by `GradScaler`

    def copy_for_skip(self) -> None:
        """Copy what variables have now, except for those whose last step has not ended."""
        for name in self._like.keys() - self._copied.keys():
            waiting = self._tensors.get(name)
            self._copied[name] = waiting is not None
            if waiting is None:
                self._copies.pop(name, None)
            elif name in self._copies:
                self._copies[name].copy_(waiting)
            else:
                self._copies[name] = waiting.clone()

    def step_ended(self, variables: Iterable[str], skipped: bool) -> None:
        """Go back to the copies of these variables, if their step was skipped."""
        for name in variables:
            had_residual = self._copied.pop(name, None)
            if not skipped or had_residual is None:
                continue
            self._released.pop(name, None)
            if not had_residual:
                self._tensors.pop(name, None)
            elif name in self._tensors:
                self._tensors[name].copy_(self._copies[name])
            else:
                self._tensors[name] = self._copies.pop(name)

    def multiply(self, factor: float) -> None:
        """Change the unit in which all gradients are; between two steps."""
        copies = (self._copies[name] for name, had in self._copied.items() if had)
        for tensor in (*self._tensors.values(), *copies):
            tensor.mul_(factor).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Copies of what this rank needs to continue with the same bits; each rank saves its own.

        Safe for `torch.load(weights_only=True)`.
        """
        return {
            "format": STATE_FORMAT,
            "rank": self._rank,
            "world_size": self._world_size,
            "residuals": {name: tensor.clone() for name, tensor in self._tensors.items()},
            "factors": {key: tensor.clone() for key, tensor in self._factors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's `state_dict`; between two steps, on every rank.

        Raises `InvalidInput`, and changes nothing, if the state is of another rank, world or model.
        """
        residuals, factors = self._checked(state)
        self._tensors = {
            name: torch.empty_like(self._like[name], device=self._device).copy_(t)
            for name, t in residuals.items()
        }
        self._factors = {key: tensor.to(self._device, copy=True) for key, tensor in factors.items()}
        self._released, self._copied = {}, {}
        self.in_use = True

    def _checked(self, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        keys = ("format", "rank", "world_size", "residuals", "factors")
        missing = [key for key in keys if key not in state]
        if missing:
            raise InvalidInput(
                "the state of compression must come from compression_state(), but lacks "
                f"{missing[0]!r}"
            )
        if state["format"] != STATE_FORMAT:
            raise InvalidInput(
                f"this version reads compression state {STATE_FORMAT}, but the state has "
                f"{state['format']}; update autotune"
            )
        if (state["rank"], state["world_size"]) != (self._rank, self._world_size):
            raise InvalidInput(
                "residuals belong to a rank of a world, but the state is of rank "
                f"{state['rank']} of {state['world_size']} and this is rank {self._rank} of "
                f"{self._world_size}; give every rank the state that it saved, or start without a "
                "state in another world"
            )
        for name, tensor in state["residuals"].items():
            expected = self._like.get(name)
            if expected is None:
                raise InvalidInput(
                    "the state of compression must be of this model, but has the unknown variable "
                    f"{name!r}"
                )
            if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                raise InvalidInput(
                    f"the residual of {name!r} must be {expected.dtype} of shape "
                    f"{tuple(expected.shape)}, but the state has {tensor.dtype} of shape "
                    f"{tuple(tensor.shape)}"
                )
        for key, tensor in state["factors"].items():
            problem = self._factor_error(key, tensor)
            if problem is not None:
                raise InvalidInput(
                    f"a start of PowerSGD must fit this model, but {key!r} {problem}"
                )
        return state["residuals"], state["factors"]

    def _factor_error(self, key: str, tensor: Tensor) -> str | None:
        variable, *numbers = key.rsplit("|", 4)
        expected = self._like.get(variable)
        if expected is None or len(numbers) != 4:
            return "names no variable of it"
        axis, start, stop, rank = (None if number == "None" else int(number) for number in numbers)
        assert start is not None and stop is not None and rank is not None
        shape = list(expected.shape)
        if axis is not None:
            shape[axis] = stop - start
        columns = math.prod(shape[1:])
        if tensor.shape != (columns, rank) or tensor.dtype != expected.dtype:
            return (
                f"is {tensor.dtype} of shape {tuple(tensor.shape)} and must be {expected.dtype} of "
                f"shape {(columns, rank)}"
            )
        return None


def slice_of(tensor: Tensor, part: TensorSlice) -> Tensor:
    """View of `part` of a variable's tensor."""
    if part.axis is None:
        return tensor
    return tensor.narrow(part.axis, part.start, part.stop - part.start)


def drop_non_finite_(values: Tensor, witness: Tensor) -> None:
    """Set infinities and NaNs in `values` to 0.

    They occur only if the small `witness` has one. An overflow is sent once, and all ranks see it
    (AMP skips that step). In a residual it would stay for ever. A CPU reads the witness first,
    which costs less than a pass over `values`; on a GPU reading it would wait for the device.
    """
    if values.device.type != "cpu" or not bool(witness.isfinite().all()):
        values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
