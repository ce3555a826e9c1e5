"""One of two workers: trains by the script's own messages, and again with a plan per step.

Words: a script, and the folder for what the worker has trained: `own_<rank>.npz`,
`planned_<rank>.npz`, `cast_<rank>.npz`, `alone_<rank>.npz`, and `noted_<rank>.json` with refusals.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from autotune.errors import InvalidInput
from autotune.strategy_space.builders.collectives import per_variable, single_bucket
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.plan import Message, Plan, TensorSlice, plan
from autotune.strategy_space.strategy import Compressor, SparseHandling
from autotune.workload import Variable, Workload
from runtime_rewriter.mirrored import script_sums
from runtime_rewriter.mirrored.scripts import mirrored_steered
from runtime_rewriter.mirrored.steps import Steps
from runtime_rewriter.mirrored.summed import summed

SCRIPT, RESULTS = sys.argv[1], Path(sys.argv[2])
STEPS = 6


class OnePlanPerStep:
    """Loads the plans of a list, one per step, and then the script's own messages."""

    def __init__(self) -> None:
        self.steps = Steps(self)
        self.variables: list[Variable] = []
        self.plans: list[Plan] = []
        self.clean: list[bool] = []
        self.gate: list[tuple[bool, float]] = []

    def found(self, variables, buckets):
        self.variables = list(variables)

    def between_steps(self, now_s, clean):
        self.clean.append(clean)
        self.steps.plan = self.plans.pop(0) if self.plans else None

    def stepped(self, observation):
        if self.steps.gated and self.steps.plan is not None:
            result = self.steps.compared.result(self.steps.plan)
            self.gate.append((result.ok, result.relative_error))


def cut(message: Message) -> list[Message]:
    """Cut each variable with rows into two slices along its first axis, sparse ones unevenly."""
    if message.sparse is not SparseHandling.DENSE:
        (whole,) = message.slices
        rows, width = shapes[whole.variable]
        parts = [(0, 3), (3, rows - 1), (rows - 1, rows)]  # no word is the last row
        slices = [
            TensorSlice(whole.variable, (b - a) * width, 0, a, b, b - a) for a, b in parts[::-1]
        ]
        return [replace(message, slices=(one,)) for one in slices]
    slices = []
    for part in message.slices:
        rows = shapes[part.variable][0]
        for start, stop in ((rows // 2, rows), (0, rows // 2)):
            share = part.elements // rows * (stop - start)
            slices.append(TensorSlice(part.variable, share, 0, start, stop, stop - start))
    return [replace(message, slices=tuple(slices))]


def cast(message: Message) -> list[Message]:
    dense = message.sparse is SparseHandling.DENSE
    return [replace(message, compressor=Compressor.FP16 if dense else Compressor.BF16)]


def changed(whole: Plan, change) -> Plan:
    messages = [one for message in whole.messages for one in change(message)]
    return replace(whole, messages=tuple(messages))


def reset() -> list[Any]:
    """Give the script's variables their first values, and return them."""
    held = [*model.variables, *optimizer.variables]
    for number, variable in enumerate(held):
        random = np.random.default_rng(number)
        drawn = random.normal(size=variable.shape) * 0.1
        variable.assign(
            drawn.astype(variable.dtype) if number < len(model.variables) else 0 * drawn
        )
    optimizer.learning_rate.assign(0.1)
    return held


def train(plans: list[Plan], name: str, step: Any = None) -> None:
    held = reset()
    observer.plans = plans
    losses = []
    for _, batch in zip(range(STEPS), distributed, strict=False):
        losses.append(float((step or script["train_step"])(batch)))
    np.savez(RESULTS / f"{name}_{os.environ['RANK']}.npz", losses, *[one.numpy() for one in held])


def train_alone(loaded: Plan, name: str) -> None:
    """Train by another function of the same step, which is first called while a plan is loaded."""
    import tensorflow as tf

    observer.plans = [loaded]
    script["train_step"](next(iter(distributed)))
    train([], name, tf.function(script["train_step"].python_function))


def refusal(run: Callable[[], Any]) -> str:
    """Why a step is refused that is new to us."""
    with OnePlanPerStep().steps.steered():
        try:
            run()
        except InvalidInput as refused:
            return str(refused)
    return ""


def wrong_sums(*arguments: Any) -> dict[str, Any]:
    """The sums of a plan, one of which is a millionth too large."""
    sums = summed(*arguments)
    name = next(one.name for one in observer.variables if not one.sparse)
    return {**sums, name: sums[name] * (1 + 1e-6)}


def heartbeat_ms() -> int:
    """The silence after which TensorFlow gives up a worker."""
    from tensorflow.python.eager import context

    config = context.context().config.experimental.coordination_config
    return int(config.heartbeat_timeout_in_ms)


def refused_steps() -> dict[str, str]:
    """Refusals of steps that sum twice, in a loop, and without a tf.function; none of a norm's."""
    import tensorflow as tf

    with strategy.scope():
        weights = tf.Variable([1.0, 2.0])

    def summed_once() -> Any:
        """The replica's own gradients, whose sum is applied."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * weights)
        gradients = tape.gradient(loss, [weights])
        context = tf.distribute.get_replica_context()
        (total,) = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        weights.assign_sub(0.1 * total)
        return gradients

    def replica_step(times: int) -> None:
        for _ in range(times):
            summed_once()

    def replica_norm() -> Any:
        return tf.linalg.global_norm(summed_once())

    def logged() -> Any:
        norm = strategy.run(replica_norm)
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, norm, axis=None)

    def epoch() -> None:
        for _ in tf.range(3):
            strategy.run(replica_step, args=(1,))

    inner = tf.function(lambda: strategy.run(replica_step, args=(1,)))
    return {
        "norm": refusal(tf.function(logged)),
        "twice": refusal(tf.function(lambda: strategy.run(replica_step, args=(2,)))),
        "loop": refusal(tf.function(epoch)),
        "inner": refusal(tf.function(lambda: inner())),
        "eager": refusal(lambda: strategy.run(replica_step, args=(1,))),
        "servers": refusal(lambda: tf.distribute.ParameterServerStrategy(None)),
    }


sys.argv = [SCRIPT, "1", str(RESULTS)]
observer = OnePlanPerStep()
steered = ExitStack()
with mirrored_steered(lambda undo, peers: steered.enter_context(observer.steps.steered())):
    script = runpy.run_path(SCRIPT)
    model, optimizer, strategy = (script[name] for name in ("model", "optimizer", "strategy"))
    distributed = strategy.experimental_distribute_dataset(script["batches"])
    shapes = {one.name: one.shape for one in observer.variables}
    workload = Workload("pair", tuple(observer.variables))
    bucket = plan(with_rows(single_bucket(workload), workload), workload, 2)
    apart = plan(with_rows(per_variable(workload), workload), workload, 2)
    backwards = replace(apart, messages=apart.messages[::-1])
    halves = changed(apart, cut)
    train([], "own")
    train([apart, halves, backwards, bucket, halves, apart], "planned")
    train([changed(bucket, cast)] * STEPS, "cast")
    train_alone(changed(bucket, cast), "alone")
    observer.steps.gated = True
    train([halves, changed(bucket, cast)], "gated")
    with mock.patch.object(script_sums, "summed", wrong_sums):
        train([backwards], "wrong")
    observer.steps.gated = False
    observer.clean.clear()
    script["train_step"](next(iter(distributed)))
    model.predict(np.zeros((2, 5), "int32"), verbose=0)
    batch = next(iter(distributed))
    script["train_step"](batch)
    observer.plans = [bucket, bucket, bucket]
    script["train_step"](batch)
    small = tuple(strategy.experimental_local_results(one)[0][:2] for one in batch)
    script["train_step"](small)  # traced
    script["train_step"](batch)
    script["train_step"](batch)
    steered.close()
    noted = {
        "clean": observer.clean,
        "gate": observer.gate,
        "heartbeat_ms": heartbeat_ms(),
        **refused_steps(),
    }
(RESULTS / f"noted_{os.environ['RANK']}.json").write_text(json.dumps(noted))
os._exit(0)  # the other worker's server may still wait for this one's
