"""What the TensorFlow rewriter refuses, by name, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.errors import InvalidInput, ModelMismatch
from autotune.strategy_space.enactable import describe, refusal_reason
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer
from runtime_rewriter.tensorflow.op_fusion import refuse_fusion
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

_WIRE_DTYPES = ("float16", "bfloat16", "float32", "float64")


def refuse(
    training: TrainingGraph, plan: Plan, devices: Sequence[str], hosts: Sequence[Sequence[int]]
) -> None:
    """Raise `InvalidInput` if the rewriter cannot enact `plan` for this graph."""
    if len(devices) != plan.world_size or len(set(devices)) != len(devices):
        raise InvalidInput(
            f"a plan for {plan.world_size} ranks needs as many distinct devices, "
            f"but got {', '.join(devices)}"
        )
    planned = {part.variable for message in plan.messages for part in message.slices}
    for name in sorted(planned ^ set(training.gradient_of)):
        side = "the plan lacks" if name in training.gradient_of else "the graph lacks"
        raise ModelMismatch(
            f"a plan must name exactly the variables with gradients, but {side} {name!r}"
        )
    reason = refusal_reason(plan, rewrites_graph=True) or plan_refusal(plan)
    if reason is not None:
        raise InvalidInput(f"TensorFlow cannot enact this plan: {reason}")
    if any(message.hierarchical for message in plan.messages):
        _refuse_unknown_hosts(plan.world_size, hosts)
    for message in plan.messages:
        for part in message.slices:
            _refuse_dense_rows(training, part.variable, message)
    refuse_fusion(training.view, plan.op_fusion, devices[0])


def _refuse_unknown_hosts(world_size: int, hosts: Sequence[Sequence[int]]) -> None:
    if sorted(rank for host in hosts for rank in host) != list(range(world_size)):
        raise InvalidInput(
            "hierarchical messages need to know which ranks share a host, from LOCAL_RANK and "
            "LOCAL_WORLD_SIZE as `autotune tune` and torchrun set them for ranks that are numbered "
            f"host by host, but the known hosts are {[list(host) for host in hosts]}; start the "
            "script by one of them, or set hierarchical = false"
        )


def _refuse_dense_rows(training: TrainingGraph, variable: str, message: Message) -> None:
    """Refuse to send rows dense to a program that would update otherwise by them."""
    readers = training.row_readers.get(variable)
    if readers is None or message.sparse is not SparseHandling.DENSE:
        return
    if reason := readers.dense_refusal(variable):
        raise InvalidInput(reason)


CROSSING_REFUSED = "a TensorFlow step ends with its updates"
DIRECT_REFUSED = "TensorFlow's servers exchange tensors by collectives and reads only"
PLUGINS_REFUSED = "they work on tensors of PyTorch"


def plan_refusal(plan: Plan) -> str | None:
    """Return the rule that keeps TensorFlow from enacting `plan`, or None."""
    if plan.cross_step:
        return "a step ends with its updates, but cross_step lets messages continue into the next"
    for number, message in enumerate(plan.messages):
        reason = _message_refusal(message)
        if reason is not None:
            return f"message {number} ({describe(message)}): {reason}"
    return None


def _message_refusal(message: Message) -> str | None:
    if message.synchronizer is Synchronizer.DIRECT_EXCHANGE:
        return f"{DIRECT_REFUSED}; use parameter_server or reduce_scatter_all_gather"
    if message.dtype not in _WIRE_DTYPES:
        return f"TensorFlow's collectives sum {', '.join(_WIRE_DTYPES)}, but it is {message.dtype}"
    if message.compressor not in tuple(Compressor):
        return (
            f"the compressor {message.compressor} of a plugin works on tensors of PyTorch; use "
            f"{', '.join(Compressor)}"
        )
    return None
