"""What packing, issuing and compressing cost a rank: `python -m benchmarks.runtime_costs --ranks 4`.

Measures the constants of `autotune.lowering.costs` on the machine that the ranks will run on, with as many processes at work at once as
there will be ranks here (emulated hosts share its cores), under round-robin scheduling where that is permitted, as emulated ranks are. A
figure is the mean over a second or so of one process, then the mean over the processes; costs per byte are the slope between two sizes.
The last line is one JSON object: name -> value.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import torch
import torch.distributed as dist
from torch import nn

from autotune.lowering.costs import Constant, RuntimeCosts
from autotune.strategy_space.plan import Message, Plan, Primitive, TensorSlice
from autotune.strategy_space.strategy import Compressor
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.emulation import EmulatedAccelerator
from runtime_rewriter.pytorch.exchange.power_sgd import LowRank
from runtime_rewriter.pytorch.exchange.quantise import QuantisedRows, RowLayout
from runtime_rewriter.pytorch.exchange.top_k import PickedRows, picked
from runtime_rewriter.scheduling import take_round_robin

SMALL, LARGE = 2**14, 2**21
"""Elements of the two messages between which a slope is taken."""
CPU = torch.device("cpu")
RATIO, RANK = 0.01, 4
SHARE_S = 0.15


def seconds(operation: Callable[[], object], share_s: float = SHARE_S) -> float:
    """Mean time of one call."""
    operation()
    began_s, calls = time.perf_counter(), 0
    while (taken_s := time.perf_counter() - began_s) < share_s or calls < 3:
        operation()
        calls += 1
    return taken_s / calls


def line(of_elements: Callable[[int], Callable[[], object]]) -> tuple[float, float]:
    """(seconds per call, seconds per element)."""
    small, large = (seconds(of_elements(count)) for count in (SMALL, LARGE))
    slope = max(large - small, 0.0) / (LARGE - SMALL)
    return max(small - slope * SMALL, 0.0), slope


def packing(dtype: torch.dtype) -> Callable[[int], Callable[[], object]]:
    def of(count: int) -> Callable[[], object]:
        source, out = torch.randn(count), torch.zeros(count, dtype=dtype)
        return lambda: torch.mul(source, 0.25, out=out)

    return of


def writing(count: int) -> Callable[[], object]:
    source, out = torch.randn(count), torch.zeros(count)
    return lambda: torch._foreach_copy_([out], [source])


def int8(part: str) -> Callable[[int], Callable[[], object]]:
    def of(count: int) -> Callable[[], object]:
        layout = RowLayout.of(count, 4)
        rows, values = QuantisedRows(layout, torch.float32, CPU), torch.randn(layout.elements)
        rows.encode_(values.clone())
        return (lambda: rows.encode_(values)) if part == "encode" else (lambda: rows.decode(values))

    return of


def top_k(count: int) -> Callable[[], object]:
    rows, values = PickedRows(1, picked(count, RATIO), torch.float32, CPU), torch.randn(count)
    return lambda: rows.encode_(values.add_(1e-3))


def top_k_sum(count: int) -> Callable[[], object]:
    rows, out = PickedRows(1, count, torch.float32, CPU), torch.zeros(count)
    rows.indices[0].copy_(torch.randperm(count))
    return lambda: out.index_add_(0, rows.indices[0], rows.values[0])


def low_rank(count: int) -> Callable[[], object]:
    """The three products of a square matrix of `count` / `RANK` elements with what belongs to them."""
    side = math.isqrt(count // RANK)
    values, start = torch.randn(side * side), torch.randn(side, RANK)
    low = LowRank(values, [(side, side)], RANK, 1, lambda _: start)

    def products() -> None:
        low.project()
        low.project_back()
        low.restore()

    return products


class _Hooked(nn.Module):
    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(elements)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + weight
        return x


def planned(
    count: int, elements: int, cross_step: bool, emulated: bool, primitive: Primitive = Primitive.ALL_REDUCE
) -> Callable[[], tuple[float, float, float]]:
    """A step under a plan with a message per variable that has nowhere to go; see `stepping`."""
    model = PlannedDataParallel(_Hooked(count, elements))
    names = [f"weights.{number}" for number in range(count)]
    owner = 0 if primitive is Primitive.PUSH_PULL else None
    messages = tuple(Message((TensorSlice(n, elements),), primitive, Compressor.NONE, "float32", owner) for n in reversed(names))
    model.synchronizer.load(Plan(model.synchronizer.model_id, 1, messages, cross_step))
    if emulated:
        model.synchronizer.emulate(EmulatedAccelerator(model.synchronizer, None))
    return stepping(model, elements)


def stepping(model: nn.Module, elements: int) -> Callable[[], tuple[float, float, float]]:
    """A step that returns seconds of (forward pass, backward pass, the rest)."""
    optimizer, batch = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9), torch.ones(elements)

    def step() -> tuple[float, float, float]:
        began_s = time.perf_counter()
        loss = model(batch).sum()
        forward_s = time.perf_counter() - began_s
        loss.backward()
        backward_s = time.perf_counter() - began_s - forward_s
        optimizer.step()
        optimizer.zero_grad()
        return forward_s, backward_s, time.perf_counter() - began_s - forward_s - backward_s

    return step


def mean_step(step: Callable[[], tuple[float, float, float]], share_s: float = 0.4) -> list[float]:
    for _ in range(4):
        step()
    began_s, found = time.perf_counter(), []
    while time.perf_counter() - began_s < share_s or len(found) < 3:
        found.append(step())
    return [fmean(values) for values in zip(*found, strict=True)]


def hooks(count: int, emulated: bool) -> dict[str, float]:
    """Of one variable: its hook, packing and issuing together; leaving it to the next pass; settling it there.

    Where accelerators are emulated also handing out its gradient, which else the computation itself does.
    """
    few, many = 8, 2**16
    per_byte = 1 / (4 * (many - few) * count)
    plain = mean_step(stepping(_Hooked(count, few), few))
    within, within_many = (mean_step(planned(count, size, False, emulated)) for size in (few, many))
    crossing, crossing_many = (mean_step(planned(count, size, True, emulated)) for size in (few, many))
    base = 0.0 if emulated else plain[1]
    two_steps = mean_step(planned(count, few, False, emulated, Primitive.PUSH_PULL))
    found = {
        "lane_s": max(sum(two_steps) - sum(within), 0.0) / count,
        "fill_s": max(within[1] - base, 0.0) / count,
        "defer_s": max(crossing[1] - within[1], 0.0) / count,
        "settle_s": max(crossing[0] - within[0] + crossing[2] - within[2], 0.0) / count,
        "settle_s_per_byte": max(crossing_many[0] - within_many[0] - crossing[0] + within[0], 0.0) * per_byte,
        "update_s_per_byte": max(within_many[2] - within[2], 0.0) * per_byte,
    }
    if emulated:
        found["hand_out_s_per_byte"] = max(within_many[1] - within[1], 0.0) * per_byte
    return found


def issuing() -> float:
    values = torch.zeros(8)

    def issue() -> None:
        work = dist.all_reduce(values, async_op=True)
        began.append(time.perf_counter() - began_s)
        work.wait()

    began: list[float] = []
    for _ in range(300):
        began_s = time.perf_counter()
        issue()
    return fmean(began)


def one_process(emulated: bool) -> dict[str, float]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, float] = {}
    issue_s = found["issue_s"] = issuing()
    found |= hooks(48, emulated)
    found["fill_s"] = max(found["fill_s"] - issue_s, 0.0)
    found["pack_s_per_byte"] = line(packing(torch.float32))[1] / 4
    found["cast_s_per_byte"] = max(line(packing(kind))[1] for kind in (torch.float16, torch.bfloat16)) / 4
    found["write_s"], per_element = line(writing)
    found["unpack_s_per_byte"] = per_element / 4
    if "hand_out_s_per_byte" in found:  # it was measured with the packing
        behind = found["pack_s_per_byte"] + found["unpack_s_per_byte"]
        found["hand_out_s_per_byte"] = max(found["hand_out_s_per_byte"] - behind, 0.0)
    found["int8_s"], found["int8_encode_s"] = line(int8("encode"))
    found["int8_decode_s"] = line(int8("decode"))[1]
    found["top_k_s"], found["top_k_s_per_element"] = line(top_k)
    found["top_k_sum_s"] = line(top_k_sum)[1]
    per_call_s, per_element = line(low_rank)
    found["low_rank_s"], found["low_rank_s_per_flop"] = per_call_s / 3, per_element / 3
    dist.destroy_process_group()
    return found


def _process(start: object, results: object, emulated: bool) -> None:
    take_round_robin()
    torch.set_num_threads(1)
    start.wait()  # type: ignore[attr-defined]
    results.put(one_process(emulated))  # type: ignore[attr-defined]


def measured_costs(ranks: int, emulated: bool = False) -> dict[str, float]:
    """Name of a constant -> mean over so many processes that work at once."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(ranks), context.Queue()
    processes = [context.Process(target=_process, args=(start, results, emulated)) for _ in range(ranks)]
    for process in processes:
        process.start()
    found = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return {name: fmean(one[name] for one in found) for name in found[0]}


def costs_of(measured: dict[str, float], ranks: int) -> RuntimeCosts:
    source = f"measured by benchmarks.runtime_costs, {ranks} processes at once on the machine of the ranks"
    return replace(RuntimeCosts(), **{name: Constant(value, source) for name, value in measured.items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="processes that work at once (default 1)")
    parser.add_argument("--emulated", action="store_true", help="of ranks with emulated accelerators")
    options = parser.parse_args()
    print(json.dumps(measured_costs(options.ranks, options.emulated)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
