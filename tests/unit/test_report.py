"""The HTML report: complete in any state, self-contained, safe with names from the script."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_job import WORKLOAD, SyntheticWorld, drive, job_spec, strategy

from autotune.cluster import Bend, CollectiveFit
from autotune.errors import InvalidInput
from autotune.records import (
    CURRENT_SETUP,
    Accelerators,
    Conditions,
    Failed,
    FailureKind,
    Measured,
    Network,
)
from autotune.reports.job_page import _sides, write_report
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.plan import plan
from autotune.tuning.events import Profiled, Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.instructions import Finish
from autotune.tuning.job import NO_LIMIT_S, NO_LIMIT_TRIALS
from autotune.units import format_seconds

EVIL = '<script>alert("x")</script>'
VOID = {"meta", "br", "hr", "img", "link", "input"}
WORLD = SyntheticWorld(
    {5: 0.06},
    noise=0.02,
    fails=lambda request: request.strategy_id == strategy(1).id,
    factor=lambda number: 1.6 if 1 <= number <= 5 else 1.0,
)


class Page(HTMLParser):
    """Checks that tags are balanced; collects tables, text and attributes that load resources."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.feed(text)
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [
            f"{name}={value}"
            for name, value in attributes
            if name in ("src", "href", "action", "data", "srcset")
        ]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.rows and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data.strip()


@pytest.mark.parametrize("refused", ["", f"{EVIL} clips"])
def test_the_report_states_the_limits_of_the_script(tmp_path, refused):
    spec = job_spec()
    profiled = Profiled(WORKLOAD, spec.cluster, 1.0, {"torch": "2.13.0"}, refused)
    text = rendered(tmp_path, spec, History((profiled,), spec.deviation), None)
    Page(text)
    assert EVIL not in text
    assert ("synchronization cannot cross the step" in text) is bool(refused)
    assert not refused or "alert(&#34;x&#34;)&lt;/script&gt; clips" in text


@pytest.fixture(scope="module")
def job():
    spec = job_spec()
    history, end = drive(spec, WORLD)
    assert isinstance(end, Finish) and history.disturbed and history.failed
    return spec, history, end.decision


def rendered(folder, spec, history, decision, **settings):
    path = folder / "report.html"
    write_report(
        path, spec, history, decision, Path("jobs/best.json") if decision else None, **settings
    )
    return path.read_text()


def test_it_names_the_constants_that_the_trials_contradict(tmp_path):
    spec = job_spec()
    history = History((Profiled(WORKLOAD, spec.cluster, 1.0, {}),), spec.deviation)
    line = f"the link of host {EVIL} behaves as 480 Mbit/s; the probe has 1 Gbit/s"
    for lines in ((), (line,)):
        event = Proposed(0, (), "replay", "", 0, (), 1.0, contradicted=lines)
        text = rendered(tmp_path, spec, history.then(event), None)
        Page(text)
        assert ("What the trials contradict" in text) is bool(lines)
        assert ("behaves as 480 Mbit/s; the probe has 1 Gbit/s</li>" in text) is bool(lines)
        assert EVIL not in text


def test_it_is_complete_after_every_event(job, tmp_path):
    spec, history, decision = job
    for cut in range(len(history.events) + 1):
        Page(rendered(tmp_path, spec, History(history.events[:cut], spec.deviation), None))
    Page(rendered(tmp_path, spec, history, decision))


def test_a_regret_that_no_part_can_show_is_a_dash(job, tmp_path):
    text = rendered(tmp_path, *job)
    assert "linear 0.80, 0.60, 2.0 %</span>" in text
    assert "random 0.50, 0.00, -</span>" in text


def test_the_quality_of_rankers_is_not_called_held_out(job, tmp_path):
    """The replay's constants were fitted to the tested trials, too."""
    page = rendered(tmp_path, *job)
    assert "held-out" not in page and "Ranking quality in cross-validation" in page
    assert "The replay's constants were fitted to all trials" in page


def test_it_loads_nothing_and_runs_nothing(job, tmp_path):
    text = rendered(tmp_path, *job)
    page = Page(text)
    assert not page.loads and not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert (
        "http://" not in text
        and "https://" not in text
        and "url(" not in text
        and "@import" not in text
    )


def test_text_from_the_script_is_escaped_everywhere(tmp_path):
    def spoil(event):
        if isinstance(event, Profiled):
            variables = tuple(
                replace(variable, name=EVIL + variable.name)
                for variable in event.workload.variables
            )
            workload = replace(event.workload, variables=variables, model=EVIL, device=EVIL)
            return replace(event, workload=workload, software={EVIL: EVIL})
        if isinstance(event, Proposed):
            proposals = []
            for proposal in event.proposals:
                choices = tuple(
                    replace(choice, variable=EVIL + choice.variable)
                    for choice in proposal.strategy.variables
                )
                proposals.append(
                    replace(
                        proposal,
                        strategy=replace(proposal.strategy, variables=choices),
                        origin=EVIL,
                    )
                )
                renamed[proposal.strategy.id] = proposals[-1].strategy.id
            quality = tuple(replace(quality, ranker=EVIL) for quality in event.quality)
            return replace(
                event, proposals=tuple(proposals), ranker=EVIL, reason=EVIL, quality=quality
            )
        assert isinstance(event, TrialFinished)
        request = replace(event.request, strategy_id=renamed[event.request.strategy_id])
        failed = isinstance(event.outcome, Failed)
        return replace(
            event,
            request=request,
            outcome=Failed(FailureKind.CRASH, EVIL, 1) if failed else event.outcome,
        )

    renamed = {CURRENT_SETUP: CURRENT_SETUP}
    spec = replace(job_spec(), command=(EVIL,))
    history, end = drive(spec, WORLD)
    spoiled = History(tuple(spoil(event) for event in history.events), spec.deviation)
    decision = replace(
        end.decision,
        strategy_id=renamed[end.decision.strategy_id],
        best_candidate_id=renamed[end.decision.best_candidate_id],
    )
    text = rendered(tmp_path, spec, spoiled, decision)
    assert "script" not in Page(text).tags and text.count("&lt;script&gt;") > 20


def test_names_that_are_no_utf8_are_shown_with_escapes(job, tmp_path):
    spec, history, decision = job
    text = rendered(tmp_path, spec, history, decision, command="run caf\udce9.py")
    assert r"run caf\udce9.py" in text


def test_the_headline_states_the_gain_its_interval_and_the_command(job, tmp_path):
    spec, history, decision = job
    text = rendered(tmp_path, spec, history, decision)
    compared = decision.comparison
    assert f"{1 / compared.ratio:.2f}x as fast" in text
    assert f"95% interval {1 / compared.high:.2f}x to {1 / compared.low:.2f}x" in text
    assert "autotune run --strategy jobs/best.json -- torchrun --nproc-per-node 2 train.py" in text
    assert "measured workload, assumed links" in text and "emulated" not in text


def test_a_job_on_several_hosts_shows_the_command_of_each(job, tmp_path):
    spec, history, decision = job
    text = rendered(tmp_path, spec, history, decision, command="# 0 a, 1 b\nrun R")
    assert "<pre># 0 a, 1 b\nrun R</pre>" in text and "autotune run --strategy" not in text


@pytest.mark.parametrize(
    ("network", "place"),
    [(Network.LOOPBACK, "loopback of one machine"), (Network.HOSTS, "these links")],
)
def test_fits_are_called_measured_on_the_links_that_carried_them(job, tmp_path, network, place):
    spec, history, decision = job
    [profiled] = [event for event in history.events if isinstance(event, Profiled)]
    fit = CollectiveFit("all_reduce", 2, 1e-3, 1e-9, 0.01, 4096, 2**20)
    fitted = replace(profiled, cluster=profiled.cluster.with_fits((fit,)))
    events = tuple(fitted if event is profiled else event for event in history.events)
    spec = replace(spec, conditions=Conditions(network))
    text = rendered(tmp_path, spec, History(events, spec.deviation), decision)
    assert f"Fitted cost of the primitives (measured on {place})" in text


def test_the_headline_states_that_the_current_setup_stays(tmp_path):
    spec = job_spec()
    history, end = drive(spec, SyntheticWorld({}, default_s=0.2))
    text = rendered(tmp_path, spec, history, end.decision)
    assert "The current setup stays" in text and "(not exported)" in text


def test_a_comparison_that_its_direction_ended_is_shown_without_an_interval(job, tmp_path):
    spec = job_spec(ab_pairs=20, ab_precision=1e-9)
    history, end = drive(spec, SyntheticWorld(default_s=0.2, noise=0.05))
    text = rendered(tmp_path, spec, history, end.decision)
    assert f"{end.decision.comparison.ratio:.3f}, without an interval, as its direction" in text
    assert "95 % interval" not in text.partition("The closing comparison")[2].partition("<h2>")[0]
    assert "95 % interval" in rendered(tmp_path, *job)


def test_every_variable_has_its_message_and_its_ddp_bucket(job, tmp_path):
    spec, history, decision = job
    rows = Page(rendered(tmp_path, spec, history, decision)).rows
    enacted, default = plan(strategy(5), WORKLOAD, 2), plan(ddp_default(WORKLOAD), WORKLOAD, 2)
    for variable in WORKLOAD.variables:
        [row] = [row for row in rows if row[0] == variable.name]
        for column, planned in ((7, enacted), (8, default)):
            numbers = [
                i
                for i, message in enumerate(planned.messages, 1)
                if any(part.variable == variable.name for part in message.slices)
            ]
            assert row[column] == ", ".join(str(number) for number in numbers)


def test_all_trials_failures_repeats_and_fits_are_listed(job, tmp_path):
    spec, history, decision = job
    profiled = history.events[0]
    fit = CollectiveFit(
        "all_reduce",
        2,
        1e-4,
        1e-9,
        0.034,
        1024,
        2**24,
        bends=(Bend(2.0**16, 2e-9),),
        large_error=0.08,
        spread=0.01,
    )
    history = History(
        (replace(profiled, cluster=profiled.cluster.with_fits((fit,))), *history.events[1:]),
        spec.deviation,
    )
    rows = Page(rendered(tmp_path, spec, history, decision)).rows
    listed = [
        int(row[0])
        for row in rows
        if row and row[0].isdigit() and row[1] in ("candidate", "reference", "A/B")
    ]
    assert listed == [trial.request.number for trial in history.trials]
    assert any(row[3:] == ["crash", "1", "rank 1 exited with code 1"] for row in rows)
    assert [
        "all_reduce",
        "2 (world)",
        "100 us",
        "1.05 ms",
        "2",
        "1 KiB to 16 MiB",
        "3.4 %",
        "8.0 %",
        "1.0 %",
    ] in rows
    assert sum("disturbed" in row for row in rows) == len(history.disturbed)


def test_the_plots_stay_inside_their_frame_and_mark_every_trial(job, tmp_path):
    text = rendered(tmp_path, *job)
    search = text[text.index("Step time of every trial") :].split("</svg>")[0]
    dots = [
        (float(x), float(y))
        for x, y in re.findall(r'cx="([-\d.naif]+)" cy="([-\d.naif]+)"', search)
    ]
    _spec, history, _ = job
    trials = [trial for trial in history.trials if trial not in history.ab_trials]
    marks = len(dots) + search.count("<polygon") + search.count('class="line failed"')
    assert marks == len(trials)
    assert all(0 <= x <= 1060 and 0 <= y <= 300 for x, y in dots)


def test_both_sides_have_their_steps_on_one_axis_next_to_the_measured_times(job, tmp_path):
    spec, history, decision = job
    text = rendered(tmp_path, spec, history, decision)
    assert "messages of the current setup are not known" in text
    assert text.count('aria-label="replayed steps"') == 1
    buckets = (("head.weight", "head.bias"), ("body.weight", "body.bias", "stem.weight"))
    profiled = history.events[0]
    slow = profiled.cluster.with_fits((CollectiveFit("all_reduce", 2, 0.02, 1e-9, 0, 1024, 2**24),))
    profiled = replace(profiled, current_buckets=buckets, cluster=slow)
    history = History((profiled, *history.events[1:]), spec.deviation)
    text = rendered(tmp_path, spec, history, decision)
    section = text[text.index("Before and after") : text.index("Predictions and reasons")]
    charts = [part.split("</svg>")[0] for part in section.split("<svg")[1:]]
    assert len(charts) == 2 and "messages of the current setup are not known" not in section
    ends = [re.findall(r">([^<>]+)</text>", chart.split("<rect")[0])[-1] for chart in charts]
    replayed = re.findall(r"replayed ([\d.]+) ms:", section)
    longer = f"{max(replayed, key=float)} ms"
    assert len(set(replayed)) == 2 and ends == [longer, longer], "one axis of time"
    assert "message 2: all_reduce" in charts[0] and "message 3" not in charts[0]
    current_s = next(side["median_s"] for side in _sides(history, decision)[1:])
    assert f"Measured {format_seconds(current_s)} per step; replayed" in section
    for left, width in re.findall(
        r'<rect class="bar [a-z0-9]+" x="([\d.]+)"[^>]* width="([\d.]+)"', section
    ):
        assert float(left) >= 210 and float(left) + float(width) <= 1061
    assert "predictions, not recordings" in section


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        ({"max_trials": NO_LIMIT_TRIALS, "max_seconds": 90.0}, "90 s"),
        ({"max_trials": 7, "max_seconds": NO_LIMIT_S}, "7 candidate trials"),
    ],
)
def test_the_budget_names_only_limits_that_were_given(job, tmp_path, limits, shown):
    spec, history, decision = job
    rows = Page(rendered(tmp_path, replace(spec, **limits), history, decision)).rows
    assert ["budget", shown] in rows


def test_an_open_job_replays_nothing(job, tmp_path):
    spec, history, _ = job
    text = rendered(tmp_path, spec, history, None)
    assert "Before and after" not in text and "Predictions and reasons" not in text


def test_the_reasons_and_the_overrun_are_listed(tmp_path):
    conditions = Conditions(Network.EMULATED, Accelerators.EMULATED)
    spec = replace(job_spec(), conditions=conditions)
    history, end = drive(spec, WORLD)
    late = tuple(
        replace(event, outcome=replace(event.outcome, overrun=0.03 + 0.001 * event.request.number))
        if isinstance(event, TrialFinished) and isinstance(event.outcome, Measured)
        else event
        for event in history.events
    )
    history = History(late, spec.deviation)
    text = rendered(tmp_path, spec, history, end.decision)
    rows = Page(text).rows
    assert "overrun" in next(row for row in rows if "95 % interval" in row)
    trial = next(row for row in rows if row[:2] == ["0", "reference"])
    assert "3.0 %" in trial
    assert f"{max(history.overruns.values()):.1%}".replace("%", " %") in text
    explained = [row for row in rows if len(row) == 8 and row[4].startswith(("+", "-"))]
    assert explained and all(row[7] for row in explained)


def test_an_unwritable_path_is_refused(job):
    spec, history, decision = job
    with pytest.raises(InvalidInput, match="cannot write the report"):
        write_report(Path("/proc/report.html"), spec, history, decision, None)
