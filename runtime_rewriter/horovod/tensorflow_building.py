"""Builds the synchronizer of the variables whose gradients the first tape averages."""

# mypy: untyped-calls-exclude=torch, allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
import torch.distributed as dist

from runtime_rewriter.horovod.connection import HorovodConnection
from runtime_rewriter.horovod.tensorflow_emulation import TensorflowAccelerator
from runtime_rewriter.horovod.tensorflow_refusals import check_tape, check_threads
from runtime_rewriter.horovod.tensorflow_synchronizer import (
    Switches,
    TapeSettings,
    TensorflowSynchronizer,
)
from runtime_rewriter.horovod.tensorflow_variables import (
    GradientForm,
    TensorflowStep,
    unique_names,
    used_names,
)
from runtime_rewriter.pytorch.exchange.ranks import Timeouts

_ADDRESS_BYTES = 256


@dataclass(frozen=True)
class TunedVariables:
    """References of the variables of a step: the positions of those that plans have, and those
    whose gradients are rows."""

    positions: Mapping[Any, int]
    in_rows: frozenset[Any]


@dataclass(frozen=True)
class SynchronizerBuilder:
    """`horovod` is the module `horovod.tensorflow`."""

    horovod: Any
    connection: HorovodConnection
    switches: Switches
    waits: Timeouts
    settings: TapeSettings

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> tuple[TunedVariables, TensorflowSynchronizer]:
        """The synchronizer of the variables that have a gradient on any rank. Collective."""
        check_tape(self.horovod, self.settings)
        check_threads()
        names = unique_names(variables)
        forms = dict(zip(names, map(GradientForm.of, gradients), strict=True))
        everywhere: list[Any] = [None] * self.horovod.size()
        with self.connection.world.as_default():
            dist.all_gather_object(everywhere, forms)
        dense, in_rows = used_names(names, everywhere)
        named = dict(zip(names, variables, strict=True))
        synchronizer = TensorflowSynchronizer(
            TensorflowStep([(name, named[name]) for name in dense]),
            self.settings,
            self.horovod,
            self.connection,
            self.switches,
            self.waits,
            in_rows,
        )
        synchronizer.accelerator_of = TensorflowAccelerator
        synchronizer.missing = frozenset(
            position for position, name in enumerate(dense) if not forms[name].used
        )
        tuned = TunedVariables(
            {named[name].ref(): position for position, name in enumerate(dense)},
            frozenset(named[name].ref() for name in in_rows),
        )
        return tuned, synchronizer


def broadcast_text(horovod: Any, text: str) -> str:
    """Rank 0's text on all ranks. Horovod's own function for objects would unpickle them."""
    encoded = np.zeros(_ADDRESS_BYTES, np.uint8)
    encoded[: len(text)] = list(text.encode())
    with tf.device("CPU:0"):
        sent = horovod.broadcast(tf.constant(encoded), root_rank=0, name="autotune.address")
    return bytes(sent.numpy().tolist()).rstrip(b"\0").decode()
