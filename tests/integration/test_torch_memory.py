"""Recorded memory is the allocator's, and predictions from it hold in real training."""

from __future__ import annotations

import copy
import gc
import io
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import profile as torch_profile
from torch_plans import uniform
from torch_world import BACKEND, DEVICE, run_world

from autotune.errors import InvalidInput
from autotune.memory.accumulation import accumulated
from autotune.memory.peak import peak_memory
from autotune.memory.plan_buffers import bytes_always, plan_buffers
from autotune.memory.recomputation import Run, recomputed
from autotune.recordings.memory_file import RecordedMemory
from autotune.recordings.memory_profile import MemoryProfile, Replica, TensorRole
from autotune.strategy_space.strategy import Compressor, Synchronizer
from benchmarks.memory_accuracy.c10_memory import AllocatorCounter, build
from benchmarks.memory_passes.checkpointed import Stack, computed_again
from benchmarks.memory_passes.checkpointed import training as stack_training
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.recording.memory.allocations import Allocation, AllocationLog
from runtime_rewriter.recording.memory.capture import MemoryCapture
from runtime_rewriter.recording.memory.recorder import MemoryRecorder

WIDTH = 48
Step = Callable[[], None]


def training(module: nn.Module, batch: int = 1500, parts: int = 1) -> Step:
    return stack_training(module, WIDTH, batch, parts)


def allocated_peak(build_step: Callable[[], Step]) -> int:
    """Peak bytes of torch's allocator in a later step, counted since before the model."""
    log = AllocationLog(torch.device("cpu"))
    with log.recording():
        step = build_step()
        for _ in range(3):
            step()
        log.mark()
        step()
        step()
    # A collection may free garbage of earlier tests meanwhile, which was never counted.
    live: dict[int, int] = {}
    peak, counts = 0, False
    for event in log.events:
        if not isinstance(event, Allocation):
            counts = True
        elif event.bytes > 0:
            live[event.address] = event.bytes
        else:
            live.pop(event.address, None)
        peak = max(peak, sum(live.values()) if counts else 0)
    return peak


def test_the_allocated_peak_counts_no_garbage_of_before() -> None:
    def build(garbage: list[Tensor]) -> Step:
        step = training(Stack())

        def steps() -> None:
            step()
            garbage.clear()

        return steps

    garbage = [torch.zeros(100_000)]
    assert allocated_peak(lambda: build(garbage)) == allocated_peak(lambda: build([]))


class Mixed(nn.Module):
    """Tied weights, dropout, LayerNorm, a buffer: what is easily counted twice or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer.weight = self.inner.weight
        self.register_buffer("shift", torch.zeros(3000))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.drop(self.norm(torch.relu(self.inner(x)))))


@pytest.mark.parametrize("kind", [Stack, Mixed])
def test_the_recorded_peak_is_the_allocators(kind: Callable[[], nn.Module]) -> None:
    module = kind()
    recorded = MemoryRecorder(module).record(training(module))
    assert int(recorded.live_bytes.max()) == allocated_peak(lambda: training(kind()))


def test_each_memory_counts_once_and_lazy_state_counts() -> None:
    module = Mixed()
    recorded = MemoryRecorder(module).record(training(module))
    weights = 4 * (WIDTH * WIDTH + 2 * WIDTH)
    assert recorded.bytes_of(TensorRole.PARAMETER) == weights
    assert recorded.bytes_of(TensorRole.GRADIENT) == weights
    assert (
        recorded.bytes_of(TensorRole.OPTIMIZER) == 2 * weights + 3 * 4
    )  # two moments, and a step count each
    assert recorded.bytes_of(TensorRole.BUFFER) == 3000 * 4


def test_gradients_that_the_script_keeps_are_always_there() -> None:
    module = Stack()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        module(torch.randn(10, WIDTH)).sum().backward()
        optimizer.step()

    recorded = MemoryRecorder(module).record(step)
    gradients = [
        one for one in recorded.lifetimes if one.kind is TensorRole.GRADIENT and one.born is None
    ]
    assert sum(one.bytes for one in gradients) == recorded.bytes_of(TensorRole.PARAMETER)


@pytest.mark.parametrize(
    "activation", [nn.Tanh, nn.GELU]
)  # one keeps its output for the way back, the other its input
@pytest.mark.parametrize(
    "again",
    [
        ((0, 7),),
        ((0, 3),),
        ((0, 3), (4, 7)),
        ((2, 5),),
        ((1, 2),),  # its input is held, which a Tanh by itself does not keep
        ((3, 6),),
        ((0, 2), (3, 6)),
    ],
)
def test_the_predicted_peak_with_regions_computed_twice_is_that_of_torchs_checkpoint(
    again: tuple[tuple[int, int], ...], activation: type[nn.Module]
) -> None:
    def parts() -> list[nn.Module]:
        return [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), activation())]

    module = Stack(parts=parts())
    recorded = MemoryRecorder(module).record(training(module))
    predicted = peak_memory(recomputed(recorded, [Run(*run) for run in again])).peak_bytes
    runs = [[f"body.{number}" for number in range(first, last + 1)] for first, last in again]
    real = allocated_peak(lambda: training(computed_again(Stack(parts=parts()), runs)))
    assert predicted == pytest.approx(real, rel=0.02)
    saves_nothing = [((0, 7),), *([((1, 2),), ((3, 6),)] if activation is nn.Tanh else [])]
    assert predicted < recorded.live_bytes.max() or again in saves_nothing


@pytest.mark.parametrize("parts", [2, 5])
def test_the_predicted_peak_with_the_batch_in_parts_is_the_measured_one(parts: int) -> None:
    module = Stack()
    recorded = MemoryRecorder(module).record(training(module))
    predicted = peak_memory(accumulated(recorded, parts)).peak_bytes
    assert predicted == pytest.approx(
        allocated_peak(lambda: training(Stack(), parts=parts)), rel=0.02
    )


class Adding(nn.Module):
    """Changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.add_(1.0) if not x.is_leaf else x)


def test_regions_tell_of_random_numbers_and_side_effects() -> None:
    parts: list[nn.Module] = [
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.5),
        nn.BatchNorm1d(WIDTH),
        Adding(),
        nn.Linear(WIDTH, WIDTH),
    ]
    module = Stack(parts=parts)
    regions = MemoryRecorder(module).record(training(module)).regions
    assert [region.random for region in regions] == [False, True, False, False, False]
    assert [region.why_not is None for region in regions] == [True, True, False, False, True]
    assert "buffers" in str(regions[2].why_not) and "input" in str(regions[3].why_not)


def test_a_step_that_changes_is_refused() -> None:
    module = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        module[len(calls) % 2](torch.ones(2, WIDTH)).sum().backward()

    with pytest.raises(InvalidInput, match="the same each time"):
        MemoryRecorder(module).record(step)


def test_a_script_that_profiles_itself_is_refused_and_left_without_hooks() -> None:
    module = Stack()
    with torch_profile(), pytest.raises(InvalidInput, match="profiler"):
        MemoryRecorder(module).record(training(module))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())


# -- of a job that trains, on two ranks ------------------------------------------------------------


class Rows(nn.Module):
    """Sparse and dense gradients, and a buffer that DDP sends."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(2000, WIDTH, sparse=True)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.rows((x[:, 0] * 1000).long() % 2000))


KINDS_OF_MODEL: tuple[type[nn.Module], ...] = (
    (Stack, Mixed) if BACKEND == "nccl" else (Stack, Mixed, Rows)
)
"""torch's DDP does not send sparse gradients over NCCL."""


def _captured(rank: int, view: bool) -> list[tuple[str, str, MemoryProfile, RecordedMemory | None]]:
    """For every model: the memory of a replica alone, and the record of two that trained."""
    captured = []
    for kind in KINDS_OF_MODEL:
        torch.manual_seed(0)
        module = kind()
        wrapped: Any = PlannedDataParallel(module, gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(
            module.parameters(), lr=0.01, momentum=0.0 if kind is Rows else 0.9
        )

        def step(model: Any, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.zero_grad()
            torch.manual_seed(1)  # the same rows in every step
            model(torch.rand(600, WIDTH)).square().mean().backward()
            optimizer.step()

        for _ in range(2):
            step(wrapped)
        capture = MemoryCapture(wrapped.synchronizer, None)
        while not capture.done:
            step(wrapped)
        memory = capture.finish()
        wrapped.synchronizer.close()
        alone = MemoryRecorder(module).record(lambda step=step, module=module: step(module))  # type: ignore[misc]
        captured.append((kind.__name__, capture.note, alone, memory))
    return captured


@pytest.mark.parametrize("view", [False, True])
def test_the_memory_of_a_replica_that_trains_with_others_is_that_of_one_alone(view: bool) -> None:
    first, second = run_world(_captured, 2, view)
    assert [memory for _, _, _, memory in second] == [None] * len(KINDS_OF_MODEL)
    for name, note, alone, memory in first:
        assert memory is not None, note
        assert (memory.ddp, memory.bucket_view, memory.batch) == (True, view, 600)
        assert memory.fixed is not None
        assert (
            memory.profile.model == alone.model
            and memory.profile.sparse_bytes == alone.sparse_bytes
        )
        assert memory.profile.live_bytes.max() == pytest.approx(
            alone.live_bytes.max(), rel=0.005
        ), name
        for held in (
            TensorRole.PARAMETER,
            TensorRole.GRADIENT,
            TensorRole.OPTIMIZER,
            TensorRole.BUFFER,
        ):
            # A step that is cut elsewhere may hold indices of rows twice in one segment.
            assert memory.profile.bytes_of(held) == pytest.approx(alone.bytes_of(held), rel=0.05), (
                name,
                held,
            )


class Shares(nn.Module):
    """Sums what it sees over all ranks in its forward pass, as batch norms over all ranks do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean()
        dist.all_reduce(mean)
        return self.body(x) * mean


def _sharing(rank: int) -> RecordedMemory | None:
    module = Shares()
    wrapped: Any = PlannedDataParallel(module)
    capture = MemoryCapture(wrapped.synchronizer, None)
    while not capture.done:
        module.zero_grad()
        wrapped(torch.rand(8, WIDTH)).sum().backward()
    memory = capture.finish()
    dist.barrier()
    return memory


def _scripted(rank: int) -> tuple[str, list[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(nn.Linear(WIDTH, 2)))
    wrapped: Any = PlannedDataParallel(module)
    capture = MemoryCapture(wrapped.synchronizer, None)
    while not capture.done:
        module.zero_grad()
        wrapped(torch.rand(8, WIDTH)).sum().backward()
    assert capture.finish() is None
    return capture.note, [name for name, part in module.named_modules() if part._forward_hooks]


def test_a_scripted_part_has_no_recorded_memory_and_training_goes_on() -> None:
    (note, hooked), _ = run_world(_scripted, 2)
    assert "'1' is scripted" in note and not hooked


def test_no_rank_computes_half_a_batch_alone_where_that_would_wait_for_the_others() -> None:
    memory, _ = run_world(_sharing, 2)
    assert memory is not None and memory.fixed is None


def _copying(rank: int) -> list[bool]:
    module = Stack()
    wrapped: Any = PlannedDataParallel(module)
    capture = MemoryCapture(wrapped.synchronizer, None)
    same = []
    while not capture.done:
        module.zero_grad()
        wrapped(torch.rand(8, WIDTH)).sum().backward()
        saved = io.BytesIO()
        torch.save(module, saved)
        saved.seek(0)
        for copied in (copy.deepcopy(module), torch.load(saved, weights_only=False)):
            copied(torch.rand(8, WIDTH)).sum().backward()
            state = copied.state_dict()
            same += [torch.equal(state[name], value) for name, value in module.state_dict().items()]
    capture.finish()
    return same


def test_a_script_may_copy_and_save_its_module_while_its_memory_is_recorded() -> None:
    assert all(same and all(same) for same in run_world(_copying, 2))


# -- under plans, on two ranks ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler for the allocator's counter")
    if DEVICE != "cpu":
        pytest.skip(
            "the counter is of the CPU's allocator; `benchmarks.memory_accuracy --device cuda` "
            "compares on a GPU"
        )
    return build(tmp_path_factory.mktemp("c10"))


KINDS = [
    *((synchronizer, Compressor.NONE) for synchronizer in Synchronizer),
    (Synchronizer.ALL_REDUCE, Compressor.FP16),
    *((synchronizer, Compressor.INT8) for synchronizer in Synchronizer),
    (Synchronizer.PARAMETER_SERVER, Compressor.FP16),
    (Synchronizer.ALL_REDUCE, Compressor.TOP_K),
    (Synchronizer.PARAMETER_SERVER, Compressor.TOP_K),
    (Synchronizer.ALL_REDUCE, Compressor.POWER_SGD),
    (Synchronizer.REDUCE_SCATTER_ALL_GATHER, Compressor.POWER_SGD),
    (Synchronizer.DIRECT_EXCHANGE, Compressor.TOP_K),
]


def _settled(counter: AllocatorCounter, wanted: int) -> int:
    """Bytes allocated once the threads of the last messages have let go of theirs."""
    deadline = time.monotonic() + 60
    while counter.current_bytes != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return counter.current_bytes


def _buffers_of_plans(rank: int, library: str) -> list[tuple[str, int, int, int, int]]:
    """(case, predicted and real bytes between steps, predicted and real peak) of every plan."""
    gc.freeze()  # ours visit no imports
    counter = AllocatorCounter(Path(library))
    module = Stack()
    workload = assumed_workload(module)
    recorded = MemoryRecorder(module).record(training(module))
    model: Any = PlannedDataParallel(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    replica, results = Replica(rank, device="cpu"), []
    module.zero_grad()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(1500, WIDTH)).square().mean().backward()
        optimizer.step()

    gc.collect()
    for synchronizer, compressor in KINDS:
        plan = uniform(module, 2, synchronizer, compressor)
        for crossing in (False, True):
            plan = replace(plan, cross_step=crossing)
            model.synchronizer.load(plan)
            gc.collect()
            for _ in range(3):
                step()
            dist.barrier()
            counter.reset()
            step()
            real_peak = counter.peak_bytes
            model.synchronizer.cross_step.flush()
            module.zero_grad()
            always = recorded.always_bytes + bytes_always(plan_buffers(plan, workload, replica, 2))
            outside = 0
            results.append(
                (
                    f"{synchronizer} {compressor} {crossing}",
                    always,
                    _settled(counter, always) - outside,
                    peak_memory(recorded, workload, plan, replica=replica).peak_bytes,
                    real_peak,
                )
            )
            model.synchronizer.load(None)
            model.synchronizer.forget_residuals()
            gc.collect()
    model.synchronizer.close()
    return results


def test_what_plans_allocate_is_what_the_runtime_allocates(library: Path) -> None:
    for result in run_world(_buffers_of_plans, 2, str(library)):
        wrong = [
            f"{case}: predicted {always}, real {real}"
            for case, always, real, _, _ in result
            if always != real
        ]
        assert not wrong, "\n".join(wrong)
        far = [
            f"{case}: predicted {peak}, real {real}"
            for case, _, _, peak, real in result
            if abs(peak / real - 1) > 0.05
        ]
        assert not far, "\n".join(far)
