"""What the runtime itself costs a rank, beside what the probe fits of the network: each constant with its source.

Seconds are CPU time of one thread, as the runtime spends it: in small pieces, with cold caches. Where ranks share cores, the lowering
lets them wait for each other. A value that was measured elsewhere than on the user's machine says so in its source.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import isfinite

from autotune.errors import InvalidInput

_HERE = "measured by `python -m benchmarks.runtime_costs --emulated`, one process, on the machine that docs/prediction.md names"


@dataclass(frozen=True)
class Constant:
    value: float
    source: str

    def __post_init__(self) -> None:
        if not (isfinite(self.value) and self.value >= 0):
            raise InvalidInput(
                f"a constant of the runtime must be finite and at least 0, but is {self.value} ({self.source})"
            )
        if not self.source:
            raise InvalidInput(
                f"a constant of the runtime needs a source, but {self.value} has none"
            )


@dataclass(frozen=True)
class RuntimeCosts:
    """Costs that no fit of a collective contains.

    | name | what | unit |
    |---|---|---|
    | `wake_s` | emulated accelerators: waking up for gradients, or reads, that are due together; 0 where they are real | s |
    | `real_update` | of emulated accelerators' update time, how much the host takes for one of its own | - |
    | `fill_s` | the hook of one gradient, and packing it but for its bytes | s |
    | `bucket_s` | the same and writing back, in a plan of mere buckets, which torch's own reducer carries out | s |
    | `hand_out_s_per_byte` | emulated accelerators: a fresh copy of the recorded gradient; 0 where they are real | s/B |
    | `pack_s_per_byte` | scaling a gradient into its message, per byte of the gradient | s/B |
    | `cast_s_per_byte` | the same where it is rounded to 16 bits | s/B |
    | `issue_s` | starting a message, but for the collective itself, which its fit contains | s |
    | `lane_s` | handing a message on to the thread of its next step | s |
    | `defer_s` | leaving one variable to the next forward pass | s |
    | `settle_s` | taking in one message where a variable of it is read, and an update of its own | s |
    | `settle_each_s` | one variable's average and update there, but for its bytes | s |
    | `settle_s_per_byte` | the same per byte of the gradient | s/B |
    | `buffer_s` | a buffer of the module that travels with the others before a forward pass | s |
    | `write_s` | writing one average back, all together, but for its bytes | s |
    | `unpack_s_per_byte` | the same per byte of the gradient | s/B |
    | `int8_encode_s`, `int8_encode_s_per_element` | int8: rounding a message | s |
    | `int8_decode_s`, `int8_decode_s_per_element` | int8: reading one back | s |
    | `top_k_find_s`, `top_k_find_s_per_element` | top-k: finding the largest of a message | s |
    | `top_k_add_s`, `top_k_add_s_per_element` | top-k: adding those of one rank, per element of these | s |
    | `rows_take_s_per_byte` | sorting, scaling and packing the rows of a sparse gradient, per byte of a rank's own | s/B |
    | `rows_add_s_per_byte` | adding the rows of several ranks where they meet, per byte of all of them | s/B |
    | `rows_write_s_per_byte` | their sum as the gradient, per byte of it | s/B |
    | `low_rank_s`, `low_rank_s_per_flop` | PowerSGD: per slice and product; per multiplication and addition | s |
    | `threads` | collectives that one process group runs side by side | - |
    | `payload` | share of a link's bytes that are a message's own | - |
    """

    wake_s: Constant = Constant(0.0, "accelerators are not emulated")
    real_update: Constant = Constant(
        0.0, "runtime_rewriter.pytorch.emulation: optimizers find no gradients"
    )
    fill_s: Constant = Constant(2.8e-05, _HERE)
    bucket_s: Constant = Constant(1.3e-05, _HERE)
    hand_out_s_per_byte: Constant = Constant(0.0, "accelerators are not emulated")
    pack_s_per_byte: Constant = Constant(1.2e-10, _HERE)
    cast_s_per_byte: Constant = Constant(2.3e-10, _HERE)
    issue_s: Constant = Constant(0.00019, _HERE)
    lane_s: Constant = Constant(0.00015, _HERE)
    defer_s: Constant = Constant(1e-05, _HERE)
    settle_s: Constant = Constant(0.00059, _HERE)
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
    rows_take_s_per_byte: Constant = Constant(1.4e-09, _HERE)
    rows_add_s_per_byte: Constant = Constant(8.9e-10, _HERE)
    rows_write_s_per_byte: Constant = Constant(1.6e-10, _HERE)
    low_rank_s: Constant = Constant(0.00017, _HERE)
    low_rank_s_per_flop: Constant = Constant(5e-10, _HERE)
    threads: Constant = Constant(
        2,
        "torch: options of ProcessGroupGloo, `threads = 2`, in torch/csrc/distributed/c10d/ProcessGroupGloo.hpp",
    )
    payload: Constant = Constant(
        1448 / 1538,
        "Ethernet of MTU 1500: of 1538 bytes with preamble and gap a TCP segment with timestamps carries 1448",
    )

    def __post_init__(self) -> None:
        if not 0 < self.payload.value <= 1 or self.threads.value < 1:
            raise InvalidInput(
                f"payload must lie in (0, 1] and threads be at least 1, but they are {self.payload.value} and {self.threads.value}"
            )

    def __getitem__(self, name: str) -> float:
        constant: Constant = getattr(self, name)
        return constant.value

    @property
    def sources(self) -> dict[str, str]:
        """Name of every constant -> where its value is from."""
        return {field.name: getattr(self, field.name).source for field in fields(self)}


EMULATED_COSTS = replace(
    RuntimeCosts(), wake_s=Constant(0.00037, _HERE), hand_out_s_per_byte=Constant(1.6e-10, _HERE)
)
"""Of a rank whose accelerator is emulated."""
