"""What-ifs of training on a processor, where ops of the host compute."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.files import read_text
from autotune.whatif.base import Base
from autotune.whatif.changes.kernel_times import inputs_text
from autotune.whatif.primitives import scale
from autotune.whatif.question import Factor, Question
from autotune.whatif.registry import what_if

MATRIX = re.compile(r"mm$|addmm|linear|conv|lstm|rnn|matmul|attention")
"""Names of operators that multiply matrices."""
_SOURCE = (
    "about the middle of what the four examples showed without and with the change, on two loaded "
    "cores of an AMD EPYC (benchmarks.whatif_truth.cpu); single ones lay outside the range"
)
MOST_FACTOR = 1e4
BF16_MATRIX = Factor(expected=0.65, optimistic=0.35, pessimistic=0.95, source=_SOURCE)


def require_processor(base: Base) -> None:
    """Raise `InvalidInput` for a trace with work of a device."""
    if base.on_device.any():
        raise InvalidInput(
            "this what-if is of training on a processor, but the trace has work of a device; use "
            "the one without _cpu"
        )


@what_if(
    "amp_cpu",
    title="autocast to bfloat16 on a processor",
    source="Daydream, Alg. 3, with a factor measured on a processor",
    enact='with torch.autocast("cpu", torch.bfloat16): loss = ...',
)
def amp_cpu(base: Base, question: Question) -> Base:
    """Operators that multiply matrices take a share of their time.

    The share is measured on this machine (`amp_cpu=FILE.bf16.csv`, which `--measure` writes: a row
    for each operator and its inputs), or else `BF16_MATRIX`, which is a guess: a processor without
    instructions for bfloat16 is slower in it than in float32. What casts and other operators gain
    or lose is left out.
    """
    require_processor(base)
    names = np.array([bool(MATRIX.search(name)) for name in base.names.ops], dtype=np.bool_)
    chosen = names & (base.kind != Kind.UPDATE) & (base.queue != NONE)
    if not chosen.any():
        raise InvalidInput(
            "autocast speeds up matrix products and convolutions, but the trace shows none"
        )
    path = question.files.get("amp_cpu")
    if path is None:
        note = f"bfloat16 on this processor: {BF16_MATRIX.source}; measure it with --measure"
        changed = scale(base, chosen, BF16_MATRIX.at(question.reading))
        return replace(changed, notes=(*base.notes, note))
    factors = read_factors(Path(path))
    shares = np.array(
        [
            factors.get((one.name, inputs_text(one)), BF16_MATRIX.at(question.reading))
            for one in base.names.operators
        ]
    )
    seconds = base.duration_s.copy()
    known = chosen & (base.operator != NONE)
    seconds[known] *= shares[base.operator[known]]
    return replace(base, duration_s=seconds)


def read_factors(path: Path) -> dict[tuple[str, str], float]:
    """(operator, inputs) -> time in bfloat16 over that in float32. Raises `InvalidInput`."""
    reader = csv.DictReader(io.StringIO(read_text(path)))
    if reader.fieldnames != ["operator", "inputs", "factor"]:
        raise InvalidInput(
            f"{path} needs the columns operator, inputs and factor, but has "
            f"{', '.join(reader.fieldnames or []) or 'none'}; write it with --measure"
        )
    factors: dict[tuple[str, str], float] = {}
    for row in reader:
        try:
            factor = float(row["factor"])
        except (TypeError, ValueError):
            factor = math.nan
        if not 0 <= factor < MOST_FACTOR:
            raise InvalidInput(
                f"{path}, line {reader.line_num}: a factor must be 0 to {MOST_FACTOR:.0f}, but is "
                f"{row['factor']!r:.40}"
            )
        factors[row["operator"], row["inputs"]] = factor
    return factors
