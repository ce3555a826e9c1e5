"""Measure what packing, issuing and compressing cost a rank.

The result holds the constants of `autotune.lowering.costs` on the machine of the ranks. As many
processes work at once as there will be ranks here, since emulated hosts share its cores, and under
round-robin scheduling if that is permitted, as for emulated ranks.

A figure is CPU time, so it excludes waiting for a core. It is measured as in training: piece by
piece, with a pause before each, after which caches are cold and threads asleep. Back to back (no
pause) it is a tenth to a half of that: `lane_s` and `piece_s` are measured so, with emulated
accelerators `issue_s` and `settle_s`, too: messages follow each other, and what the first one costs
more is apart. It is the mean over about half a second of one process (for differences between
steps, the median of three), then the mean over the processes. A cost per byte is the slope between
two sizes.
"""

from __future__ import annotations

from statistics import median

import torch
import torch.distributed as dist

from autotune.jobs.campaign.message_costs import (
    TOGETHER,
    int8,
    line,
    low_rank,
    owned_sum,
    packing,
    rows_added,
    rows_taken,
    rows_written,
    top_k,
    top_k_sum,
    writing,
)
from autotune.jobs.campaign.step_costs import CostConditions, hooks

ROUNDS = 3
"""Repeats of differences between whole steps; the median counts, since the speed changes."""


def one_process(way: CostConditions) -> dict[str, float]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    costs: dict[str, float] = {}
    rounds = [hooks(48, way) for _ in range(ROUNDS)]
    costs |= {name: median(one[name] for one in rounds) for name in rounds[0]}
    costs["pack_s_per_byte"] = line(packing(torch.float32), way.pause_s)[1] / 4
    costs["cast_s_per_byte"] = (
        max(line(packing(kind), way.pause_s)[1] for kind in (torch.float16, torch.bfloat16)) / 4
    )
    together_s, per_element = line(writing, way.pause_s)
    costs["write_s"], costs["unpack_s_per_byte"] = together_s / TOGETHER, per_element / 4
    if "hand_out_s_per_byte" in costs:  # measured together with the packing
        behind = costs["pack_s_per_byte"] + costs["unpack_s_per_byte"]
        costs["hand_out_s_per_byte"] = max(costs["hand_out_s_per_byte"] - behind, 0.0)
    compressors = {
        "int8_encode": int8("encode"),
        "int8_decode": int8("decode"),
        "top_k_find": top_k,
        "top_k_add": top_k_sum,
    }
    for name, of_elements in compressors.items():
        costs[f"{name}_s"], costs[f"{name}_s_per_element"] = line(of_elements, way.pause_s)
    costs["sum_s_per_byte"] = line(owned_sum, way.pause_s)[1] / 4
    rows = {"rows_take": rows_taken, "rows_add": rows_added, "rows_write": rows_written}
    for name, of_elements in rows.items():
        costs[f"{name}_s"], per_element = line(of_elements, way.pause_s)
        costs[f"{name}_s_per_byte"] = per_element / 4
    per_call_s, per_element = line(low_rank, way.pause_s)
    costs["low_rank_s"], costs["low_rank_s_per_flop"] = per_call_s / 3, per_element / 3
    dist.destroy_process_group()
    return costs
