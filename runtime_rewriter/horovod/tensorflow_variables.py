"""The variables of a TensorFlow step, as a module whose parameters the messages of a plan name.

Only names, shapes, dtypes and gradients of the parameters are used. Their values stay untouched, so
they take no memory.
"""

# mypy: untyped-calls-exclude=torch, allow-untyped-calls

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

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
    """A parameter for each variable, in the script's order. `sparse`: see `SparseVariable`."""

    def __init__(self, variables: Sequence[tuple[str, Any, bool]]) -> None:
        super().__init__()
        self._named: list[tuple[str, nn.Parameter]] = []
        self.parts = nn.ModuleList()
        for name, variable, sparse in variables:
            parameter = nn.Parameter(torch.empty(tuple(variable.shape), dtype=_dtype(variable)))
            self.parts.append(SparseVariable(parameter) if sparse else _Variable(parameter))
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


class SparseVariable(nn.Embedding):
    """A variable whose gradients are `tf.IndexedSlices`: by DDP's rule, an embedding's weight."""

    def __init__(self, parameter: nn.Parameter) -> None:
        nn.Module.__init__(self)
        self.weight, self.sparse = parameter, True


def check_variables(sources: Any) -> None:
    """Raise `InvalidInput` for variables of Keras 3, which Horovod cannot take."""
    for source in tf.nest.flatten(sources):
        if not hasattr(source, "ref"):
            raise InvalidInput(KERAS_VARIABLES.format(name=getattr(source, "path", str(source))))


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
    """A tensor on the memory of a numpy array that TensorFlow filled."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> Any:
    """A numpy array on the memory of a tensor, in TensorFlow's dtype."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype)
    return tensor.numpy()
