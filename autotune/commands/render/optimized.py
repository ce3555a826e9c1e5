"""The result of `autotune optimize` as data, as text and as an HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from autotune.canonical import to_data
from autotune.cluster import Cluster
from autotune.commands.render.iteration import iteration_data, iteration_facts, iteration_table
from autotune.commands.render.memory import (
    ShownMemory,
    memory_data,
    memory_facts,
    memory_listings,
    memory_table,
)
from autotune.commands.render.tables import table_text
from autotune.dfg.utilisation import IterationSummary
from autotune.jobs.sources import Source
from autotune.optimizer.optimize import Optimized
from autotune.reports.timeline_page import Fact, Listing, Page
from autotune.strategy_space.describe import message_rows, whole_text
from autotune.strategy_space.mirrored import MIRRORED_LIMITS
from autotune.units import format_bytes, format_seconds

SHOWN_MESSAGES, SHOWN_NAMES = 12, 3
MESSAGE_COLUMNS = ("#", "synchronizer", "compressor", "gradient", "on the wire", "variables")
RIGHT_ALIGNED = frozenset({0, 3, 4})


@dataclass(frozen=True)
class OptimizedResult:
    """`summary` is the replayed step that the runtime enacts today, without fused ops."""

    source: Source
    cluster: Cluster
    optimized: Optimized
    memory: ShownMemory | None
    summary: IterationSummary

    @property
    def assumptions(self) -> list[str]:
        return self.source.assumptions(self.optimized.assumed)

    def data(self) -> dict[str, Any]:
        best = self.optimized
        return {
            "model": self.source.workload.model,
            "cluster": self.cluster.name,
            "workers": self.cluster.world_size,
            "before_step_s": best.before_step_s,
            "predicted_step_s": best.enacted_step_s,
            "predicted_with_op_fusion_s": best.predicted_step_s,
            "bound_s": best.bound_s,
            "starts_s": best.starts_s,
            "op_fusion": {
                "forward": sorted(best.op_fusion.forward),
                "backward": sorted(best.op_fusion.backward),
            },
            "assumed": self.assumptions,
            "cross_step_refused": self.source.cross_step_refused,
            "direct_refused": self.source.direct_refused,
            "mirrored": self.source.mirrored,
            "log": to_data(best.log),
            "rounds": best.rounds,
            "replays": best.replays,
            "partial_replays": best.partial_replays,
            "cut_short": best.cut_short,
            "seconds": best.seconds,
            "strategy_id": best.strategy.id,
            "strategy": best.strategy.to_data(),
            "plan_id": best.plan.id,
            "memory": memory_data(self.memory),
            **iteration_data(self.summary),
        }

    def text(self) -> str:
        """Lines about the search, a table of messages, the iteration and the memory."""
        best, model = self.optimized, self.source.workload
        lines = [
            f"{model.model} ({len(model.variables)} variables, {format_bytes(model.grad_bytes)} of "
            f"gradients) on {self.cluster.name}, {self.cluster.world_size} workers on "
            f"{len(self.cluster.hosts)} hosts",
            self._gain(),
        ]
        if self.assumptions:
            lines.append(f"assumed, not measured: {', '.join(self.assumptions)}")
        if self.source.cross_step_refused:
            lines.append(f"synchronization stays within the step: {self.source.cross_step_refused}")
        if self.source.mirrored:
            lines.append(MIRRORED_LIMITS)
        elif self.source.direct_refused:
            lines.append(f"no direct exchanges: {self.source.direct_refused}")
        lines.append(whole_text(best.strategy))
        search = (
            f"{best.rounds} rounds, {best.replays} replays and {best.partial_replays} of single "
            f"messages in {format_seconds(best.seconds)}\n"
        )
        if best.cut_short:
            search += "the time limit ended the search: a larger --budget-time may find more\n"
        head = "".join(f"{line}\n" for line in lines if line)
        tables = self._message_table() + iteration_table(self.summary) + memory_table(self.memory)
        return head + tables + search

    def page(self) -> Page:
        best = self.optimized
        facts = (
            Fact("DDP's default buckets", format_seconds(best.before_step_s), "predicted"),
            Fact(
                "All communication hidden",
                format_seconds(best.bound_s),
                "no lossless strategy is faster",
            ),
            *iteration_facts(self.summary),
            *memory_facts(self.memory),
        )
        starts = sorted(best.starts_s.items(), key=lambda item: item[1])
        improvements = tuple(
            (move.by, format_seconds(move.step_s), str(move.replays), format_seconds(move.seconds))
            for move in best.log
        )
        listings = (
            Listing(
                "Starts of the search",
                ("strategy", "predicted step"),
                tuple((name, format_seconds(seconds)) for name, seconds in starts),
                frozenset({1}),
                "Hand-made strategies, replayed on this cluster.",
            ),
            Listing(
                "Improvements of the search",
                ("by", "predicted step", "replays", "after"),
                improvements,
                frozenset({1, 2, 3}),
            ),
            Listing(
                "Messages in issue order",
                MESSAGE_COLUMNS,
                tuple((*cells, ", ".join(names)) for cells, names in self._messages()),
                RIGHT_ALIGNED,
            ),
            *memory_listings(self.memory),
        )
        notes = []
        if self.assumptions:
            notes.append(f"Assumed, not measured: {', '.join(self.assumptions)}.")
        if self.source.cross_step_refused:
            reason = self.source.cross_step_refused
            notes.append(f"Synchronization stays within the step: {reason}.")
        if self.source.mirrored:
            notes.append(f"Fewer plans: {MIRRORED_LIMITS}.")
        elif self.source.direct_refused:
            notes.append(f"No direct exchanges: {self.source.direct_refused}.")
        kicker = (
            f"autotune optimize · {self.source.workload.model} · {self.cluster.world_size} workers "
            f"on cluster {self.cluster.name} · predicted, nothing was run"
        )
        title = f"{self._speedup:.2f}x of DDP's default buckets"
        won = self._speedup > 1
        return Page(kicker, title, self._gain(), facts, listings, tuple(notes), won)

    @property
    def _speedup(self) -> float:
        return self.optimized.before_step_s / self.optimized.enacted_step_s

    def _gain(self) -> str:
        best = self.optimized
        text = (
            f"predicted {format_seconds(best.enacted_step_s)} per step; DDP's default buckets "
            f"{format_seconds(best.before_step_s)} ({self._speedup:.2f}x), with all communication "
            f"hidden {format_seconds(best.bound_s)}"
        )
        joined = len(best.op_fusion.forward) + len(best.op_fusion.backward)
        if joined:
            text += (
                f"; {format_seconds(best.predicted_step_s)} with {joined} ops fused into the one "
                "before, for a graph engine"
            )
        return text

    def _messages(self) -> list[tuple[tuple[str, ...], list[str]]]:
        """Cells and names of variables of every message."""
        return [
            (
                (
                    str(row.number),
                    row.synchronizer,
                    row.compressor,
                    format_bytes(row.grad_bytes),
                    format_bytes(row.wire_bytes),
                ),
                list(row.names),
            )
            for row in message_rows(self.optimized.plan)
        ]

    def _message_table(self) -> str:
        table = Table(*MESSAGE_COLUMNS, title="messages in issue order", title_justify="left")
        for column in RIGHT_ALIGNED:
            table.columns[column].justify = "right"
        messages = self._messages()
        for cells, names in messages[:SHOWN_MESSAGES]:
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            table.add_row(*cells, ", ".join(names[:SHOWN_NAMES]) + more)
        left = len(messages) - SHOWN_MESSAGES
        return table_text(table) + (f"and {left} more messages\n" if left > 0 else "")
