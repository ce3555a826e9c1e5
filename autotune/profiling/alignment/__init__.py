"""One clock for all ranks of a traced job (dPRO, sec. 4.2)."""

from autotune.profiling.alignment.align import align
from autotune.profiling.alignment.result import Alignment

__all__ = ["Alignment", "align"]
