"""The session of a tuned rank: carries out the driver's instructions at step boundaries.

Every rank gets the same instructions and makes a fixed number of steps for each. So all ranks
switch plans at the same boundary, without a collective of their own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace

from autotune.errors import InvalidInput, InvalidStrategy
from autotune.records import FailureKind
from runtime_rewriter.control import ControlClosed, ControlLine
from runtime_rewriter.further_models import FurtherModels
from runtime_rewriter.protocol import (
    HEARTBEAT_S,
    EndScript,
    Heartbeat,
    Probing,
    RankEvent,
    RankFailed,
    Ready,
    ScriptFinished,
    StartProbe,
    StartTrial,
    decode_instruction,
    encode,
)
from runtime_rewriter.pytorch.exchange.ranks import TRAINING_TIMEOUTS, TUNING_TIMEOUTS
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.rank.torch_model import TorchModel
from runtime_rewriter.rank.tuned_model import Activity, TunedModel
from runtime_rewriter.rank.without_ddp import StepsWithoutDdp


class TuningSession:
    """Listens to the step boundaries of the model that is tuned.

    `round_robin`: whether the process runs under round-robin scheduling, for the driver.
    `byte_scale`: see `GradientSynchronizer.scale_bytes`. `kept`: the training goes on after the
    trials. The driver gives up after `step_timeout_s` of silence, so messages may take as long.
    """

    def __init__(
        self,
        line: ControlLine,
        round_robin: bool = False,
        byte_scale: float = 1.0,
        kept: bool = False,
        step_timeout_s: float = 0.0,
    ) -> None:
        least = TRAINING_TIMEOUTS if kept else TUNING_TIMEOUTS
        self.timeouts = replace(least, message_s=max(least.message_s, step_timeout_s))
        self.line = line
        """To the supervisor of this rank."""
        self._followers: Sequence[ControlLine] = ()
        self._round_robin = round_robin
        self._byte_scale = byte_scale
        self._model: TunedModel | None = None
        self._activity: Activity | None = None
        self._step_started_s = 0.0
        self._heartbeat_s = 0.0
        self._without_ddp = StepsWithoutDdp()
        self._kept = kept
        self._further = FurtherModels(self._further_stepped)
        self._last_model = 1
        self.steps = 0
        """Steps that the script has made since it started."""

    def model_built(self, synchronizer: GradientSynchronizer) -> None:
        """Tune the first model of PyTorch; its present plan is its current setup.

        Further models keep theirs. Unless the training is kept, the script ends here once it trains
        them instead of the first one.
        """
        if self._model is None:
            self.tune(TorchModel(synchronizer))
            synchronizer.listeners.append(self)
        elif isinstance(self._model, TorchModel):
            synchronizer.listeners.append(self._further.add())
            self._model.further_models = self._further.count
        self._without_ddp.stop()

    def tune(self, model: TunedModel, followers: Sequence[ControlLine] = ()) -> None:
        """Let the steps of `model` answer the driver.

        `followers`: lines to ranks that repeat what this rank tells its supervisor.
        """
        self._without_ddp.stop()
        self._model, self._followers = model, followers

    def finish(self, failure: RankFailed | None) -> None:
        """Tell the supervisor that the script has ended, and followers if it ended by itself.

        Raises `ControlClosed` if the supervisor is gone.
        """
        if failure is None:
            farewell = encode(ScriptFinished(self.steps, self._last_model))
            for follower in self._followers:
                with contextlib.suppress(ControlClosed):
                    follower.send(farewell)
        self.line.send(encode(failure or ScriptFinished(self.steps, self._last_model)))

    def on_backward_end(self) -> None:
        """Nothing to do: a step ends at the next forward pass."""

    def on_boundary(self, now_s: float, clean: bool) -> None:
        """Account for the step that ended. Between two instructions the script waits here."""
        self.steps += 1
        self._further.first_stepped()
        assert self._model is not None
        if self._activity is None:
            # The script may have registered a communication hook until its first step.
            if self._byte_scale != 1:
                self._model.scale_bytes(self._byte_scale)
            self._send(Ready(self._model.id, self._round_robin))
        elif self._activity.step_finished(now_s - self._step_started_s, clean):
            self._send(self._activity.answer())
        else:
            self._pulse(Heartbeat(self.steps), now_s)
            self._step_started_s = now_s
            return
        self._activity = self._next_activity(self._model)
        self._step_started_s = time.perf_counter()

    def _further_stepped(self, number: int, now_s: float) -> None:
        if self._further.replaced_the_first and not self._kept:
            self._last_model = number
            raise SystemExit(0)
        if self._activity is not None:
            self._pulse(Heartbeat(self.steps), now_s)

    def _next_activity(self, model: TunedModel) -> Activity:
        while True:
            try:
                line = self.line.receive(None)  # ends when the supervisor does
            except ControlClosed:
                raise SystemExit(0) from None
            assert line is not None
            instruction = decode_instruction(line)
            if isinstance(instruction, EndScript):
                raise SystemExit(0)
            if isinstance(instruction, StartProbe):  # needs no steps
                self._send(model.probe(instruction, self._report))
                continue
            refusals = InvalidStrategy if isinstance(instruction, StartTrial) else InvalidInput
            try:
                return model.start(instruction)
            except (
                refusals
            ) as refusal:  # every rank raised it, and the earlier plan is still loaded
                self._send(RankFailed(FailureKind.REFUSED, str(refusal)))

    def _report(self, description: str) -> None:
        self._pulse(Probing(description), time.perf_counter())

    def _pulse(self, event: Heartbeat | Probing, now_s: float) -> None:
        """Send a sign of life, at most one per heartbeat; none while nobody reads them.

        The driver may be stopped (Ctrl-Z), and training must not wait for it.
        """
        if now_s - self._heartbeat_s >= HEARTBEAT_S:
            self._heartbeat_s = now_s
            for line in (*self._followers, self.line):
                line.offer(encode(event))

    def _send(self, event: RankEvent) -> None:
        line = encode(event)
        for follower in self._followers:
            follower.send(line)
        self.line.send(line)
