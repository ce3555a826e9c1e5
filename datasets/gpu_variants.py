"""The variants of training that `collect_gpu.py` times, and which of them a folder lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Variant:
    """How a model is trained.

    `optimizer`: how torch updates the parameters (a kernel for many, one for each, or one for all).
    `precision`: `fp32` (no TF32), `tf32`, or the dtype of autocast. `parts`: micro-batches of an
    update, which together are the same batch.
    """

    name: str
    precision: str = "fp32"
    optimizer: str = "foreach"
    channels_last: bool = False
    recompute: bool = False
    parts: int = 1
    batch_factor: float = 1.0
    compiled: bool = False

    def fits(self, traits: ModelTraits) -> bool:
        """Whether a model can be trained so."""
        return not (self.channels_last and not traits.images) and not (
            self.recompute and not traits.recomputes
        )


@dataclass(frozen=True)
class ModelTraits:
    """`images`: whether the inputs are images; `recomputes`: whether it offers recomputation."""

    images: bool
    recomputes: bool


PLAIN = Variant("fp32")
BF16 = Variant("amp_bf16", "bf16")
TRACED = (
    PLAIN,
    BF16,
    Variant("tf32", "tf32"),
    Variant("amp_bf16_channels_last", "bf16", channels_last=True),
)
VARIANTS = (
    *TRACED,
    Variant("amp_fp16", "fp16"),
    Variant("amp_bf16_optimizer_fused", "bf16", optimizer="fused"),
    Variant("optimizer_for_each", optimizer="for_each"),
    Variant("optimizer_fused", optimizer="fused"),
    Variant("recompute", recompute=True),
    Variant("accumulate_2", parts=2),
    Variant("half_batch", batch_factor=0.5),
    Variant("double_batch", batch_factor=2.0),
    Variant("compiled", compiled=True),
    Variant("amp_bf16_compiled", "bf16", compiled=True),
)


@dataclass(frozen=True)
class Work:
    """What to measure of a model: its variants' times, its recordings, and that of a pair."""

    model: str
    timed: tuple[Variant, ...]
    recorded: tuple[Variant, ...]
    pair: bool

    @property
    def nothing(self) -> bool:
        return not (self.timed or self.recorded or self.pair)


def recording_folder(out: Path, model: str, variant: Variant) -> Path:
    return out / f"{model}.{variant.name}"


def pair_folder(out: Path, model: str) -> Path:
    return out / f"{model}.two_ranks"


def missing_work(
    out: Path,
    models: Mapping[str, ModelTraits],
    rows: Sequence[Mapping[str, Any]],
    versions: Mapping[str, str],
    *,
    pairs: bool,
    again: bool = False,
) -> list[Work]:
    """What the folder lacks of `models`, in order.

    `rows`: those of its `times.json`. All times and recordings of a model must be of the same
    `versions` (of torch): a model that lacks variants and has rows of other versions is measured
    again as a whole. `again`: as if the folder were empty.
    """
    works = []
    for model, traits in models.items():
        known = [] if again else [row for row in rows if row["model"] == model]
        same = [row for row in known if all(row.get(key) == versions[key] for key in versions)]
        fitting = [variant for variant in VARIANTS if variant.fits(traits)]
        done = [row["variant"] for row in same]
        timed = [variant for variant in fitting if asdict(variant) not in done]
        other_versions = bool(timed) and len(same) < len(known)
        whole = again or other_versions
        works.append(
            Work(
                model,
                timed=tuple(fitting if whole else timed),
                recorded=tuple(
                    variant
                    for variant in TRACED
                    if variant.fits(traits)
                    and (whole or not _recorded(recording_folder(out, model, variant)))
                ),
                pair=pairs and (whole or not _recorded(pair_folder(out, model))),
            )
        )
    return [work for work in works if not work.nothing]


def _recorded(folder: Path) -> bool:
    return (folder / "job.json").exists()
