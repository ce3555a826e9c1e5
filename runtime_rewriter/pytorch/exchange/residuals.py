"""What compressed messages have not sent yet: one residual per rank and variable.

| symbol | meaning |
|---|---|
| w | number of ranks |
| g_r | local gradient of a variable on rank r |
| e_r, e'_r | residual of the variable on rank r before and after a step, in units of the averaged gradient |

A message sends of v_r = g_r / w + e_r what its compressor can say, and what it did not say becomes e'_r (error feedback:
Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, Alg. 2). Where a sum is compressed once more on its way back,
what that loses is added to the residual of the rank that compressed it. So the synchronized gradient is, up to rounding,

    sum over r of (g_r / w + e_r - e'_r)

for every compressor, and for a message without one e'_r = 0: whatever waited is sent by the first plan that can send it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autotune.errors import InvalidInput
from autotune.strategy_space.plan import Plan, TensorSlice

STATE_FORMAT = 1


class Feedback:
    """The residuals of one message's slices on this rank."""

    def __init__(self, residuals: Residuals, slices: Sequence[tuple[TensorSlice, Tensor]]) -> None:
        """`slices` with their views of the message's values."""
        self.residuals, self._slices = residuals, slices
        self._fed: tuple[int, ...] = ()

    @property
    def shapes(self) -> list[torch.Size]:
        """Of the slices."""
        return [view.shape for _, view in self._slices]

    def feed(self, numbers: Iterable[int]) -> None:
        """Of these slices something may stay behind on this rank, of the others nothing does."""
        self._fed = tuple(numbers)

    def keep(self) -> None:
        """The values hold what is not sent: make it the residual."""
        slices = [self._slices[number] for number in self._fed]
        if slices:
            torch._foreach_copy_(
                [self.residuals.residual_of(part) for part, _ in slices],
                [view for _, view in slices],
            )

    def sent(self) -> None:
        """The message has arrived: what waited in the other slices went with it."""
        if self.residuals:
            fed = frozenset(self._fed)
            for number, (part, _) in enumerate(self._slices):
                if number not in fed:
                    self.residuals.release(part)


class Residuals:
    """The residuals of one rank, and the matrices with which PowerSGD starts its next step.

    A variable has no residual until a compressor leaves something, and none again when all of it was sent uncompressed.
    Nothing here is collective; plans are the same on all ranks, and so are the calls.
    """

    def __init__(self, parameters: Mapping[str, Tensor], rank: int, world_size: int) -> None:
        # Not the parameters themselves: while messages cross the step, to look at one means to wait for its messages.
        self._like = {
            name: torch.empty_like(tensor, device="meta", requires_grad=False)
            for name, tensor in parameters.items()
        }
        self._device = next((tensor.device for tensor in parameters.values()), torch.device("cpu"))
        self._rank, self._world_size = rank, world_size
        self._tensors: dict[str, Tensor] = {}
        self._released: dict[
            str, dict[int, int]
        ] = {}  # variable: elements of its slices that were sent whole, by their start
        self._factors: dict[str, Tensor] = {}
        self.in_use = False
        """A rank may hold something: a plan since the last `clear` could feed it back. The same on all ranks."""

    def __bool__(self) -> bool:
        """Something may wait to be sent."""
        return bool(self._tensors)

    def clear(self) -> None:
        """Forget everything; between two steps, on every rank."""
        self._tensors, self._factors, self._released = {}, {}, {}
        self.in_use = False

    def plan_loaded(self, plan: Plan | None) -> None:
        """The slices of a variable are other ones from now on."""
        self._released = {}
        self.in_use |= plan is not None and any(
            message.compressor.error_feedback for message in plan.messages
        )

    def of(self, variable: str) -> Tensor | None:
        """The residual of a whole variable, in its shape; None stands for zeros."""
        return self._tensors.get(variable)

    def waiting(self, part: TensorSlice) -> Tensor | None:
        """View of the slice's residual, or None where nothing waits."""
        whole = self._tensors.get(part.variable)
        return None if whole is None else _slice(whole, part)

    def residual_of(self, part: TensorSlice) -> Tensor:
        """View of the slice's residual, which from now on exists."""
        whole = self._tensors.get(part.variable)
        if whole is None:
            zeros = torch.zeros_like(self._like[part.variable], device=self._device)
            if (
                self._device.type == "cuda"
            ):  # once per variable: another lane's stream may be the next to write into it
                torch.cuda.current_stream(self._device).synchronize()
            # Messages on other lanes may ask for other slices of the variable at the same time; setdefault is atomic.
            whole = self._tensors.setdefault(part.variable, zeros)
        self._released.get(part.variable, {}).pop(part.start, None)
        return _slice(whole, part)

    def release(self, part: TensorSlice) -> None:
        """All of the slice's residual has been sent. When that is so for all slices of a variable, its memory is free again."""
        whole = self._tensors.get(part.variable)
        if whole is None:
            return
        released = self._released.setdefault(part.variable, {})
        released[part.start] = part.elements
        if sum(released.values()) == whole.numel():
            del self._tensors[part.variable], self._released[part.variable]
        else:
            _slice(whole, part).zero_()

    def factor(self, part: TensorSlice, rank: int, initial: Callable[[], Tensor]) -> Tensor:
        """PowerSGD's warm start for a slice: the same tensor every time, which its user changes in place."""
        key = f"{part.variable}|{part.axis}|{part.start}|{part.stop}|{rank}"
        found = self._factors.get(key)
        if found is None:
            found = self._factors[key] = initial()
        return found

    # -- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save to carry on bit by bit; each rank saves its own. Copies; safe for `torch.load(weights_only=True)`."""
        return {
            "format": STATE_FORMAT,
            "rank": self._rank,
            "world_size": self._world_size,
            "residuals": {name: tensor.clone() for name, tensor in self._tensors.items()},
            "factors": {key: tensor.clone() for key, tensor in self._factors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from what `state_dict` gave on this rank; between two steps, on every rank.

        Raises `InvalidInput`, and changes nothing, where the state is another rank's, another world's or another model's.
        """
        residuals, factors = self._checked(state)
        self._tensors = {
            name: torch.empty_like(self._like[name], device=self._device).copy_(t)
            for name, t in residuals.items()
        }
        self._factors = {key: tensor.to(self._device, copy=True) for key, tensor in factors.items()}
        self._released = {}
        self.in_use = True

    def _checked(self, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        missing = [
            key
            for key in ("format", "rank", "world_size", "residuals", "factors")
            if key not in state
        ]
        if missing:
            raise InvalidInput(
                f"the state of compression must be what compression_state() gave, but lacks {missing[0]!r}"
            )
        if state["format"] != STATE_FORMAT:
            raise InvalidInput(
                f"this version reads compression state {STATE_FORMAT}, but the state has {state['format']}; update autotune"
            )
        saved, mine = (state["rank"], state["world_size"]), (self._rank, self._world_size)
        if saved != mine:
            raise InvalidInput(
                f"residuals belong to a rank of a world, but the state is of rank {saved[0]} of {saved[1]} and this is rank {mine[0]} of "
                f"{mine[1]}; give every rank the state that it saved, or start from none in another world"
            )
        for name, tensor in state["residuals"].items():
            expected = self._like.get(name)
            if expected is None:
                raise InvalidInput(
                    f"the state of compression must be of this model, but has the unknown variable {name!r}"
                )
            if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                raise InvalidInput(
                    f"the residual of {name!r} must be {expected.dtype} of shape {tuple(expected.shape)}, but the state has "
                    f"{tensor.dtype} of shape {tuple(tensor.shape)}"
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
            return f"is {tensor.dtype} of shape {tuple(tensor.shape)} and must be {expected.dtype} of shape {(columns, rank)}"
        return None


def _slice(tensor: Tensor, part: TensorSlice) -> Tensor:
    return (
        tensor
        if part.axis is None
        else tensor.narrow(part.axis, part.start, part.stop - part.start)
    )


def drop_non_finite_(values: Tensor, witness: Tensor) -> None:
    """Zeros for what is infinite or NaN in `values`, which is so only if some element of the small `witness` is.

    An overflow is sent and seen by all ranks once (AMP skips that step); in a residual it would stay for ever. A CPU looks
    at the witness first, which costs less than a pass over `values`; elsewhere looking would mean to wait for the device.
    """
    if values.device.type != "cpu" or not bool(witness.isfinite().all()):
        values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
