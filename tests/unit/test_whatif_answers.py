"""Lists of what-ifs are read, answered with reasons and limits, and loaded from the user's file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from periodic_training import training
from synthetic_traces import span

from autotune.cluster import Cluster
from autotune.dfg.graph import Kind
from autotune.errors import InvalidInput
from autotune.plugins import UnknownName
from autotune.profiling.formats.kineto import read_kineto
from autotune.profiling.formats.op_inputs import OpInputs
from autotune.profiling.traces.job import assemble
from autotune.whatif.answers.answers import Answer, all_asked, answers, read_asked
from autotune.whatif.answers.curves import bandwidth_curves, scaled_network, worker_curves
from autotune.whatif.answers.limits import limits
from autotune.whatif.answers.user_file import load_what_ifs
from autotune.whatif.base import Base, Operator, steady
from autotune.whatif.changes.processor import BF16_MATRIX, amp_cpu
from autotune.whatif.changes.processor_optimizer import FUSED_OPTIMIZER, fused_adam_cpu, is_fused
from autotune.whatif.primitives import add, connect, scale
from autotune.whatif.question import Question
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.registry import WHAT_IFS, what_if

LINK_BYTES_PER_S = 1e9
MESSAGE_BYTES = 1e6


@pytest.fixture(autouse=True)
def invented() -> Iterator[None]:
    """Three what-ifs with known results."""
    with WHAT_IFS.separate():

        @what_if("twice", title="kernels twice as fast", source="invented", enact="twice()")
        def twice(base: Base, question: Question) -> Base:
            """All kernels, by an amount."""
            return scale(base, base.on_device, 1 / question.amounts.get("twice", 2.0))

        @what_if("large", title="-", source="-", enact="-", samples=lambda question: 3.0)
        def large(base: Base, question: Question) -> Base:
            """Kernels take twice as long for three times as many samples."""
            return scale(base, base.on_device, 2.0)

        @what_if("refused", title="never applies", source="invented", enact="-")
        def refused(base: Base, question: Question) -> Base:
            """Nothing."""
            raise InvalidInput("this trace has no widgets")

        @what_if("message", title="one message", source="invented", enact="send()")
        def message(base: Base, question: Question) -> Base:
            """1 MB for each other worker behind the step, which the next step awaits."""
            cluster = question.known_cluster()
            seconds = MESSAGE_BYTES * (question.workers - 1) / cluster.hosts[0].link_bytes_per_s
            kernels = np.flatnonzero(base.on_device)
            base, sent = add(base, "link", np.array([seconds]), ["message"], Kind.COLLECTIVE)
            base = connect(base, kernels[-1], sent)
            return connect(base, sent, kernels[0], later=1)

        @what_if("hosts", title="needs four workers", source="invented", enact="-")
        def hosts(base: Base, question: Question) -> Base:
            """As `message`, on several hosts."""
            if question.workers < 4:
                raise InvalidInput("one host only")
            return message(base, question)

        yield


def base_of(host_us: float = 5, kernel_us: float = 100) -> Base:
    return recorded_base(training(host_us, kernel_us), 0)


def one(text: str, question: Question | None = None) -> Answer:
    ((found,),) = answers(base_of(), read_asked(text), question or Question())
    return found


def cluster() -> Cluster:
    hosts = Cluster.local(2).hosts
    return Cluster("two", tuple(replace(host, link_bytes_per_s=LINK_BYTES_PER_S) for host in hosts))


def test_rows_combine_and_carry_amounts_and_files() -> None:
    first, second = read_asked(" twice+refused , message=policy.yaml+twice=3 ")
    assert (first.names, first.text) == ("twice+refused", "twice+refused")
    assert (second.names, second.amounts, second.files) == (
        "message+twice",
        {"twice": 3.0},
        {"message": "policy.yaml"},
    )
    assert {row.names for row in all_asked()} >= {"twice", "refused", "message"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (",", "stated as names"),
        ("twice+twice", "'twice' twice"),
        ("twice=", "an amount or a file"),
        ("twice=-1", "finite and at least 0"),
        ("twice=inf", "finite and at least 0"),
    ],
)
def test_a_list_that_means_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_asked(text)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"there is no what-if 'amq'; known are .*twice"):
        read_asked("twice,amq")


def test_an_answer_has_the_prediction_and_its_limits() -> None:
    found = one("twice=4")
    assert found.prediction is not None and found.limits is not None
    assert found.prediction.speedup == pytest.approx(4, rel=0.01)
    assert found.limits.step_s == pytest.approx(found.prediction.after_s)
    assert found.enact == "twice()"


def test_an_answer_without_a_prediction_has_the_reason() -> None:
    assert one("refused").reason == "this trace has no widgets"
    assert one("twice+refused").reason == "this trace has no widgets"
    assert "needs a cluster" in one("message").reason
    assert "'refused' takes no amount, but was given 3" in replace_refused("refused=3").reason
    assert "'twice' takes no file, but was given policy.yaml" in one("twice=policy.yaml").reason


def replace_refused(text: str) -> Answer:
    """Under a what-if that applies and reads no amount."""
    with WHAT_IFS.separate():
        WHAT_IFS._entries["refused"] = replace(
            WHAT_IFS["refused"], change=lambda base, question: base
        )
        return one(text)


def test_an_error_of_a_user_is_a_reason() -> None:
    with WHAT_IFS.separate():
        WHAT_IFS._entries["refused"] = replace(
            WHAT_IFS["refused"], change=lambda base, question: [base][1]
        )
        assert "raised IndexError" in one("refused").reason


def test_there_is_a_row_for_each_number_of_workers_where_it_matters() -> None:
    question = Question(cluster=cluster())
    twice, message = answers(base_of(), read_asked("twice,message"), question, (2, 4, 8))
    assert [row.workers for row in twice] == [None]
    assert [row.workers for row in message] == [2, 4, 8]
    steps_s = [row.prediction.after_s for row in message]
    assert np.diff(steps_s) == pytest.approx([2e-3, 4e-3], rel=0.01)
    (row,) = next(answers(base_of(), read_asked("message"), replace(question, workers=2)))
    assert row.workers == 2
    assert row.samples_ratio == pytest.approx(2 * row.prediction.speedup)
    assert twice[0].samples_ratio is None
    assert one("large").samples_ratio == pytest.approx(1.5, rel=0.01)
    (found,) = answers(base_of(), read_asked("hosts"), question, (2, 4, 8))
    assert [(row.workers, row.reason) for row in found] == [(2, "one host only"), (4, ""), (8, "")]
    (found,) = answers(base_of(), read_asked("refused"), question, (2, 4, 8))
    assert [row.workers for row in found] == [None]


def test_curves_follow_workers_and_bandwidth() -> None:
    base, question = base_of(), Question(cluster=cluster(), workers=2)
    rows = [row for rows in answers(base, read_asked("twice,message"), question) for row in rows]
    (over_workers,) = worker_curves(base, rows, (4, 2))
    assert [amount for amount, _ in over_workers.points] == [2, 4]
    (over_bandwidth,) = bandwidth_curves(base, rows, (0.5, 1.0))
    (slow, slow_s), (usual, usual_s) = over_bandwidth.points
    assert (slow, usual) == (0.5e9, 1e9)
    assert slow_s - usual_s == pytest.approx(1e-3, rel=0.01)
    with pytest.raises(InvalidInput, match="a factor above 0"):
        scaled_network(cluster(), 0.0)


def test_a_step_bound_by_its_device_is_device_work() -> None:
    base = base_of(host_us=50, kernel_us=400)
    found = limits(base, steady(base))
    parts = (found.host_only_s, found.device_only_s, found.both_s, found.communication_only_s)
    assert sum(parts) + found.idle_s == pytest.approx(found.step_s)
    assert found.device_only_s + found.both_s == pytest.approx(1200e-6, rel=0.01)
    assert found.path_s == pytest.approx({"device other": found.step_s})
    assert sum(found.path_s.values()) == pytest.approx(found.step_s)


def test_a_step_bound_by_its_host_is_host_work() -> None:
    base = recorded_base(training(host_us=50, kernel_us=10, waits=True), 0)
    found = limits(base, steady(base))
    assert sum(found.path_s.values()) == pytest.approx(found.step_s)
    assert found.path_s["host"] > 0.8 * found.step_s
    assert found.host_only_s > found.device_only_s
    assert found.host_only_s + found.both_s == pytest.approx(found.step_s, rel=1e-3)  # with gaps


def test_a_message_that_nothing_hides_is_exposed() -> None:
    found = one("message", Question(cluster=cluster(), workers=2))
    assert found.limits.communication_only_s == pytest.approx(1e-3, rel=0.05)
    assert found.limits.exposed_communication_s == pytest.approx(1e-3, rel=0.05)
    assert found.limits.path_s["communication"] == pytest.approx(1e-3, rel=0.01)


MINE = '''
from autotune.whatif.primitives import scale
from autotune.whatif.registry import what_if


@what_if("mine", title="no kernels", source="mine", enact="remove_all()")
def mine(base, question):
    """No kernel takes time."""
    return scale(base, base.on_device, 0.0)
'''


def test_a_file_of_the_user_registers_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    assert load_what_ifs(path) == ("mine",)
    assert one("mine").prediction is not None
    with pytest.raises(InvalidInput, match="already registered"):
        load_what_ifs(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mine.txt", MINE, "needs a Python file"),
        ("empty.py", "", "register at least one what-if"),
        ("broken.py", "1 / 0", "raised ZeroDivisionError: division by zero"),
        ("wrong.py", "def f(:", "raised SyntaxError"),
    ],
)
def test_a_file_that_registers_nothing_is_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=message):
        load_what_ifs(tmp_path / name)


def processor(*names: str) -> Base:
    """The steps of a processor: a product of 600 us, an activation of 300 us, and updates."""
    each_us = 100 / len(names)
    events = [
        event
        for step in range(3)
        for event in (
            span(f"ProfilerStep#{step}", 1000.0 * step, 999, cat="user_annotation"),
            span("aten::addmm", 1000.0 * step, 600),
            span("aten::relu", 1000.0 * step + 600, 300),
            *(
                span(name, 1000.0 * step + 900 + at * each_us, each_us, cat=cat)
                for at, mark in enumerate(names)
                for name, cat in ((mark, "user_annotation"), ("aten::add_", "cpu_op"))
            ),
        )
    ]
    text = json.dumps({"traceEvents": events}).encode()
    return recorded_base(assemble([read_kineto(BytesIO(text).read, "rank0.json")]), 0)


def test_changes_of_a_processor_scale_its_ops() -> None:
    base = processor("Optimizer.step#SGD.step")
    step_s = steady(base).step_s
    amp = amp_cpu(base, Question())
    assert steady(amp).step_s == pytest.approx(step_s - 600e-6 * (1 - BF16_MATRIX.expected), 2e-3)
    fused = fused_adam_cpu(base, Question())
    assert steady(fused).step_s == pytest.approx(
        step_s - 100e-6 * (1 - FUSED_OPTIMIZER.expected), 2e-3
    )
    for change in (amp_cpu, fused_adam_cpu):
        with pytest.raises(InvalidInput, match="has work of a device"):
            change(base_of(), Question())


def test_a_processor_that_computes_in_16_bit_is_refused_and_other_fused_operators_are_not() -> None:
    base = processor("Optimizer.step#SGD.step")
    inputs = OpInputs(dims=((8, 8), (8, 8)), types=("c10::BFloat16", "c10::BFloat16"))
    operators = tuple(replace(one, inputs=inputs) for one in base.names.operators)
    half = replace(base, names=replace(base.names, operators=operators))
    with pytest.raises(InvalidInput, match="already computes in 16 bit in 100%"):
        amp_cpu(half, Question())
    attention = Operator("aten::_fused_sdp_choice", ())
    known = replace(base.names, operators=(*base.names.operators, attention))
    assert not is_fused(replace(base, names=known), "")
    update = replace(attention, name="aten::_fused_adamw_", optimizer="AdamW")
    known = replace(base.names, operators=(*base.names.operators, update))
    assert is_fused(replace(base, names=known), "AdamW")


def test_each_optimizer_of_a_processor_is_fused_by_its_own_time_or_refused_by_name(
    tmp_path: Path,
) -> None:
    path = tmp_path / "times.fused.csv"
    asked = Question(files={"fused_adam_cpu": str(path)})
    base = processor("Optimizer.step#SGD.step")
    path.write_text("optimizer,unfused_s,fused_s\nSGD,2e-3,5e-4\n")
    step_s = steady(base).step_s
    assert steady(fused_adam_cpu(base, asked)).step_s == pytest.approx(step_s - 75e-6, rel=2e-3)
    for mark, question, message in (
        ("loss", asked, "shows none"),
        ("Optimizer.step#SparseAdam.step", asked, "AdamW or SGD .* but the trace has SparseAdam"),
        ("Optimizer.step#Adam.step", asked, "the trace's Adam, but states those of SGD"),
    ):
        with pytest.raises(InvalidInput, match=message):
            fused_adam_cpu(processor(mark), question)
    path.write_text("optimizer,unfused_s,fused_s\nSGD,2e-3,0\n")
    with pytest.raises(InvalidInput, match="line 2: seconds must be above 0"):
        fused_adam_cpu(base, asked)
    two = processor("Optimizer.step#Adam.step", "Optimizer.step#SparseAdam.step")
    half = fused_adam_cpu(two, Question())
    assert half.notes == ("SparseAdam has no fused version on processors and stays",)
    assert steady(half).step_s == pytest.approx(
        steady(two).step_s - 50e-6 * (1 - FUSED_OPTIMIZER.expected), rel=2e-3
    )
