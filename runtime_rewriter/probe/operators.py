"""Times operators of torch by themselves, with inputs of recorded shapes and types.

Inputs are random; so an operator whose time depends on values (an embedding, a mask) is timed on
other values than in the training.
"""

from __future__ import annotations

import ast
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime_rewriter.probe import recurrent
from runtime_rewriter.pytorch.exchange.device import Device

WARM_UP, MOST_REPEATS, ROUNDS = 2, 20, 5
ENOUGH_S = 0.2
"""An operator is repeated for this long, at most `MOST_REPEATS` times (on a GPU: in each round)."""
MAX_ELEMENTS = 2**31
CALLED_SHARE = 0.1
"""An operator is timed with what it calls if that takes less: a recurrent layer adds its biases."""
PROFILED_CALLS = 5
"""Enough for a median that one or two interrupted calls do not change."""
_PLAIN = re.compile(
    r"aten::(?:empty|as_strided|resize|view|reshape|_unsafe_view|expand|set_|detach|slice|alias|t$|"
    r"transpose|permute|squeeze|unsqueeze|select|narrow|resolve_|copy_|fill_|zero_|is_|item|"
    r"_local_scalar)"
)
"""Operators that others call with little work: memory, views, filling an output."""
_COPIERS = re.compile(r"aten::(?:clone|contiguous|to|_to_copy)$")
"""Operators whose work is that of the `copy_` that they call."""
_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "long int": torch.int64,
    "long": torch.int64,
    "int": torch.int32,
    "short int": torch.int16,
    "bool": torch.bool,
    "unsigned char": torch.uint8,
    "signed char": torch.int8,
}


@dataclass(frozen=True)
class Invocation:
    """A recorded call: each input's sizes ((): no tensor or one number), type and written value."""

    name: str
    dims: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    values: tuple[str, ...] = ()


UNFIT = (RuntimeError, ValueError, TypeError, IndexError)
"""What torch raises for an operator whose recorded inputs do not tell how to call it.

The invocation stays untimed, and the exception's first line is its reason.
"""


@dataclass(frozen=True)
class OperatorTime:
    """Median seconds of an invocation, or the reason why it was not timed."""

    invocation: Invocation
    seconds: float | None
    reason: str = ""


def operator_times(
    invocations: Sequence[Invocation], device: str, budget_s: float
) -> Iterator[OperatorTime]:
    """Time each invocation in turn on `device` ("cpu", "cuda"), until the budget is spent."""
    end_s = time.perf_counter() + budget_s
    torch.manual_seed(0)
    queue = Device(torch.device(device))
    for one in invocations:
        if time.perf_counter() > end_s:
            yield OperatorTime(one, None, f"the budget of {budget_s:.0f} s was spent before")
            continue
        try:
            call = prepared(one, device)
            if device == "cpu" and (called := _called(call, one.name)):
                yield OperatorTime(one, None, f"it calls {called}")
                continue
            yield OperatorTime(one, median_s(call) if device == "cpu" else queued_s(call, queue))
        except UNFIT as error:
            lines = str(error).splitlines()
            yield OperatorTime(one, None, lines[0][:200] if lines else type(error).__name__)


def prepared(one: Invocation, device: str) -> Callable[[], Any]:
    """A function that calls the operator with the same inputs. Raises `ValueError` if unknown."""
    namespace, _, name = one.name.partition("::")
    if namespace != "aten" or not hasattr(torch.ops.aten, name):
        raise ValueError(f"{one.name} is no operator of torch")
    packet = getattr(torch.ops.aten, name)
    inputs = [_input(one, number, device) for number in range(len(one.types))]
    if one.name == recurrent.BACKWARD:
        return recurrent.backward_call(inputs)
    problem = "its inputs fit no overload"
    for overload in packet.overloads():
        function = getattr(packet, overload)
        arguments = function._schema.arguments
        left = arguments[len(inputs) :]
        if len(arguments) < len(inputs) or not all(one.has_default_value() for one in left):
            continue
        if any(one.is_out for one in arguments):
            continue
        given_arguments = list(zip(inputs, arguments, strict=False))
        positional = [value for value, given in given_arguments if not given.kwarg_only]
        named = {given.name: value for value, given in given_arguments if given.kwarg_only}
        try:
            with torch.no_grad():
                function(*positional, **named)
        except UNFIT as error:
            problem = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            continue
        return lambda: function(*positional, **named)
    raise ValueError(problem)


def _called(call: Callable[[], Any], name: str) -> str:
    """The longest operator with work of its own that this one calls; "" if none takes long.

    What several of them take together counts: at least `CALLED_SHARE` of the operator's time, in
    the median of some calls, since any one of them may be interrupted.
    """
    with torch.no_grad(), torch.autograd.profiler.profile(use_cpu=True) as profile:
        for _ in range(PROFILED_CALLS):
            call()
    called_shares, longest, longest_us = [], "", 0.0
    for event in profile.function_events:
        if event.name != name or event.cpu_parent is not None:
            continue
        children = [
            child
            for child in event.cpu_children
            if not _PLAIN.match(child.name) or (_COPIERS.match(name) and "copy" in child.name)
        ]
        called_us = sum(child.cpu_time_total for child in children)
        called_shares.append(called_us / event.cpu_time_total if called_us > 0 else 0.0)
        for child in children:
            if child.cpu_time_total > longest_us:
                longest, longest_us = str(child.name), child.cpu_time_total
    if not called_shares or statistics.median(called_shares) < CALLED_SHARE:
        return ""
    return longest


def _input(one: Invocation, number: int, device: str) -> Any:
    kind, dims = one.types[number], one.dims[number]
    value = one.values[number] if one.values else ""
    if kind in _DTYPES and (dims or not value):
        return _tensor(dims, _DTYPES[kind], device)
    if kind in ("", "None"):
        return None
    if kind in ("Scalar", "ScalarList") and value:
        return _literal(value)
    raise ValueError(f"input {number} of type {kind} was recorded without its value")


def _tensor(dims: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    elements = 1
    for size in dims:
        elements *= size
    if elements > MAX_ELEMENTS:
        raise ValueError(f"an input may have at most {MAX_ELEMENTS} elements, but has {elements}")
    if dtype.is_floating_point:
        return torch.rand(dims, device=device).to(dtype)
    return torch.zeros(dims, dtype=dtype, device=device)


def _literal(text: str) -> Any:
    if text in ("inf", "-inf", "nan"):
        return float(text)
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise ValueError(f"the value {text[:40]!r} is unknown") from None


def median_s(call: Callable[[], Any]) -> float:
    """Median seconds of a call on the host."""
    seconds: list[float] = []
    begun_s = time.perf_counter()
    with torch.no_grad():
        for repeat in range(WARM_UP + MOST_REPEATS):
            start_s = time.perf_counter()
            call()
            end_s = time.perf_counter()
            if repeat >= WARM_UP or end_s - begun_s > ENOUGH_S:
                seconds.append(end_s - start_s)
            if seconds and end_s - begun_s > ENOUGH_S:
                break
    return statistics.median(seconds)


def queued_s(call: Callable[[], Any], device: Device) -> float:
    """Seconds of a call on the device's queue, the mean of a round, in the median of the rounds.

    The calls of a round are queued while the device is busy with other work. So it never waits for
    the host between them, and the time that the host needs to launch them does not count.
    """
    with torch.no_grad():
        for _ in range(WARM_UP):
            call()
        once_s = _round_s(call, device, 1)
        fitting = int(ENOUGH_S / ROUNDS / max(once_s, 1e-9))
        count = min(max(fitting, 1), MOST_REPEATS)
        return statistics.median(_round_s(call, device, count) for _ in range(ROUNDS))


def _round_s(call: Callable[[], Any], device: Device, count: int) -> float:
    device.occupy()
    start = device.mark()
    for _ in range(count):
        call()
    return device.seconds_between(start, device.mark()) / count
