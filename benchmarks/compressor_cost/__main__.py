"""Measure compressors without the network: `python -m benchmarks.compressor_cost`.

One core, one message of six matrices, 25 M float32 elements, in a world of four ranks. A step adds
the residual to the scaled gradient, compresses, keeps the unsent rest, sums the others' messages
and reads the result; this rank's own message takes the place of the others'. The comparison is
torch's PowerSGD hook (the same rank, error feedback and warm start) on a group of one rank, whose
messages go nowhere. Milliseconds are medians of interleaved repeats. The last line is one JSON
object; `ratio_to_torch` is PowerSGD's time / that of torch's hook.
"""

from __future__ import annotations

import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from autotune.strategy_space.plan import TensorSlice
from benchmarks.repository import option_parser
from runtime_rewriter.compression import RowLayout, matrix_shape, picked
from runtime_rewriter.pytorch.exchange.power_sgd import LowRank, start_tensor
from runtime_rewriter.pytorch.exchange.quantise import QuantisedRows
from runtime_rewriter.pytorch.exchange.residuals import Feedback, Residuals
from runtime_rewriter.pytorch.exchange.top_k import PickedRows

RANKS = 4
CPU = torch.device("cpu")


class CompressedStep:
    """A message without the network: `compress` after packing, `read` at the end."""

    def __init__(self, shapes: list[tuple[int, int]], padded: int) -> None:
        named = {
            f"v{number}": torch.randn(shape, generator=torch.Generator().manual_seed(number))
            for number, shape in enumerate(shapes)
        }
        self.gradients, self.values = list(named.values()), torch.zeros(padded)
        self.elements = sum(gradient.numel() for gradient in self.gradients)
        flat = self.values[: self.elements].split([gradient.numel() for gradient in self.gradients])
        self.parts = [TensorSlice(name, gradient.numel()) for name, gradient in named.items()]
        self.views = [
            part.view_as(gradient) for part, gradient in zip(flat, self.gradients, strict=True)
        ]
        self.residuals = Residuals(named, 0, RANKS)
        self.feedback = Feedback(self.residuals, list(zip(self.parts, self.views, strict=True)))
        self.feedback.feed(range(len(shapes)))

    def pack(self) -> None:
        for part, view, gradient in zip(self.parts, self.views, self.gradients, strict=True):
            torch.add(self.residuals.residual_of(part), gradient, alpha=1 / RANKS, out=view)


def int8(shapes: list[tuple[int, int]]) -> Callable[[], None]:
    layout = RowLayout.of(sum(rows * columns for rows, columns in shapes), RANKS)
    step = CompressedStep(shapes, layout.elements)
    rows, local_rows = (
        QuantisedRows(layout, torch.float32, CPU),
        QuantisedRows(layout.with_rows(1), torch.float32, CPU),
    )
    total = torch.empty(layout.elements // RANKS)

    def run() -> None:
        step.pack()
        rows.encode_(step.values)
        rows.sum_into(total)
        local_rows.encode_(total)
        step.values[: len(total)] += total
        step.feedback.keep()
        rows.decode(step.values)

    return run


def top_k(shapes: list[tuple[int, int]], ratio: float) -> Callable[[], None]:
    step = CompressedStep(shapes, sum(rows * columns for rows, columns in shapes))
    k = picked(step.elements, ratio)
    local_rows, rows = (PickedRows(count, k, torch.float32, CPU) for count in (1, RANKS))

    def run() -> None:
        step.pack()
        local_rows.encode_(step.values)
        step.feedback.keep()
        rows.bytes.copy_(local_rows.bytes.expand_as(rows.bytes))
        rows.sum_into(step.values)

    return run


def power_sgd(shapes: list[tuple[int, int]], rank: int) -> Callable[[], None]:
    step = CompressedStep(shapes, sum(rows * columns for rows, columns in shapes))
    starts = [
        start_tensor(str(number), matrix_shape(shape)[1], rank, step.values)
        for number, shape in enumerate(shapes)
    ]
    low = LowRank(step.values, shapes, rank, RANKS, lambda number: starts[number])

    def run() -> None:
        step.pack()
        low.project()
        low.project_back()
        step.feedback.keep()
        low.restore()

    return run


class Bucket:
    """The part of DDP's bucket that the hook uses; a real bucket exists only inside DDP."""

    def __init__(
        self, values: Tensor, views: list[Tensor], parameters: list[torch.nn.Parameter]
    ) -> None:
        self._values, self._views, self._parameters = values, views, parameters

    def buffer(self) -> Tensor:
        return self._values

    def gradients(self) -> list[Tensor]:
        return self._views

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def torch_power_sgd(shapes: list[tuple[int, int]], rank: int) -> Callable[[], None]:
    step = CompressedStep(shapes, sum(rows * columns for rows, columns in shapes))
    parameters = [torch.nn.Parameter(gradient) for gradient in step.gradients]
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=rank, start_powerSGD_iter=2
    )
    state.iter = 2
    bucket = Bucket(step.values, step.views, parameters)

    def run() -> None:
        for view, gradient in zip(
            step.views, step.gradients, strict=True
        ):  # as DDP does before its hook
            torch.mul(gradient, 1 / RANKS, out=view)
        powerSGD_hook.powerSGD_hook(state, cast(dist.GradBucket, bucket)).wait()

    return run


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--ratio", type=float, default=0.01, help="of top-k")
    parser.add_argument("--rank", type=int, default=4, help="of PowerSGD")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)  # torch's hook logs its settings
    shapes = [(1024, 4096)] * 6
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    steps = {
        "int8": int8(shapes),
        "top_k": top_k(shapes, options.ratio),
        "power_sgd": power_sgd(shapes, options.rank),
        "torch_power_sgd": torch_power_sgd(shapes, options.rank),
    }
    taken_ms: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(options.repeats + 2):
        for name, run in steps.items():
            began_s = time.perf_counter()
            run()
            if repeat >= 2:
                taken_ms[name].append(1e3 * (time.perf_counter() - began_s))
    dist.destroy_process_group()
    ratios = [
        mine / theirs
        for mine, theirs in zip(taken_ms["power_sgd"], taken_ms["torch_power_sgd"], strict=True)
    ]
    result = {
        **{f"{name}_ms": round(statistics.median(times), 1) for name, times in taken_ms.items()},
        **{
            f"{name}_range_ms": [round(min(times), 1), round(max(times), 1)]
            for name, times in taken_ms.items()
        },
        "ratio_to_torch": round(statistics.median(ratios), 3),
        "elements": sum(rows * columns for rows, columns in shapes),
        "ratio": options.ratio,
        "rank": options.rank,
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
