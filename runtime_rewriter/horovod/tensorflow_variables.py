"""The variables of a TensorFlow step, as a module whose parameters the messages of a plan name.

Only names, shapes, dtypes and gradients of the parameters are used. Their values stay untouched, so
they take no memory.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-calls

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch import Tensor, nn

from autotune.errors import InvalidInput

KERAS_VARIABLES = (
    "Horovod 0.28.1 takes no variables of Keras 3, but the gradient is asked for {name!r}, which "
    "is one; pass their TensorFlow variables: tape.gradient(loss, [variable.value for variable in "
    "model.trainable_variables]), and likewise to hvd.broadcast_variables"
)
_OF_TENSORFLOW = {
    tf.float16: torch.float16,
    tf.bfloat16: torch.bfloat16,
    tf.float32: torch.float32,
    tf.float64: torch.float64,
    tf.complex64: torch.complex64,
    tf.complex128: torch.complex128,
}


class TensorflowStep(nn.Module):
    """A parameter for each variable, in the script's order."""

    def __init__(self, variables: Sequence[tuple[str, Any]]) -> None:
        super().__init__()
        self._named: list[tuple[str, nn.Parameter]] = []
        self.parts = nn.ModuleList()
        for name, variable in variables:
            parameter = nn.Parameter(torch.empty(tuple(variable.shape), dtype=_dtype(variable)))
            self.parts.append(_Variable(parameter))
            self._named.append((name, parameter))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The variables under the script's own names, which may have any characters."""
        return iter(self._named)


class _Variable(nn.Module):
    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.weight = parameter


def check_variables(sources: Any) -> None:
    """Raise `InvalidInput` for variables of Keras 3, which Horovod cannot take."""
    for source in tf.nest.flatten(sources):
        if not hasattr(source, "ref"):
            raise InvalidInput(KERAS_VARIABLES.format(name=getattr(source, "path", str(source))))


@dataclass(frozen=True)
class GradientForm:
    """`used`: whether a rank has a gradient of a variable; `rows`: whether it is IndexedSlices."""

    used: bool
    rows: bool

    @staticmethod
    def of(gradient: Any) -> GradientForm:
        return GradientForm(gradient is not None, isinstance(gradient, tf.IndexedSlices))


def used_names(
    names: Sequence[str], ranks: Sequence[Mapping[str, GradientForm]]
) -> tuple[list[str], list[str]]:
    """The variables that have a dense gradient on any rank, and those that have rows on all ranks.

    `ranks`: the forms of each rank's gradients. Raises `InvalidInput` if no plan can have these.
    """
    dense: list[str] = []
    in_rows: list[str] = []
    unused = GradientForm(False, False)
    for name in names:
        with_rows = [n for n, forms in enumerate(ranks) if forms.get(name, unused).rows]
        if with_rows and len(with_rows) < len(ranks):
            raise InvalidInput(
                "a gradient that is rows (tf.IndexedSlices) must be rows on every rank, but those "
                f"of {name} are rows on rank {', '.join(map(str, with_rows))} only; use the "
                "variable on every rank"
            )
        if with_rows:
            in_rows.append(name)
        elif any(forms.get(name, unused).used for forms in ranks):
            dense.append(name)
    if in_rows and not dense:
        raise InvalidInput(
            "a plan needs a dense gradient, but all gradients of tape.gradient() are rows "
            f"({', '.join(in_rows[:3])}), which Horovod's own operations average; pass "
            "sparse_as_dense=True to hvd.DistributedGradientTape"
        )
    if not dense:
        raise InvalidInput("tape.gradient() gave no gradient of any variable on any rank")
    return dense, in_rows


def unique_names(variables: Sequence[Any]) -> list[str]:
    """The path of each variable's Keras variable, or its own name, with a number if it repeats."""
    paths = _keras_paths()
    names: list[str] = []
    taken: set[str] = set()
    for variable in variables:
        name = paths.get(id(variable)) or variable.name.removesuffix(":0")
        chosen, number = name, 1
        while chosen in taken:
            chosen, number = f"{name}_{number}", number + 1
        taken.add(chosen)
        names.append(chosen)
    return names


def _keras_paths() -> dict[int, str]:
    """The paths of the live variables of Keras, by the identity of their TensorFlow variables."""
    keras = sys.modules.get("keras")
    if keras is None:
        return {}
    # Not isinstance: it asks an object for its class, which runs code of lazy objects.
    live = [one for one in gc.get_objects() if issubclass(type(one), keras.Variable)]
    return {id(one.value): one.path for one in live if getattr(one, "_value", None) is not None}


def _dtype(variable: Any) -> torch.dtype:
    dtype = tf.as_dtype(variable.dtype)
    if dtype not in _OF_TENSORFLOW:
        raise InvalidInput(
            f"gradients of {dtype.name} cannot be sent, but variable {variable.name!r} has some"
        )
    return _OF_TENSORFLOW[dtype]


def to_torch(array: Any) -> Tensor:
    """A tensor on the memory of a numpy array that TensorFlow filled; a scalar is a number."""
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> Any:
    """A numpy array on the memory of a tensor, in TensorFlow's dtype."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype)
    return tensor.numpy()
