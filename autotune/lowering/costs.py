"""Costs of the runtime itself on a rank, which no fit of a collective contains, with their sources.

Seconds are CPU time of one thread, as the runtime spends it: in small pieces, with cold caches. If
ranks share cores, the lowering makes them wait for each other. The source of a value states where
it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite

from autotune.costs.sync_cost import KERNEL_LATENCY_S
from autotune.errors import InvalidInput
from autotune.records import Accelerators

_MEASURED = (
    "measured by `python -m benchmarks.runtime_costs --emulated{}, "
    "on the machine that docs/prediction.md names"
)
_HERE, _FOUR_HERE = (_MEASURED.format(how) for how in ("`, one process", " --ranks 4`"))

ASSUMED = "assumed"
"""How the source of a value begins that nobody has measured on the device in question."""


@dataclass(frozen=True)
class Constant:
    """A cost with the source of its value. Raises `InvalidInput` without either."""

    value: float
    source: str

    @property
    def is_assumed(self) -> bool:
        return self.source.startswith(ASSUMED)

    def __post_init__(self) -> None:
        if not (isfinite(self.value) and self.value >= 0):
            raise InvalidInput(
                "a constant of the runtime must be finite and at least 0, "
                f"but is {self.value} ({self.source})"
            )
        if not self.source:
            raise InvalidInput(
                f"a constant of the runtime needs a source, but {self.value} has none"
            )


@dataclass(frozen=True)
class RuntimeCosts:
    """Costs of the runtime. Stored measurements use these names.

    | name | cost | unit |
    |---|---|---|
    | `wake_s` | emulated accelerators: wake up for gradients or reads that are due together | s |
    | `real_update` | emulated accelerators: the host's update per update of the accelerator | - |
    | `early_update` | share of an update across the step that passes before the forward pass | - |
    | `fill_s` | the hook of one gradient, and packing it except its bytes | s |
    | `bucket_s` | the same and writing back, if torch's own reducer executes the plan | s |
    | `hand_out_s_per_byte` | emulated accelerators: copy the recorded gradient | s/B |
    | `pack_s_per_byte` | scale a gradient into its message, per byte of the gradient | s/B |
    | `cast_s_per_byte` | the same with rounding to 16 bits | s/B |
    | `issue_s` | start a message, except the collective itself | s |
    | `issue_first_s` | emulated accelerators: more for the first message after a wake-up | s |
    | `lane_s` | pass a message to the thread of its next step, behind another message | s |
    | `lane_first_s` | how much more that takes if the thread sleeps | s |
    | `piece_s` | pass a piece of a direct exchange to the thread, with others under way | s |
    | `defer_s` | leave one variable to the next forward pass | s |
    | `settle_s` | flush one message when a variable of it is read, with its update | s |
    | `settle_first_s` | emulated accelerators: more for the first one after a wake-up | s |
    | `settle_each_s` | average and update one variable there, except its bytes | s |
    | `settle_s_per_byte` | the same per byte of the gradient | s/B |
    | `buffer_s` | a buffer of the module that is broadcast before a forward pass | s |
    | `write_s` | write back one average with all others, except its bytes | s |
    | `unpack_s_per_byte` | the same per byte of the gradient | s/B |
    | `int8_encode_s`, `int8_encode_s_per_element` | int8: round a message of up to four rows | s |
    | `int8_decode_s`, `int8_decode_s_per_element` | int8: read a message of up to four rows | s |
    | `top_k_find_s`, `top_k_find_s_per_element` | top-k: find the largest elements | s |
    | `top_k_add_s`, `top_k_add_s_per_element` | top-k: add a payload, per element sent | s |
    | `rows_take_s`, `rows_take_s_per_byte` | sort, scale and pack a rank's sparse rows | s |
    | `rows_add_s`, `rows_add_s_per_byte` | add the rows of all ranks; per byte of all | s |
    | `rows_write_s`, `rows_write_s_per_byte` | write a sum of rows as the gradient | s |
    | `low_rank_s`, `low_rank_s_per_flop` | PowerSGD: per slice and product; per operation | s |
    | `collective_s` | start a collective that was not probed | s |
    | `message_s` | a message between two ranks of a direct exchange that was not probed | s |
    | `sum_s_per_byte` | direct exchange: an owner adds the part of one rank, per byte | s/B |
    | `threads` | collectives that one process group runs at the same time | - |
    | `star_threads` | the same of gathers and scatters, in which one rank sums | - |
    | `star_turns` | 1: transfers of stars in both directions between two hosts take turns | - |
    | `star_order` | 1: each connection of stars carries one tensor after the other | - |
    | `queued` | 1: the device queues the steps (NCCL); lanes have neither threads nor limits | - |
    | `payload` | share of a link's bytes that belong to messages | - |
    | `contention` | share by which a message is longer that computation accompanies | - |

    The costs of emulated accelerators are 0 for real ones.
    """

    wake_s: Constant = Constant(0.0, "accelerators are not emulated")
    real_update: Constant = Constant(
        0.0, "runtime_rewriter.pytorch.emulation: optimizers find no gradients"
    )
    early_update: Constant = Constant(
        0.0, "runtime_rewriter.pytorch.cross_step: a variable is updated when it is flushed"
    )
    fill_s: Constant = Constant(2.8e-05, _HERE)
    bucket_s: Constant = Constant(1.3e-05, _HERE)
    hand_out_s_per_byte: Constant = Constant(0.0, "accelerators are not emulated")
    pack_s_per_byte: Constant = Constant(1.2e-10, _HERE)
    cast_s_per_byte: Constant = Constant(2.3e-10, _HERE)
    issue_s: Constant = Constant(0.00019, _HERE)
    issue_first_s: Constant = Constant(0.0, "`issue_s` contains it unless both were measured")
    lane_s: Constant = Constant(5e-05, _HERE)
    lane_first_s: Constant = Constant(0.00014, _HERE)
    piece_s: Constant = Constant(1.9e-05, _HERE)
    defer_s: Constant = Constant(1e-05, _HERE)
    settle_s: Constant = Constant(0.00059, _HERE)
    settle_first_s: Constant = Constant(0.0, "`settle_s` contains it unless both were measured")
    settle_each_s: Constant = Constant(1.1e-05, _HERE)
    settle_s_per_byte: Constant = Constant(2.1e-10, _HERE)
    buffer_s: Constant = Constant(2.2e-05, _HERE)
    write_s: Constant = Constant(2.8e-06, _HERE)
    unpack_s_per_byte: Constant = Constant(1.6e-10, _HERE)
    int8_encode_s: Constant = Constant(0.00094, _HERE)
    int8_encode_s_per_element: Constant = Constant(1.4e-09, _HERE)
    int8_decode_s: Constant = Constant(0.00031, _HERE)
    int8_decode_s_per_element: Constant = Constant(6.9e-10, _HERE)
    top_k_find_s: Constant = Constant(0.00073, _HERE)
    top_k_find_s_per_element: Constant = Constant(3e-09, _HERE)
    top_k_add_s: Constant = Constant(6.3e-06, _HERE)
    top_k_add_s_per_element: Constant = Constant(2.1e-08, _HERE)
    rows_take_s: Constant = Constant(9.2e-05, _HERE)
    rows_take_s_per_byte: Constant = Constant(1.4e-09, _HERE)
    rows_add_s: Constant = Constant(0.00025, _HERE)
    rows_add_s_per_byte: Constant = Constant(8.9e-10, _HERE)
    rows_write_s: Constant = Constant(8.7e-05, _HERE)
    rows_write_s_per_byte: Constant = Constant(1.6e-10, _HERE)
    low_rank_s: Constant = Constant(0.00017, _HERE)
    low_rank_s_per_flop: Constant = Constant(5e-10, _HERE)
    collective_s: Constant = Constant(
        KERNEL_LATENCY_S, "autotune.costs.sync_cost: an in-place all-reduce, torch 2.13, gloo, CPU"
    )
    message_s: Constant = Constant(5e-05, f"{ASSUMED}: a send and a receive of gloo from Python")
    sum_s_per_byte: Constant = Constant(7.4e-11, _HERE)
    threads: Constant = Constant(
        2,
        "torch: options of ProcessGroupGloo, `threads = 2`, "
        "in torch/csrc/distributed/c10d/ProcessGroupGloo.hpp",
    )
    star_threads: Constant = Constant(2, "as `threads`")
    star_turns: Constant = Constant(
        1, "gloo: a receiver requests a tensor on the connection that carries tensors the other way"
    )
    star_order: Constant = Constant(
        0, "gloo: every thread has connections of its own, which share a link evenly"
    )
    queued: Constant = Constant(0, "gloo: threads start the steps of messages")
    payload: Constant = Constant(
        1448 / 1538,
        "Ethernet of MTU 1500: of 1538 bytes with preamble and gap, "
        "a TCP segment with timestamps carries 1448",
    )
    contention: Constant = Constant(0.0, "on a CPU, messages and computation share its cores")

    def __post_init__(self) -> None:
        threads = min(self.threads.value, self.star_threads.value)
        if not 0 < self.payload.value <= 1 or threads < 1:
            raise InvalidInput(
                "payload must lie in (0, 1] and threads be at least 1, "
                f"but they are {self.payload.value} and {threads}"
            )

    def __getitem__(self, name: str) -> float:
        constant: Constant = getattr(self, name)
        return constant.value

    @property
    def sources(self) -> dict[str, str]:
        """Name of every constant -> source of its value."""
        return {field.name: getattr(self, field.name).source for field in fields(self)}


EMULATED_COSTS = replace(
    RuntimeCosts(),
    wake_s=Constant(0.00037, _HERE),
    hand_out_s_per_byte=Constant(1.6e-10, _HERE),
    piece_s=Constant(1.2e-05, _FOUR_HERE),
    issue_s=Constant(1.6e-05, _FOUR_HERE),
    issue_first_s=Constant(0.00011, _FOUR_HERE),
    settle_s=Constant(7e-06, _FOUR_HERE),
    settle_first_s=Constant(0.00032, _FOUR_HERE),
)
"""Costs of a rank with an emulated accelerator."""

_IN_RECORDING = "the recording contains it: in the passes, or between a message's start and its end"
_IN_GRAPH = "`runtime_rewriter.tensorflow.synchronization`: "
TENSORFLOW_COSTS = replace(
    RuntimeCosts(),
    **{
        name: Constant(0.0, _IN_RECORDING)
        for name in (
            "fill_s",
            "issue_s",
            "lane_s",
            "lane_first_s",
            "piece_s",
            "write_s",
            "rows_take_s",
            "rows_add_s",
            "rows_write_s",
            "pack_s_per_byte",
            "unpack_s_per_byte",
        )
    },
    star_threads=Constant(2**20, _IN_GRAPH + "nothing bounds pushes and pulls"),
    star_turns=Constant(0, _IN_GRAPH + "each transfer is a call of gRPC of its own"),
    star_order=Constant(1, "measured by `python -m benchmarks.transfer_order`"),
)
"""Costs of a rank of a rewritten graph, whose messages are ops of TensorFlow."""


def costs_of_job(accelerators: Accelerators, software: Mapping[str, str]) -> RuntimeCosts | None:
    """The costs of a job's runtime; None: those of its device (`device_costs.costs_of`).

    `software`: the versions of what the script uses, by name.
    """
    if "tensorflow" in software:
        return TENSORFLOW_COSTS
    return EMULATED_COSTS if accelerators is Accelerators.EMULATED else None
