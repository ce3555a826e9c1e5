"""Time of a rank for each variable and each message, measured in whole steps of a small model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.shares import MOST_PIECES
from autotune.strategy_space.strategy import MOST_DIRECT_IN_FLIGHT, Compressor, Synchronizer
from autotune.workload import Variable, Workload
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.pytorch.cross_step import CrossStepUpdates
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.emulation import EmulatedAccelerator
from runtime_rewriter.pytorch.exchange.lanes import Lanes, Step
from runtime_rewriter.pytorch.under_way import Arriving

PAUSE_S = 0.002
"""Between two pieces of work; longer than `TOGETHER_S`, for which emulated accelerators wait."""


@dataclass(frozen=True)
class CostConditions:
    """The conditions: emulated accelerators or real ones, and the length of the pauses."""

    emulated: bool
    pause_s: float


class _Hooked(nn.Module):
    def __init__(self, count: int, elements: int, buffers: int = 0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(elements)) for _ in range(count))
        for number in range(buffers):
            self.register_buffer(f"buffer{number}", torch.zeros(elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + weight
        return x


@dataclass(frozen=True)
class _OnlyWhenAsked:
    """A message that arrives only when it is waited for, as most do on a slow network."""

    message: Arriving
    arrived: bool = False

    @property
    def number(self) -> int:
        return self.message.number

    def wait(self) -> None:
        self.message.wait()


def arriving_one_by_one(crossing: CrossStepUpdates) -> None:
    """Average and update each variable on its own, where it is read."""
    defer = crossing.defer

    def one_by_one(messages: Sequence[Arriving], positions: Iterable[int]) -> None:
        defer([_OnlyWhenAsked(message) for message in messages], positions)

    crossing.defer = one_by_one  # type: ignore[method-assign]


class _UnderWay:
    """Work that takes `seconds`, during which its waiters sleep."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.perf_counter() + seconds

    def wait(self) -> None:
        time.sleep(max(self._end_s - time.perf_counter(), 0.0))

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._end_s


def as_if_sent(lanes: Lanes, seconds: float) -> None:
    """Let every step of every message take `seconds`, in which threads sleep, as with a network."""

    def around(number: int, lane: int, step: Step) -> _UnderWay:
        step()
        return _UnderWay(seconds)

    lanes.around = around  # type: ignore[assignment]


@dataclass(frozen=True)
class Spent:
    """Mean CPU seconds of one step."""

    forward_s: float
    backward_s: float
    rest_s: float

    @property
    def whole_s(self) -> float:
        return self.forward_s + self.backward_s + self.rest_s


def profile(names: Sequence[str], elements: int, pause_s: float) -> Workload:
    """Return a workload with a pause before each variable, in both passes."""
    count = len(names)
    variables = tuple(
        Variable(
            name,
            (elements,),
            ready_s=pause_s * (number + 1),
            needed_s=pause_s * (count - number - 1),
        )
        for number, name in enumerate(reversed(names))
    )
    return Workload(
        "hooked", variables, forward_s=pause_s * count, backward_s=max(pause_s, 1e-9) * (count + 1)
    )


def spent(
    count: int,
    elements: int,
    cross_step: bool,
    way: CostConditions,
    synchronizer: Synchronizer | None = Synchronizer.ALL_REDUCE,
    buffers: int = 0,
    sent_s: float = 0.0,
    pieces: int = 1,
) -> Spent:
    """Measure a step under a plan of local messages, one per variable, or (None) one in all."""
    model = PlannedDataParallel(_Hooked(count, elements, buffers))
    hooked = model.synchronizer
    slices = [TensorSlice(name, elements) for name in reversed(hooked.names)]
    owner = 0 if synchronizer is Synchronizer.PARAMETER_SERVER else None
    groups = [tuple(slices)] if synchronizer is None else [(each,) for each in slices]
    messages = tuple(
        Message(
            group,
            synchronizer or Synchronizer.ALL_REDUCE,
            Compressor.NONE,
            "float32",
            owner,
            pieces=pieces,
        )
        for group in groups
    )
    hooked.load(
        Plan(hooked.model_id, 1, messages, cross_step, in_flight=MOST_DIRECT_IN_FLIGHT)
        if pieces > 1
        else Plan(hooked.model_id, 1, messages, cross_step)
    )
    arriving_one_by_one(hooked.cross_step)
    if sent_s > 0:
        as_if_sent(hooked.lanes, sent_s)
    if way.emulated:
        hooked.emulate(
            EmulatedAccelerator(hooked, timetable_of(profile(hooked.names, elements, way.pause_s)))
        )
    return mean_step(model, elements)


def mean_step(model: nn.Module, elements: int, share_s: float = 0.6) -> Spent:
    optimizer, batch = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9), torch.ones(elements)

    def step() -> tuple[float, float, float]:
        began_s = time.process_time()
        loss = model(batch).sum()
        forward_s = time.process_time() - began_s
        loss.backward()
        backward_s = time.process_time() - began_s - forward_s
        optimizer.step()
        optimizer.zero_grad()
        return forward_s, backward_s, time.process_time() - began_s - forward_s - backward_s

    for _ in range(3):
        step()
    points: list[tuple[float, float, float]] = []
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < share_s or len(points) < 3:
        points.append(step())
    return Spent(*(fmean(values) for values in zip(*points, strict=True)))


def hooks(count: int, way: CostConditions) -> dict[str, float]:
    """Measure the costs per variable and per message.

    Per variable: its hook with packing, and deferring it to the next pass and applying it there.
    Per message: issuing and applying it. With emulated accelerators this includes waking up for
    gradients and handing them out, which the computation does otherwise.
    """
    few, many = 8, 2**16
    per_byte = 1 / (4 * (many - few) * count)
    plain_s = mean_step(_Hooked(count, few), few).backward_s
    base_s = 0.0 if way.emulated else plain_s
    bucketed_s = mean_step(DistributedDataParallel(_Hooked(count, few)), few).backward_s
    together, apart = spent(count, few, False, way, None), spent(count, few, False, way)
    lane_s = lane_step_s(count, few, replace(way, pause_s=0.0), 0.0)
    woken_s = lane_step_s(count, few, way, PAUSE_S)
    crossing, crossing_together = spent(count, few, True, way), spent(count, few, True, way, None)
    large, crossing_large = (spent(count, many, cross_step, way) for cross_step in (False, True))
    settled_s, settled_together_s, settled_large_s = (
        crossed.forward_s - within.forward_s
        for crossed, within in (
            (crossing, apart),
            (crossing_together, together),
            (crossing_large, large),
        )
    )
    # With one message hardly anything is issued or arrives. Without pauses or updates nothing hides
    # the small cost of deferring a variable, which the optimizer's step pays in part.
    deferred, within_step = (
        spent(count, few, cross_step, CostConditions(True, 0.0), None)
        for cross_step in (True, False)
    )
    deferring_s = deferred.backward_s - within_step.backward_s
    deferring_s += deferred.rest_s - within_step.rest_s
    buffered = spent(count, few, False, way, None, buffers=count)
    results_s = {
        "fill_s": (together.backward_s - base_s) / count,
        "bucket_s": (bucketed_s - plain_s) / count,
        "issue_s": (apart.whole_s - together.whole_s) / count,
        "lane_s": lane_s,
        "lane_first_s": woken_s - lane_s,
        "piece_s": piece_s(way),
        "defer_s": deferring_s / count,
        "settle_s": (settled_s - settled_together_s) / count,
        "settle_each_s": (deferred.forward_s - within_step.forward_s) / count,
        "settle_s_per_byte": (settled_large_s - settled_s) * per_byte,
        "buffer_s": (buffered.forward_s - together.forward_s) / count,
    }
    if way.emulated:
        results_s["hand_out_s_per_byte"] = (large.backward_s - apart.backward_s) * per_byte
        at_once = spent(count, few, False, replace(way, pause_s=0.0), None)
        results_s |= behind_another(count, few, way, at_once, results_s)
        results_s["wake_s"] = (together.backward_s - at_once.backward_s) / count
        results_s["real_update"] = results_s["early_update"] = 0.0
        results_s["fill_s"] -= results_s["wake_s"]
    return {name: max(value, 0.0) for name, value in results_s.items()}


def behind_another(
    count: int, elements: int, way: CostConditions, together: Spent, alone_s: Mapping[str, float]
) -> dict[str, float]:
    """Issuing and applying a message directly behind another, and what more the first one costs.

    After a pause, threads sleep and caches are cold. `together`: one message, without pauses.
    `alone_s`: costs after a pause.
    """
    busy = replace(way, pause_s=0.0)
    apart, crossing = (spent(count, elements, cross_step, busy) for cross_step in (False, True))
    crossing_together = spent(count, elements, True, busy, None)
    issue_s = (apart.whole_s - together.whole_s) / count
    settled_s = crossing.forward_s - apart.forward_s
    settled_together_s = crossing_together.forward_s - together.forward_s
    behind_s = {"issue": issue_s, "settle": (settled_s - settled_together_s) / count}
    costs_s = {}
    for name, value in behind_s.items():
        costs_s[f"{name}_s"] = max(value, 0.0)
        costs_s[f"{name}_first_s"] = alone_s[f"{name}_s"] - costs_s[f"{name}_s"]
    return costs_s


def lane_step_s(count: int, elements: int, way: CostConditions, sent_s: float) -> float:
    """CPU time for passing a message to the thread of its second step.

    Each step is under way for `sent_s`.
    """
    one_step, two_steps = (
        spent(count, elements, False, way, synchronizer, sent_s=sent_s)
        for synchronizer in (Synchronizer.ALL_REDUCE, Synchronizer.PARAMETER_SERVER)
    )
    return max(two_steps.whole_s - one_step.whole_s, 0.0) / count


def piece_s(way: CostConditions) -> float:
    """Passing one of many pieces of a direct exchange to the next of its three lanes.

    They are under way together and nothing is sent, so the lanes' threads are awake.
    """
    busy = replace(way, pause_s=0.0)
    whole_s, in_pieces_s = (
        spent(1, MOST_PIECES, False, busy, Synchronizer.DIRECT_EXCHANGE, pieces=pieces).whole_s
        for pieces in (1, MOST_PIECES)
    )
    return (in_pieces_s - whole_s) / (3 * (MOST_PIECES - 1))
