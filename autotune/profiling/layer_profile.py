"""Layer profiles in the text format of PipeDream (msr-fiddle/pipedream, MIT; SOSP 2019, sec. 3.1): layer graphs that others measured.

    node3 -- Linear(in_features=512, out_features=10, bias=True) -- forward_compute_time=0.100, backward_compute_time=0.200,
        activation_size=2560.000, parameter_size=20520.000
    <tab>node2 -- node3

Times are milliseconds of one iteration, sizes bytes; a layer of several outputs has `activation_size=[a; b]`. A line with a tab is an
edge. A layer's parameters are one number of bytes. Where the text of the layer names shapes that need exactly these bytes in float32,
they are its variables (Linear, Conv2d, BatchNorm2d, LayerNorm, Embedding); otherwise it has one flat variable.
"""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.profiling.op_graph import Op, OpGraph
from autotune.workload import Variable

MAX_BYTES = 16 * 2**20
"""Of a profile; those of the largest published models are below 100 kB."""
MAX_OPS = 100_000
MAX_SHAPE = 2**40
"""Elements of one variable."""

_FLOAT_BYTES = 4
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
_LAYER = re.compile(
    rf"node(?P<number>[0-9]{{1,9}}) -- (?P<text>.*) -- forward_compute_time=(?P<forward>{_NUMBER}), "
    rf"backward_compute_time=(?P<backward>{_NUMBER}), activation_size=(?P<activation>{_NUMBER}|\[[^\]]*\]), "
    rf"parameter_size=(?P<parameters>{_NUMBER})(?:, .*)?"
)
_EDGE = re.compile(r"\tnode(?P<before>[0-9]{1,9}) -- node(?P<after>[0-9]{1,9})")


@dataclass(frozen=True)
class _Layer:
    text: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: int


def read_layer_profile(path: Path, model: str | None = None) -> OpGraph:
    """The op graph of a profile; `model` is its name, by default the file's. Raises `InvalidInput`, naming file and line."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidInput(
            f"a layer profile must be a file that can be read, but {path}: {error.strerror}"
        ) from error
    if len(raw) > MAX_BYTES:
        raise InvalidInput(
            f"a layer profile may have at most {MAX_BYTES} bytes, but {path} has more"
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"a layer profile must be UTF-8 text, but {path} is not (byte {error.start})"
        ) from error
    return parse_layer_profile(text, model or path.stem, str(path))


def parse_layer_profile(text: str, model: str, where: str = "profile") -> OpGraph:
    """The same from the text. The ops stand in the order of their node numbers as far as the edges allow."""
    layers: dict[int, _Layer] = {}
    edges: set[tuple[int, int]] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        if line.startswith("\t"):
            edges.add(_edge(line, place))
            continue
        node, layer = _layer(line, place)
        if node in layers:
            raise InvalidInput(
                f"{place}: a layer profile names each node once, but node{node} occurs again"
            )
        if len(layers) == MAX_OPS:
            raise InvalidInput(
                f"{place}: a layer profile may have at most {MAX_OPS} nodes, but has more"
            )
        layers[node] = layer
    for node in (node for edge in sorted(edges) for node in edge):
        if node not in layers:
            raise InvalidInput(f"{where}: an edge names node{node}, which has no line of its own")
    order = _topological(sorted(layers), edges, where)
    place_of = {node: place for place, node in enumerate(order)}
    ops = tuple(_op(node, layers[node]) for node in order)
    return OpGraph(
        model, ops, tuple(sorted((place_of[a], place_of[b]) for a, b in edges)), source="measured"
    )


def _edge(line: str, place: str) -> tuple[int, int]:
    found = _EDGE.fullmatch(line.rstrip())
    if found is None:
        raise InvalidInput(
            f"{place}: an edge must be '<tab>nodeA -- nodeB', but the line is {line.strip()[:80]!r}"
        )
    return int(found["before"]), int(found["after"])


def _layer(line: str, place: str) -> tuple[int, _Layer]:
    found = _LAYER.fullmatch(line.rstrip())
    if found is None:
        form = "nodeN -- TEXT -- forward_compute_time=MS, backward_compute_time=MS, activation_size=BYTES, parameter_size=BYTES"
        raise InvalidInput(
            f"{place}: a layer must be {form!r}, but the line is {line.strip()[:120]!r}"
        )
    parameters = _finite(found["parameters"], place)
    if parameters != int(parameters):
        raise InvalidInput(
            f"{place}: parameter_size must be whole bytes, but is {found['parameters']}"
        )
    sizes = found["activation"].strip("[]").split(";")
    activation = sum(_finite(size.strip(), place) for size in sizes if size.strip())
    layer = _Layer(
        found["text"],
        _finite(found["forward"], place),
        _finite(found["backward"], place),
        activation,
        int(parameters),
    )
    return int(found["number"]), layer


def _finite(text: str, place: str) -> float:
    if re.fullmatch(_NUMBER, text) is None or not math.isfinite(float(text)):
        raise InvalidInput(
            f"{place}: times and sizes must be finite numbers of at least 0, but one is {text[:40]!r}"
        )
    return float(text)


def _topological(nodes: list[int], edges: set[tuple[int, int]], where: str) -> list[int]:
    """Of the nodes whose inputs are done the lowest number first: the order in which the layers were called."""
    after: dict[int, list[int]] = {node: [] for node in nodes}
    missing = dict.fromkeys(nodes, 0)
    for before, behind in edges:
        after[before].append(behind)
        missing[behind] += 1
    ready = [node for node in nodes if missing[node] == 0]
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for behind in after[node]:
            missing[behind] -= 1
            if missing[behind] == 0:
                heapq.heappush(ready, behind)
    if len(order) < len(nodes):
        stuck = sorted(set(nodes) - set(order))[0]
        raise InvalidInput(
            f"{where}: the edges of a layer profile must have no cycle, but node{stuck} is in or behind one"
        )
    return order


def _op(node: int, layer: _Layer) -> Op:
    name = f"node{node}"
    code = re.split(r"[(\s]", layer.text, maxsplit=1)[0]
    variables = tuple(
        Variable(f"{name}.{code}.{part}", shape)
        for part, shape in _shapes(code, layer.text, layer.parameter_bytes // _FLOAT_BYTES)
    )
    return Op(
        name,
        layer.text,
        layer.forward_ms * 1e-3,
        layer.backward_ms * 1e-3,
        layer.activation_bytes,
        variables,
    )


def _shapes(code: str, text: str, elements: int) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the variables that the layer's text names, if they have `elements` in all; else one flat variable."""
    if elements == 0:
        return []
    named = _named_shapes(code, text)
    if named is not None:
        for shapes in ([("weight", named[0]), ("bias", named[1])], [("weight", named[0])]):
            if sum(math.prod(shape) for _, shape in shapes) == elements:
                return shapes
    return [("parameters", (elements,))]


def _named_shapes(code: str, text: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(shape of the weight, of the bias) by PyTorch's layers; None for others."""
    numbers = [
        min(int(found), MAX_SHAPE) for found in re.findall(r"(?<![\w.])[0-9]{1,12}(?![\w.])", text)
    ]
    if code == "Linear":
        inputs, outputs = (
            re.search(r"in_features=([0-9]{1,12})", text),
            re.search(r"out_features=([0-9]{1,12})", text),
        )
        return (
            ((int(outputs[1]), int(inputs[1])), (int(outputs[1]),)) if inputs and outputs else None
        )
    if code == "Conv2d" and len(numbers) >= 2:
        kernel = re.search(r"kernel_size=\(([0-9]{1,6}), ([0-9]{1,6})\)", text)
        groups = re.search(r"groups=([0-9]{1,9})", text)
        if kernel is None:
            return None
        return (
            numbers[1],
            numbers[0] // max(int(groups[1]) if groups else 1, 1),
            int(kernel[1]),
            int(kernel[2]),
        ), (numbers[1],)
    if code in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm") and numbers:
        return (numbers[0],), (numbers[0],)
    if code == "Embedding" and len(numbers) >= 2:
        return (numbers[0], numbers[1]), ()
    return None
