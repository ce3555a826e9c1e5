"""Names and sizes of parameters: from a file, a recording, or the shapes in a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.limits import MAX_BYTES, MAX_VARIABLES
from autotune.parsing import parse, read_json
from autotune.profiling.formats.op_inputs import TORCH_NAMES, OpInputs
from autotune.workload import Variable, Workload

_FORMS = (
    'a number of bytes, a shape of float32 elements, or {"shape": [64, 3], "dtype": "bfloat16"}'
)


@dataclass(frozen=True)
class TensorShape:
    """A recorded tensor. `size_bytes` is None for a type of unknown size."""

    dims: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(inputs: OpInputs) -> TensorShape:
        """The first input of an operator."""
        return TensorShape(inputs.dims[0], inputs.types[0])

    @property
    def size_bytes(self) -> int | None:
        return OpInputs((self.dims,), (self.dtype,)).size_bytes()

    @property
    def torch_dtype(self) -> str:
        """As torch names the type, such as "bfloat16"; "" for one that no parameter has."""
        return TORCH_NAMES.get(self.dtype, "")


@dataclass(frozen=True)
class ParameterSize:
    """Bytes of a parameter, and its type as torch names it; "" if only the bytes are stated."""

    size_bytes: float
    dtype: str


def read_parameters(path: Path) -> dict[str, ParameterSize]:
    """Read the parameters' sizes and types, by name, in the order of the forward pass.

    The file is a JSON object: name -> bytes, shape, or shape and dtype. Raises `InvalidInput`.
    """
    data = read_json(path)
    if not isinstance(data, dict) or not data or len(data) > MAX_VARIABLES:
        raise InvalidInput(
            f"{path} must be a JSON object of 1 to {MAX_VARIABLES} parameters, each {_FORMS}"
        )
    return {name: _size(name, value, str(path)) for name, value in data.items()}


def _size(name: str, value: Any, where: str) -> ParameterSize:
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 < value <= MAX_BYTES:
            raise InvalidInput(
                f"{where}: {name!r} must have 1 to {MAX_BYTES} bytes, but has {value}"
            )
        return ParameterSize(float(value), "")
    if isinstance(value, list):
        value = {"shape": value}
    if not isinstance(value, dict) or not {"shape"} <= value.keys() <= {"shape", "dtype"}:
        raise InvalidInput(f"{where}: {name!r} must be {_FORMS}, but is {value!r:.60}")
    variable = parse(Variable, {"name": name, **value}, f"{where}, {name!r}")
    return ParameterSize(float(variable.grad_bytes), variable.dtype)


def recorded_variables(details: Mapping[str, Any] | None) -> tuple[Variable, ...] | None:
    """The variables of our recording in the order of their gradients, None without one."""
    data = None if details is None else details.get("workload")
    if data is None:
        return None
    return Workload.from_data(data, "the workload of the recording").variables


def matched_by_shape(
    variables: Sequence[Variable], shapes: Sequence[TensorShape]
) -> list[Variable] | None:
    """For each gradient the first variable of its shape that is left; None if they differ."""
    if len(variables) != len(shapes):
        return None
    left: dict[tuple[int, ...], list[Variable]] = {}
    for variable in reversed(variables):
        left.setdefault(variable.shape, []).append(variable)
    matched = []
    for shape in shapes:
        if not left.get(shape.dims):
            return None
        matched.append(left[shape.dims].pop())
    return matched
