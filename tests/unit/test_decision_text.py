"""The final output of `autotune tune`: the decision, once, with what was emulated."""

from __future__ import annotations

from pathlib import Path

from autotune.cluster import Cluster
from autotune.jobs.results import Results, decision_text
from autotune.records import CURRENT_SETUP, Conditions, Decision, Network
from autotune.tuning.job import JobSpec

SPEC = JobSpec(("python", "x.py"), 2, Cluster.local(2), conditions=Conditions(Network.EMULATED))
RESULTS = Results(Path("best.json"), Path("report.html"))


def first_line(decision: Decision) -> str:
    return decision_text(decision, RESULTS, "sqlite:///x", 0, SPEC).splitlines()[0]


def test_only_an_exported_strategy_is_to_be_used() -> None:
    exported = Decision("strategy-1", "faster", None, "strategy-1")
    text = decision_text(exported, RESULTS, "sqlite:///x", 0, SPEC, "8 messages")
    assert text.startswith("exported strategy-1 (8 messages): faster")
    assert "use it" in text
    stays = Decision(CURRENT_SETUP, "no better", None, None)
    assert "use it" not in decision_text(stays, RESULTS, "sqlite:///x", 0, SPEC)


def test_the_explanation_has_its_own_line() -> None:
    why = "predicted 1 ms, measured 2 ms (+100.0%: not explained)"
    decision = Decision("strategy-1", "faster", None, "strategy-1", why)
    lines = decision_text(decision, RESULTS, "sqlite:///x", 0, SPEC).splitlines()
    assert f"  why      {why}" in lines
    silent = Decision("strategy-1", "faster", None, "strategy-1")
    assert "why" not in decision_text(silent, RESULTS, "sqlite:///x", 0, SPEC)


def test_the_headline_names_the_export_or_only_the_reason() -> None:
    reason = "faster than the current setup"
    exported = Decision("strategy-1", reason, None, "strategy-1")
    assert first_line(exported) == f"exported strategy-1: {reason} [emulated network]"
    stays = Decision(CURRENT_SETUP, "no better, so the current setup stays", None, None)
    assert first_line(stays) == "no better, so the current setup stays [emulated network]"
