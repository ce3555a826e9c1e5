"""Profiles of a real training loop, and edges from the autograd graph."""

from __future__ import annotations

import time
from itertools import product

import torch
from torch import Tensor, nn
from torch_plans import Slow, Tied, loss_of, uniform
from torch_world import on_ranks, run_world

from autotune.workload import Workload
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.pytorch.autograd import by_identity, variable_edges
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.profile import WorkloadProfiler


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 4, sparse=True)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = Slow.apply(self.a(self.rows(x)), 0.03)
        return Slow.apply(self.b(x), 0.02)


class Profiling:
    """Drives the profiler from the boundaries, as a session does."""

    def __init__(self, model: PlannedDataParallel, steps: int, alone: bool = False) -> None:
        self.synchronizer, self.steps, self.alone = model.synchronizer, steps, alone
        self.profiler: WorkloadProfiler | None = None
        self.workload: Workload | None = None
        self.boundaries = 0
        model.synchronizer.listeners.append(self)

    def on_boundary(self, now_s: float, clean: bool) -> None:
        self.boundaries += self.workload is None
        if self.profiler is None:
            self.profiler = WorkloadProfiler(self.synchronizer, self.steps, alone=self.alone)
        elif self.profiler.done and self.workload is None:
            self.workload = self.profiler.finish()

    def on_backward_end(self) -> None:
        pass


def check_profile(rank: int) -> tuple[Workload, int]:
    model = PlannedDataParallel(Layers())
    profiling = Profiling(model, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.tensor([rank, step % 5])).sum().backward()
        optimizer.step()
        time.sleep(0.01)
    assert profiling.workload is not None and model.synchronizer.plan is None
    return profiling.workload, profiling.boundaries


def test_all_ranks_get_the_same_profile_with_times_edges_and_sparse_flags() -> None:
    (workload, boundaries), (other, _) = run_world(check_profile, 2)
    assert workload == other and workload.source == "measured" and workload.model == "Layers"
    names = [variable.name for variable in workload.variables]
    assert set(names[:2]) == {"b.bias", "b.weight"} and names[-1] == "rows.weight"
    assert boundaries == 1 + 1 + 3, "one to start, one warm-up step, three profiled steps"
    ready = {variable.name: variable.ready_s for variable in workload.variables}
    # Sleeps bound the times from below; above, only the scheduler does.
    assert 0.04 <= ready["b.weight"] < ready["a.weight"] and ready["a.weight"] >= 0.1
    needed = {variable.name: variable.needed_s for variable in workload.variables}
    assert 0 <= needed["rows.weight"] <= needed["a.weight"] <= needed["a.bias"], "addmm reads both"
    assert needed["a.weight"] + 0.03 <= needed["b.weight"] <= workload.forward_s
    assert workload.forward_s >= 0.05 and workload.backward_s >= 0.1 and workload.update_s >= 0.01
    assert [variable.name for variable in workload.variables if variable.sparse] == ["rows.weight"]
    edges = {frozenset((names[i], names[j])) for i, j in workload.edges}
    a, b = ("a.weight", "a.bias"), ("b.weight", "b.bias")
    assert edges == {frozenset(a), frozenset(b)} | {
        frozenset(pair) for pair in (*product(a, b), *product(a, ["rows.weight"]))
    }


def slow_edges(edges: set[tuple[str, str]], variables: set[str]) -> set[frozenset[str]]:
    """The definition: pairs joined by a path of operations without a third variable."""
    slow = set()
    for start in variables:
        stack, visited = [start], {start}
        while stack:
            for here, there in edges:
                if here == stack[-1] and there not in visited:
                    break
            else:
                stack.pop()
                continue
            visited.add(there)
            if there in variables:
                slow.add(frozenset((start, there)))
            else:
                stack.append(there)
    return slow


def test_edges_equal_their_definition_on_a_residual_network() -> None:
    a, b, c = (nn.Linear(3, 3, bias=False) for _ in range(3))
    x = torch.ones(2, 3)
    one = a(x).relu()
    two = b(one).tanh() + one
    output = c(two).sigmoid()
    parameters = [a.weight, b.weight, c.weight]
    operations = ["a>relu", "relu>b", "b>tanh", "tanh>add", "relu>add", "add>c", "c>sigmoid"]
    pairs = {(a, b) for a, b in (pair.split(">") for pair in operations)}
    expected = slow_edges(pairs, {"a", "b", "c"})
    edges = variable_edges([output], by_identity(parameters))
    assert expected == {frozenset("ab"), frozenset("bc"), frozenset("ac")}
    assert {frozenset(("abc"[i], "abc"[j])) for i, j in edges} == expected


def test_edges_of_a_tied_model_name_each_variable_once() -> None:
    model = Tied()
    names = list(dict(model.named_parameters()))
    indices = variable_edges([model(torch.arange(8))], by_identity(model.parameters()))
    edges = {frozenset((names[i], names[j])) for i, j in indices}
    for name in ("gain", "mix.weight"):
        assert frozenset((name, "embedding.weight")) in edges
    assert all(len(edge) == 2 for edge in edges)


@on_ranks(2)
def test_a_profile_skips_validation_and_holds_accumulation_as_forward_time(rank: int) -> None:
    model = PlannedDataParallel(Tied())
    profiling = Profiling(model, 2)
    for step in range(6):
        with model.no_sync():
            loss_of(model, rank, step).backward()
        loss_of(model, rank, step).backward()
        if step == 3:
            with torch.no_grad():
                loss_of(model, rank, step)  # a validation step is not counted
    assert profiling.workload is not None
    model.synchronizer.load(uniform(model.module, 2))
    loss_of(model, rank, 9).backward()
    assert len(profiling.workload.variables) == 8 and profiling.workload.forward_s > 0


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.computed = nn.Linear(4, 4), nn.Linear(4, 4), 0
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.computed += 1
        return Slow.apply(self.b(Slow.apply(self.a(x), 0.02)), 0.01)


def check_alone(rank: int) -> tuple[Workload, int]:
    model = PlannedDataParallel(Counted())
    alone = Profiling(model, 3, alone=True)
    for _ in range(6):
        model.zero_grad()
        model(torch.full((2, 4), float(rank + 1))).sum().backward()
    assert alone.workload is not None
    assert model.synchronizer.plan is None and model.synchronizer.accelerator is None
    return alone.workload, model.module.computed


def test_rank_0_profiles_alone_while_the_others_play_a_recorded_step() -> None:
    (workload, computed), (other, computed_elsewhere), (third, _) = run_world(check_alone, 3)
    assert workload == other == third and workload.source == "measured"
    # The others compute before and after the profile, and the recorded step.
    assert (computed, computed_elsewhere) == (6, 3)
    # One broadcast per dtype, which the forward pass does not contain.
    assert workload.buffers == 2 and workload.buffer_bytes == (12, 8)
    timetable = timetable_of(workload)
    assert timetable.forward_s >= 0.03 and timetable.backward_s >= 0.06
    assert {name for name, _ in timetable.ready[:2]} == {"b.weight", "b.bias"}
