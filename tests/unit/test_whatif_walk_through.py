"""The what-if of the documentation's walk-through is loaded from a file and predicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from layered_training import Work, layered

from autotune.errors import InvalidInput
from autotune.whatif.answers.predict import predict
from autotune.whatif.answers.user_file import load_what_ifs
from autotune.whatif.question import Question
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.registry import WHAT_IFS, combined

PAGE = Path(__file__).parents[2] / "docs/what-if.md"


def test_the_walk_through_removes_the_cost_of_reading_the_loss(tmp_path: Path) -> None:
    """Kernels of 80 us and 40 us of host work: they overlap unless each step reads the loss."""
    (code,) = re.findall(
        r"```python skip=\"tests/unit/test_whatif.*?\n(.*?)```", PAGE.read_text(), re.S
    )
    path = tmp_path / "my_what_ifs.py"
    path.write_text(code)
    works = [Work("aten::mm", "gemm", 20.0)] * 4
    base = recorded_base(layered(works, reads=True), 0)
    with WHAT_IFS.separate():
        assert load_what_ifs(path) == ("no_loss_reading",)
        found = predict(base, combined("no_loss_reading"), Question())
        with pytest.raises(InvalidInput, match="copies nothing to the host"):
            predict(recorded_base(layered(works), 0), combined("no_loss_reading"), Question())
    assert found.before_s * 1e6 > 90
    assert found.after_s * 1e6 == pytest.approx(80, rel=1e-3)
