"""`datasets/collect_gpu.py` measures what a folder lacks, and nothing twice."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

DATASETS = Path(__file__).parents[2] / "datasets"
NOW = {"torch": "2.13.0"}


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DATASETS))


def rows(model: str, names: list[str], torch: str = NOW["torch"]) -> list[dict[str, Any]]:
    from gpu_variants import VARIANTS

    return [
        {"model": model, "variant": asdict(variant), "torch": torch}
        for variant in VARIANTS
        if variant.name in names
    ]


def test_an_empty_folder_lacks_every_variant_that_fits(tmp_path: Path) -> None:
    from gpu_variants import ModelTraits, missing_work

    models = {"images": ModelTraits(True, False), "text": ModelTraits(False, True)}
    images, text = missing_work(tmp_path, models, [], NOW, pairs=True)
    image_names, text_names = ({one.name for one in work.timed} for work in (images, text))
    assert image_names - text_names == {"amp_bf16_channels_last"}
    assert text_names - image_names == {"recompute"}
    assert {"double_batch", "compiled", "amp_bf16_optimizer_fused"} <= image_names & text_names
    assert [one.name for one in text.recorded] == ["fp32", "amp_bf16", "tf32"]
    assert images.pair


def test_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    from gpu_variants import VARIANTS, ModelTraits, missing_work

    models = {"text": ModelTraits(False, False)}
    names = [variant.name for variant in VARIANTS]
    for name in ("fp32", "amp_bf16", "tf32"):
        (tmp_path / f"text.{name}").mkdir()
        (tmp_path / f"text.{name}" / "job.json").write_text("{}")
    there = rows("text", [name for name in names if name != "double_batch"])
    (work,) = missing_work(tmp_path, models, there, NOW, pairs=False)
    assert [one.name for one in work.timed] == ["double_batch"]
    assert not work.recorded and not work.pair
    assert missing_work(tmp_path, models, rows("text", names), NOW, pairs=False) == []
    (again,) = missing_work(tmp_path, models, rows("text", names), NOW, pairs=False, again=True)
    assert len(again.timed) == len(names) - 2 and len(again.recorded) == 3


def test_times_of_another_version_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    from gpu_variants import VARIANTS, ModelTraits, missing_work

    models = {"text": ModelTraits(False, True)}
    (tmp_path / "text.fp32").mkdir()
    (tmp_path / "text.fp32" / "job.json").write_text("{}")
    (work,) = missing_work(tmp_path, models, rows("text", ["fp32"], "2.11.0"), NOW, pairs=False)
    assert len(work.timed) == len(VARIANTS) - 1
    assert [one.name for one in work.recorded] == ["fp32", "amp_bf16", "tf32"]


def test_the_shipped_folder_lacks_the_newer_variants_and_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import collect_gpu
    from gpu_models import MODELS

    folder = DATASETS / "gpu_traces" / "h100"
    torch = json.loads((folder / "times.json").read_text())[0]["torch"]
    assert collect_gpu.main(["--out", str(folder), "--list"], {"torch": torch}) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().err.splitlines())
    assert set(lines) == set(MODELS)
    assert lines["resnet50"].startswith("times of amp_bf16_optimizer_fused, double_batch, compiled")
    assert lines["lstm"].startswith("times of fp32")
    assert "recompute" not in lines["lstm"] and "recompute" in lines["bert_large"]
