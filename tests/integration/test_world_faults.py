"""Failing scripts and plans, and trials after them; `test_ray_world.py` does so on Ray actors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from local_world import ForkedRank
from short_jobs import small_model

from autotune.cluster import Cluster
from autotune.errors import LaunchError
from autotune.jobs.driver import drive
from autotune.records import Failed, FailureKind, Measured, Role, TrialRequest
from autotune.sampler.proposer import Proposer
from autotune.storage.store import Store
from autotune.strategy_space.builders.collectives import (
    ddp_default,
    reduce_scatter_all_gather,
    single_bucket,
)
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Compressor
from autotune.tuning.job import JobSpec
from runtime_rewriter.protocol import StartTrial, decode_instruction
from runtime_rewriter.world.worker import Polled, ProcessSupervisor, WorkerLost

LSTM = Path(__file__).parents[2] / "examples" / "lstm_text.py"  # it clips by the global norm
RANKS = 2
REQUEST = TrialRequest(0, "strategy-under-test", Role.CANDIDATE, warmup_steps=2, timed_steps=4)


FAULTS = (
    ("crash", FailureKind.CRASH, "planted crash"),
    ("exit", FailureKind.CRASH, "exit code 7"),
    ("memory", FailureKind.OUT_OF_MEMORY, "memory"),
    ("hang", FailureKind.HANG, "ranks 0, 1 made no step for 12 s"),
)


def test_every_planted_fault_is_recorded_with_its_kind_and_the_next_trial_runs(
    make_world, tmp_path
) -> None:
    kinds = ",".join(fault for fault, _, _ in FAULTS)
    words = ("--fault", kinds, "--fault-step", "12", "--fault-file", str(tmp_path / "planted"))
    world = make_world(*words, step_timeout_s=12.0)
    wanted = plan(ddp_default(small_model()), small_model(), RANKS)
    for restarts, (_, kind, text) in enumerate(FAULTS, start=1):
        failed = world.run_trial(replace(REQUEST, timed_steps=30), wanted)
        assert isinstance(failed, Failed)
        assert failed.kind is kind
        assert text in failed.message
        again = world.run_trial(REQUEST, wanted)
        assert isinstance(again, Measured)
        assert world.restarts == restarts


def test_plans_and_the_current_setup_alternate_in_one_run_of_the_script(make_world) -> None:
    world = make_world()
    first = world.run_trial(REQUEST, None)
    second = world.run_trial(REQUEST, plan(single_bucket(small_model()), small_model(), RANKS))
    third = world.run_trial(REQUEST, None)
    assert [isinstance(outcome, Measured) for outcome in (first, second, third)] == [True] * 3
    assert first.gradient_error is None and second.gradient_error == 0.0
    assert len(second.step_s) == RANKS and len(second.step_s[0]) == REQUEST.timed_steps
    assert world.restarts == 0


def test_a_plan_that_the_runtime_cannot_enact_is_refused_without_a_restart(make_world) -> None:
    world = make_world()
    wanted = plan(single_bucket(small_model()), small_model(), RANKS)
    messages = tuple(replace(message, ranks=(0,)) for message in wanted.messages)
    refused = world.run_trial(REQUEST, replace(wanted, messages=messages))
    assert isinstance(refused, Failed)
    assert refused.kind is FailureKind.REFUSED
    assert "every rank takes part" in refused.message
    assert isinstance(world.run_trial(REQUEST, wanted), Measured)
    assert world.restarts == 0


def test_half_of_an_exchange_crosses_the_step_of_a_language_model_that_clips(
    make_world, tmp_path
) -> None:
    """Its profile says so, and a trial passes both numerics gates."""
    sizes = ("--width", "16", "--layers", "1", "--batch-size", "2", "--block-size", "8")
    world = make_world(*sizes, script=LSTM, probe_s=1.0)
    spec = JobSpec(
        ("torchrun", str(LSTM)), RANKS, Cluster.local(RANKS), max_seconds=0.001, most_steps=0
    )
    with Store.open(tmp_path / "jobs.db") as store:
        store.create_job("lstm", spec)
        # the profile and one reference spend the budget
        drive("lstm", spec, store, world, Proposer(spec, {}), [])
        profiled = store.history("lstm").profiled
    assert profiled is not None
    assert profiled.workload.reads_norms and profiled.cross_step_refused == ""
    across = replace(reduce_scatter_all_gather(profiled.workload), cross_step=True)
    crossing = plan(across, profiled.workload, RANKS)
    assert crossing.results is not None
    outcome = world.run_trial(REQUEST, crossing)
    assert isinstance(outcome, Measured), outcome


def test_gradients_that_overflow_fp16_fail_the_numerics_gate(make_world) -> None:
    world = make_world("--loss-scale", "1e9")
    wanted = plan(single_bucket(small_model()), small_model(), RANKS)
    failed = world.run_trial(REQUEST, compressed(wanted, Compressor.FP16))
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.NUMERICS
    assert "reference reduction" in failed.message
    assert isinstance(world.run_trial(REQUEST, wanted), Measured)


def compressed(wanted: Plan, compressor: Compressor) -> Plan:
    return replace(
        wanted,
        messages=tuple(replace(message, compressor=compressor) for message in wanted.messages),
    )


def test_a_script_that_comes_to_its_end_is_started_again_and_the_trial_completes(
    make_world,
) -> None:
    world = make_world("--steps", "15")
    outcomes = [world.run_trial(REQUEST, None) for _ in range(4)]
    assert all(isinstance(outcome, Measured) for outcome in outcomes)
    assert world.restarts >= 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("--steps", "5"),
            "ends after 5 steps, but one trial needs at least 8; let it train .* --warmup-steps",
        ),
        (
            ("--steps", "5", "--without-ddp"),
            r"without a training step under DistributedDataParallel; wrap the model.*rank0.log",
        ),
    ],
    ids=["too short for one trial", "without DDP"],
)
def test_a_script_that_cannot_be_tuned_is_refused_with_the_fix(make_world, words, reason) -> None:
    with pytest.raises(LaunchError, match=reason):
        make_world(*words).run_trial(REQUEST, None)


def test_a_script_too_short_for_the_profile_is_refused_with_the_steps_that_it_needs(
    make_world,
) -> None:
    reason = r"ends after 8 steps, but the profile needs at least 9; let it train longer \(.*\)$"
    with pytest.raises(LaunchError, match=reason):
        make_world("--steps", "8", probe_s=0.0).profile()
    assert make_world("--steps", "9", probe_s=0.0).profile().workload.compute_s > 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nonexistent_package", r"\(crash\): ModuleNotFoundError.*nonexist.*script.py:1"),
        (
            "raise TimeoutError('the data server did not answer')",
            r"\(hang\): TimeoutError: the data server did not answer",
        ),
        (
            "raise RuntimeError('cannot read caf\\udce9.bin')",
            r"\(crash\): RuntimeError: cannot read caf\\udce9\.bin \(at ",
        ),
    ],
)
def test_a_script_that_dies_at_its_start_is_reported_with_its_own_error(
    make_world, tmp_path, text, reason
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{text}\n")
    with pytest.raises(LaunchError, match=f"died before its first step {reason}"):
        make_world(script=script).run_trial(REQUEST, None)


TELLS_ITS_TIMEOUT = """
import torch
torch.distributed.init_process_group("gloo")
ranks = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)).synchronizer.ranks
raise ValueError(f"a message may take {ranks.timeout_s:g} s")
"""


def test_a_message_may_take_as_long_as_the_driver_waits_for_a_step(make_world, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TELLS_ITS_TIMEOUT)
    with pytest.raises(LaunchError, match="a message may take 300 s"):
        make_world(script=script, ranks=1, step_timeout_s=300.0).run_trial(REQUEST, None)


@pytest.mark.slow
def test_a_rank_that_hangs_before_its_first_step_is_named_with_its_output(
    make_world, tmp_path
) -> None:
    world = make_world("--fault", "hang", "--fault-step", "1", start_timeout_s=8.0)
    named = "rank 1 made no training step within 8 s, but the other ranks did"
    with pytest.raises(LaunchError, match=f"{named}.*; its output: {tmp_path}/rank1.log"):
        world.run_trial(REQUEST, None)


class Garbled(ProcessSupervisor):
    """Its lines lose their last character."""

    def poll(self, timeout_s: float) -> Polled:
        polled = super().poll(timeout_s)
        return replace(polled, lines=tuple(line[:-1] for line in polled.lines))


def test_a_message_that_cannot_be_read_is_a_failure_of_its_rank(make_world) -> None:
    reason = r"\(crash\): a message of the rank cannot be read: an event of a rank must be JSON"
    with pytest.raises(LaunchError, match=reason):
        make_world(ranks=1, supervisor=partial(Garbled, ForkedRank)).run_trial(REQUEST, None)


class Doomed(ProcessSupervisor):
    """Is lost with its first trial."""

    def instruct(self, line: str) -> None:
        if isinstance(decode_instruction(line), StartTrial):
            raise WorkerLost("its machine is gone")
        super().instruct(line)


def test_a_trial_that_loses_its_workers_twice_has_failed(make_world) -> None:
    world = make_world(supervisor=partial(Doomed, ForkedRank))
    lost = world.run_trial(REQUEST, None)
    assert isinstance(lost, Failed)
    assert lost.kind is FailureKind.CRASH
    assert "a worker was lost, and again on other workers: its machine is gone" in lost.message
    assert world.restarts >= 1  # more if another process took the port of a start


def test_a_rank_that_comes_to_its_end_before_the_others_ends_the_script_and_not_the_strategy(
    make_world, tmp_path
) -> None:
    world = make_world(
        "--fault", "end", "--fault-step", "12", "--fault-file", str(tmp_path / "ended")
    )
    wanted = plan(single_bucket(small_model()), small_model(), RANKS)
    assert isinstance(world.run_trial(REQUEST, wanted), Measured)
    assert isinstance(world.run_trial(replace(REQUEST, timed_steps=30), wanted), Measured)
    assert world.restarts == 1


@pytest.mark.slow
def test_steps_shorter_than_the_heartbeat_are_not_a_hang_however_low_the_limit(make_world) -> None:
    world = make_world(step_timeout_s=0.5)
    assert isinstance(world.run_trial(replace(REQUEST, timed_steps=1000), None), Measured)
