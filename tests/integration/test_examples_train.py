"""The example scripts run as users run them, and they learn."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch_scripts import run_ranks, run_script

ROOT = Path(__file__).parents[2]
SMALL_RATINGS = ("--users", "600", "--items", "400", "--ratings-per-user", "30")
"""Generating the default number of ratings takes longer than a few steps on them."""
STEP_LINE = re.compile(r"^step (\d+)/\d+ loss (\S+)$", re.MULTILINE)


def run(script: str, *arguments: str, ranks: int = 0) -> str:
    """Standard output of an example that must end well."""
    done = run_ranks([str(ROOT / "examples" / script), *arguments], ranks)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_under_torchrun(script: str, *arguments: str) -> str:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    }
    environment = {**inherited, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = run_script(
        [*launcher, f"examples/{script}", *arguments], cwd=ROOT, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for _, loss in STEP_LINE.findall(output)]


@pytest.mark.parametrize(
    ("script", "steps", "factor"),
    [
        pytest.param("resnet_digits.py", 20, 0.8, marks=pytest.mark.slow),
        pytest.param("gpt_text.py", 14, 0.95, marks=pytest.mark.slow),
        ("ncf_ratings.py", 40, 0.9),
        pytest.param("lstm_text.py", 24, 0.9, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_lower_the_loss(script: str, steps: int, factor: float) -> None:
    words = [script, "--batch-size", "8", "--max-steps", str(steps), "--log-every", "1"]
    words += SMALL_RATINGS if script == "ncf_ratings.py" else ()
    output = run_under_torchrun(*words) if script == "resnet_digits.py" else run(*words, ranks=2)
    assert "2 rank(s)" in output
    printed_losses = losses(output)
    assert len(printed_losses) == steps  # rank 0 alone prints, once a step
    assert sum(printed_losses[-4:]) < factor * sum(printed_losses[:4])


@pytest.mark.parametrize(
    ("script", "measure"),
    [
        ("resnet_digits.py", "val_accuracy"),
        ("gpt_text.py", "val_perplexity"),
        ("ncf_ratings.py", "hit_rate_10"),
        ("lstm_text.py", "val_perplexity"),
    ],
)
def test_one_process_trains_without_torchrun_and_saves_its_weights(
    script: str, measure: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "weights.pt"
    output = run(
        script,
        *(SMALL_RATINGS if script == "ncf_ratings.py" else ()),
        "--width",
        "16",
        "--max-steps",
        "2",
        "--log-every",
        "1",
        "--checkpoint",
        str(checkpoint),
    )
    assert "1 rank(s)" in output
    assert len(losses(output)) == 2
    assert f"{measure} " in output
    weights = torch.load(checkpoint, weights_only=True)
    assert not any(name.startswith("module.") for name in weights)


def test_collaborative_filtering_learns_tastes_and_not_only_what_is_popular() -> None:
    words = ("--width", "16", "--lr", "0.01", "--epochs", "4", "--log-every", "1000")
    output = run("ncf_ratings.py", *SMALL_RATINGS, *words)
    untrained, popular = (
        float(rate)
        for rate in re.findall(r"hit_rate_10 untrained (\S+), by popularity (\S+)", output)[0]
    )
    trained = [
        float(rate) for rate in re.findall(r"^epoch .* hit_rate_10 (\S+)", output, re.MULTILINE)
    ]
    assert untrained < 0.2, "ten of a hundred candidates"
    assert max(trained) > popular + 0.05 > untrained + 0.1


def test_accumulated_batches_make_the_step_of_one_large_batch() -> None:
    size = [
        "--width",
        "16",
        "--block-size",
        "16",
        "--dropout",
        "0",
        "--max-steps",
        "4",
        "--log-every",
        "1",
    ]
    halves = run("lstm_text.py", *size, "--batch-size", "4", "--accumulate", "2", ranks=2)
    whole = run("lstm_text.py", *size, "--batch-size", "8", "--accumulate", "1", ranks=2)
    assert losses(halves) == pytest.approx(losses(whole), abs=2e-4)


def test_a_short_text_is_refused_with_the_rule_and_the_values(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a few words only " * 40, encoding="utf-8")
    done = run_ranks([str(ROOT / "examples" / "gpt_text.py"), "--text", str(text)])
    assert done.returncode == 1
    assert "--batch-size 8 sequences, but has 5 epochs and" in done.stderr


def test_the_shipped_text_is_plain_english_with_its_card() -> None:
    folder = ROOT / "examples" / "data"
    assert (
        (folder / "rust_book.txt").read_text(encoding="ascii").startswith("This text is taken from")
    )
    assert "Apache" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="the extra tensorflow is missing")
def test_a_tensorflow_program_runs_alone_and_learns() -> None:
    words = ("--users", "200", "--items", "200", "--ratings-per-user", "12", "--lr", "1.0")
    output = run("tensorflow_ncf_ratings.py", *words, "--batch-size", "64", "--max-steps", "100")
    assert len(losses(output)) == 10
    rates = [float(rate) for rate in re.findall(r"hit_rate_10 (\S+)", output)]
    assert rates[-1] > 0.2, "twice the rate of chance"
