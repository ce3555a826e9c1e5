"""Op fusion by Theorem 1, and fusion of the ops' tensors by Theorem 3."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autotune.optimizer.edits import can_merge, joined, merged
from autotune.optimizer.state import CriticalPath, State
from autotune.optimizer.theorems import both_fusions_pay, op_fusion_pays
from autotune.profiling.op_graph import OpFusion, OpGraph

Run = tuple[int, int]


class FuseOps:
    """Alg. 1, lines 5 to 10: fuse critical ops with the op before if Theorem 1 recommends it.

    Ops are fused only along an edge of the graph, and only if that saves time: Theorem 1 alone
    would also fuse ops without any effect. Fusion in the forward pass delays no gradient, so it is
    proposed for all neighbors that it helps. The replay decides whether variables that are then
    needed earlier spoil it across steps.
    """

    name = "op fusion"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        graph = path.problem.graph
        if graph is None:
            return
        forward = state.fusion.forward | _saving(graph, state.fusion.forward, path)
        if forward != state.fusion.forward:
            yield state.with_fusion(replace(state.fusion, forward=forward))
        sweep, tensors = self._sweep(graph, state, path)
        for size in dict.fromkeys((len(sweep), (len(sweep) + 1) // 2)):
            if size == 0:
                continue
            fusion = OpFusion(forward, state.fusion.backward | frozenset(sweep[:size]))
            yield state.with_fusion(fusion)
            pairs = [pair for at, pair in tensors if at < size]
            if pairs:
                yield replace(state, fusion=fusion, strategy=merged(state, path.problem, pairs))

    @staticmethod
    def _sweep(
        graph: OpGraph, state: State, path: CriticalPath
    ) -> tuple[list[int], list[tuple[int, tuple[int, int]]]]:
        """(ops to fuse with the next one, [(number of earlier fusions, messages to fuse)])."""
        problem, critical = path.problem, set(path.ops)
        ends_at = messages_of_ops(graph, path)
        runs = OpFusion.runs(state.fusion.backward, len(graph.ops))[::-1]  # in backward order
        fused: list[int] = []
        tensors: list[tuple[int, tuple[int, int]]] = []
        held = runs[0]
        p1_s = problem.fused_s(graph.ops[held[0] : held[1]][::-1], True)
        for run in runs[1:]:
            both = (run[0], held[1])
            p2_s, fused_s = (problem.fused_s(graph.ops[a:b][::-1], True) for a, b in (run, both))
            waiting = [n for op in range(*held) for n in ends_at.get(op, ())]
            t1_s = path.sync_s([path.plan.messages[n] for n in waiting]) if waiting else 0.0
            pays = fused_s < p1_s + p2_s and op_fusion_pays(p1_s, p2_s, fused_s, t1_s)
            if not (pays and run[0] in critical and run[1] - 1 in graph.predecessors[run[1]]):
                held, p1_s = run, p2_s
                continue
            fused.append(run[1] - 1)
            others = [n for op in range(*run) for n in ends_at.get(op, ())]
            if (
                waiting
                and others
                and can_merge(path.plan.messages[waiting[-1]], path.plan.messages[others[0]])
            ):
                one, two = (path.plan.messages[n] for n in (waiting[-1], others[0]))
                times = (path.sync_s([one]), path.sync_s([two]), path.sync_s([joined([one, two])]))
                if both_fusions_pay(p1_s, p2_s, fused_s, *times):
                    tensors.append((len(fused) - 1, (waiting[-1], others[0])))
            held, p1_s = both, fused_s
        return fused, tensors


class ChooseOpFusion:
    """Fuse the ops of another of the measured choices of sets, or none, and keep the messages.

    The passes for messages follow, so op fusion and tensor fusion are searched together (DisCo,
    sec. 4.5).
    """

    name = "op fusion of the graph"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        present = state.strategy.op_fusion
        choices = path.problem.space.op_fusions
        for sets in ((), *choices) if choices else ():
            if sets != present:
                yield state.with_strategy(replace(state.strategy, op_fusion=sets))


def messages_of_ops(graph: OpGraph, path: CriticalPath) -> dict[int, list[int]]:
    """Number of an op -> the messages whose last gradient it computes."""
    by_op: dict[int, list[int]] = {}
    for number, message in enumerate(path.plan.messages):
        op = min(graph.op_of_variable[part.variable] for part in message.slices)
        by_op.setdefault(op, []).append(number)
    return by_op


def _saving(graph: OpGraph, fused: frozenset[int], path: CriticalPath) -> frozenset[int]:
    """Ops of the forward pass to fuse with the next one, greedily from the first."""
    saving = []
    fused_s = path.problem.fused_s
    runs = OpFusion.runs(fused, len(graph.ops))
    held = runs[0]
    for run in runs[1:]:
        apart_s = sum(fused_s(graph.ops[a:b], False) for a, b in (held, run))
        both = (held[0], run[1])
        joined_s = fused_s(graph.ops[both[0] : both[1]], False)
        if run[0] - 1 in graph.predecessors[run[0]] and joined_s < apart_s:
            saving.append(run[0] - 1)
            held = both
        else:
            held = run
    return frozenset(saving)
