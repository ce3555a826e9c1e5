"""Scripts with several DDP models: trained by turns, or one after the other."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch.distributed as dist
from test_apply import exported, linear

from autotune.errors import LaunchError
from autotune.records import Measured, Role, TrialRequest
from runtime_rewriter.further_models import SLACK_STEPS, UNBEGUN_STEPS, FurtherModels
from runtime_rewriter.pytorch.ddp import replaced_ddp
from runtime_rewriter.rank.exported import ExportSession
from runtime_rewriter.world.results import TrainingEnded

REQUEST = TrialRequest(0, "strategy-under-test", Role.CANDIDATE, warmup_steps=2, timed_steps=4)


def test_a_model_that_is_trained_by_turns_with_another_one_is_tuned_as_if_alone(make_world) -> None:
    world = make_world("--further-steps", "12")
    outcomes = [world.run_trial(replace(REQUEST, timed_steps=30), None) for _ in range(2)]
    assert all(isinstance(outcome, Measured) for outcome in outcomes)
    assert world.restarts == 0


def test_a_script_that_wraps_its_model_again_is_started_again_and_the_trials_complete(
    make_world,
) -> None:
    world = make_world("--wrap-again", "15")
    outcomes = [world.run_trial(REQUEST, None) for _ in range(4)]
    assert all(isinstance(outcome, Measured) for outcome in outcomes)
    assert world.restarts >= 1


def test_a_first_model_that_trains_too_short_is_refused_with_the_reason(make_world) -> None:
    reason = "trains its DDP model 2 after 5 steps of its first one, .* needs at least 8; let the"
    with pytest.raises(LaunchError, match=reason):
        make_world("--wrap-again", "5").run_trial(REQUEST, None)
    reason = "trains its DDP model 2, but has made no step of its first one"
    with pytest.raises(LaunchError, match=reason):
        make_world("--wrap-again", "0").run_trial(REQUEST, None)


def test_a_kept_training_goes_on_with_its_next_model_to_its_own_end(make_world, tmp_path) -> None:
    world = make_world("--wrap-again", "15", "--steps", "40", keeps_training=True)
    with pytest.raises(TrainingEnded):
        world.run_trial(replace(REQUEST, timed_steps=30), None)
    assert "trained 40 steps" in (tmp_path / "rank0.log").read_text()
    assert world.ended_steps == 14 and world.restarts == 0


def test_an_export_says_which_models_keep_their_own_synchronization(tmp_path, caplog) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    models = []
    try:
        exported(linear(), tmp_path / "own.json")
        with replaced_ddp(ExportSession(tmp_path / "own.json")), caplog.at_level(logging.WARNING):
            from torch.nn.parallel import DistributedDataParallel

            models = [DistributedDataParallel(linear()) for _ in range(3)]
    finally:
        del models
        dist.destroy_process_group()
    further = [record.getMessage() for record in caplog.records if "keeps its" in record.msg]
    assert [text.partition("model ")[2].split()[0] for text in further] == ["2", "3"]


def replaced_after(models: FurtherModels, most: int) -> int:
    """Steps of a further model until the first one counts as ended; 0: not within `most`."""
    listener = models.add()
    for step in range(1, most + 1):
        listener.on_boundary(0.0, clean=True)
        if models.replaced_the_first:
            return step
    return 0


def test_the_first_models_training_has_ended_after_more_steps_of_others_than_ever_before() -> None:
    steps: list[tuple[int, float]] = []
    models = FurtherModels(lambda number, now_s: steps.append((number, now_s)))
    assert replaced_after(models, 100) == 0  # a critic, before the first step of its generator
    models.first_stepped()
    models.first_stepped()
    assert replaced_after(models, 1000) == 2 * 100 + SLACK_STEPS + 1
    assert {number for number, _ in steps} == {2, 3}
    assert replaced_after(FurtherModels(lambda *_: None), 1000) == UNBEGUN_STEPS + 1
    alone = FurtherModels(lambda *_: None)
    alone.first_stepped()
    assert replaced_after(alone, 1000) == SLACK_STEPS + 1
