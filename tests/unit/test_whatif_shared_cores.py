"""On a processor, messages that what-ifs add and computation beside them slow each other down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from periodic_training import training
from synthetic_cluster import cluster

from autotune.cluster import CollectiveFit
from autotune.dfg.graph import NONE, Kind
from autotune.whatif.answers.predict import changed
from autotune.whatif.base import Base, steady
from autotune.whatif.messages.shared_cores import UNKNOWN, on_shared_cores
from autotune.whatif.primitives import add, connect, select
from autotune.whatif.question import Question, Reading
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.registry import WhatIf

MIB = 2**20
ALONE = CollectiveFit("all_reduce", 2, 0.0, 400e-6 / MIB, 0.0, 1, 2**30)
LOADED = replace(ALONE, beta_s_per_byte=600e-6 / MIB, cpu_alpha_s=150e-6, loaded=True)
HOSTS = cluster((1, 1000.0), (1, 1000.0))


def on_processor() -> Base:
    """Three ops of 400 us follow each other on a thread."""
    base = recorded_base(training(host_us=5, kernel_us=400), 0)
    return replace(
        base,
        on_device=np.zeros_like(base.on_device),
        launch=np.full_like(base.launch, NONE),
        launched=base.launched[:0],
    )


def with_message(base: Base, question: Question) -> Base:
    """An all-reduce of 1 MiB behind the first op of a step."""
    first = np.flatnonzero(select(base, name="gemm_0"))
    names = ["all_reduce bucket 0"]
    sizes_bytes = np.array([float(MIB)])
    base, message = add(
        base, "network", np.array([400e-6]), names, Kind.COLLECTIVE, size_bytes=sizes_bytes
    )
    return connect(base, first, message)


ADDED = WhatIf("message", "a message", "a test", "nothing", with_message)


def step_us(base: Base, question: Question) -> float:
    return steady(changed(base, [ADDED], question)).step_s * 1e6


def test_a_message_under_load_is_longer_and_takes_time_from_what_it_accompanies() -> None:
    """It takes 600 us instead of 400, and costs computation 150 us of them: 100 and 50."""
    base = on_processor()
    question = Question(cluster=HOSTS.with_fits((ALONE, LOADED)), workers=2)
    assert step_us(base, question) == pytest.approx(1200 + 150, rel=1e-3)
    loaded = changed(base, [ADDED], question)
    kernels = [int(np.flatnonzero(select(loaded, name=f"gemm_{n}"))[0]) for n in range(3)]
    assert 1e6 * loaded.duration_s[kernels] == pytest.approx([400, 500, 450], rel=1e-3)
    assert 1e6 * loaded.duration_s[-1] == pytest.approx(600, rel=1e-3)
    optimistic = replace(question, reading=Reading.OPTIMISTIC)
    assert step_us(base, optimistic) == pytest.approx(1200, rel=1e-3)


def test_an_unknown_slowdown_is_noted() -> None:
    base = on_processor()
    question = Question(cluster=HOSTS.with_fits((ALONE,)), workers=2)
    assert step_us(base, question) == pytest.approx(1200, rel=1e-3)
    assert UNKNOWN in changed(base, [ADDED], question).notes
    assert on_shared_cores(base, question) is base  # it sends nothing
