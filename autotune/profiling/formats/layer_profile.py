"""Reads layer profiles in PipeDream's text format (msr-fiddle/pipedream, MIT; SOSP 2019, sec. 3.1).

    node3 -- Linear(in_features=512, out_features=10, bias=True) -- forward_compute_time=0.100,
        backward_compute_time=0.200, activation_size=2560.000, parameter_size=20520.000
    <tab>node2 -- node3

Times are milliseconds of one iteration, sizes are bytes. A layer with several outputs has
`activation_size=[a; b]`. A line with a tab is an edge. The parameters of a layer are one number of
bytes. If the layer's text names shapes of exactly these bytes in float32, they become its variables
(Linear, Conv2d, BatchNorm2d, LayerNorm, Embedding); otherwise it has one flat variable.

A row `Input` is the loading of the data: PipeDream's profiler reports there how long an iteration
waited for its batch. That is no part of the forward pass, but of the time before it.
"""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.files import read_text
from autotune.profiling.op_graph import Op, OpGraph
from autotune.workload import Variable

MAX_BYTES = 16 * 2**20
"""Limit of a profile; those of the largest published models are below 100 kB."""
MAX_OPS = 100_000
MAX_SHAPE = 2**40
"""Limit on the elements of one variable."""
MAX_FIGURE = 2.0**53
"""Limit on times in ms and sizes in bytes; whole numbers are exact up to here."""

_FLOAT_BYTES = 4
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
_LAYER = re.compile(
    rf"node(?P<number>[0-9]{{1,9}}) -- (?P<text>.*) -- forward_compute_time=(?P<forward>{_NUMBER}),"
    rf" backward_compute_time=(?P<backward>{_NUMBER}),"
    rf" activation_size=(?P<activation>{_NUMBER}|\[[^\]]*\]),"
    rf" parameter_size=(?P<parameters>{_NUMBER})(?:, .*)?"
)
_LAYER_FORM = (
    "nodeN -- TEXT -- forward_compute_time=MS, backward_compute_time=MS, activation_size=BYTES, "
    "parameter_size=BYTES"
)
_INPUT = re.compile(r"Input[0-9]*")
_EDGE = re.compile(r"\tnode(?P<before>[0-9]{1,9}) -- node(?P<after>[0-9]{1,9})")


@dataclass(frozen=True)
class _Layer:
    text: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: int

    @property
    def loading_ms(self) -> float:
        """Time for the data, which is in the rows of inputs."""
        loads = _INPUT.fullmatch(self.text) is not None
        return self.forward_ms + self.backward_ms if loads else 0.0


def read_layer_profile(path: Path, model: str | None = None) -> OpGraph:
    """The op graph of a profile; `model` defaults to the file's name.

    Raises `InvalidInput` with file and line.
    """
    text = read_text(path, MAX_BYTES)
    return parse_layer_profile(text, model or path.stem, str(path))


def parse_layer_profile(text: str, model: str, where: str = "profile") -> OpGraph:
    """The op graph of a profile's text, in the order of node numbers as far as edges allow."""
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
            rule = "a layer profile names each node once"
            raise InvalidInput(f"{place}: {rule}, but node{node} occurs again")
        if len(layers) == MAX_OPS:
            rule = f"a layer profile may have at most {MAX_OPS} nodes"
            raise InvalidInput(f"{place}: {rule}, but has more")
        layers[node] = layer
    for node in (node for edge in sorted(edges) for node in edge):
        if node not in layers:
            raise InvalidInput(f"{where}: an edge names node{node}, which has no line of its own")
    order = _topological(sorted(layers), edges, where)
    place_of = {node: place for place, node in enumerate(order)}
    ops = tuple(_op(node, layers[node]) for node in order)
    op_edges = tuple(sorted((place_of[a], place_of[b]) for a, b in edges))
    loading_s = math.fsum(layer.loading_ms for layer in layers.values()) * 1e-3
    return OpGraph(model, ops, op_edges, update_s=loading_s, source="measured")


def _edge(line: str, place: str) -> tuple[int, int]:
    match = _EDGE.fullmatch(line.rstrip())
    if match is None:
        rule = "an edge must be '<tab>nodeA -- nodeB'"
        raise InvalidInput(f"{place}: {rule}, but the line is {line.strip()[:80]!r}")
    return int(match["before"]), int(match["after"])


def _layer(line: str, place: str) -> tuple[int, _Layer]:
    match = _LAYER.fullmatch(line.rstrip())
    if match is None:
        rule = f"a layer must be {_LAYER_FORM!r}"
        raise InvalidInput(f"{place}: {rule}, but the line is {line.strip()[:120]!r}")
    parameter_bytes = _finite(match["parameters"], place)
    if parameter_bytes != int(parameter_bytes):
        size = match["parameters"]
        raise InvalidInput(f"{place}: parameter_size must be whole bytes, but is {size}")
    sizes = match["activation"].strip("[]").split(";")
    layer = _Layer(
        text=match["text"],
        forward_ms=_finite(match["forward"], place),
        backward_ms=_finite(match["backward"], place),
        activation_bytes=sum(_finite(size.strip(), place) for size in sizes if size.strip()),
        parameter_bytes=int(parameter_bytes),
    )
    return int(match["number"]), layer


def _finite(text: str, place: str) -> float:
    if re.fullmatch(_NUMBER, text) is None or not float(text) <= MAX_FIGURE:
        rule = f"times and sizes must be numbers from 0 to 2^53 ({MAX_FIGURE:.0f})"
        raise InvalidInput(f"{place}: {rule}, but one is {text[:40]!r}")
    return float(text)


def _topological(nodes: list[int], edges: set[tuple[int, int]], where: str) -> list[int]:
    """The order in which the layers were called: the lowest number whose inputs are done."""
    successors: dict[int, list[int]] = {node: [] for node in nodes}
    missing = dict.fromkeys(nodes, 0)
    for before, after in edges:
        successors[before].append(after)
        missing[after] += 1
    ready = [node for node in nodes if missing[node] == 0]
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for after in successors[node]:
            missing[after] -= 1
            if missing[after] == 0:
                heapq.heappush(ready, after)
    if len(order) < len(nodes):
        stuck = min(set(nodes) - set(order))
        rule = "the edges of a layer profile must have no cycle"
        raise InvalidInput(f"{where}: {rule}, but node{stuck} is in or after one")
    return order


def _op(node: int, layer: _Layer) -> Op:
    name = f"node{node}"
    kind = re.split(r"[(\s]", layer.text, maxsplit=1)[0]
    shapes = _shapes(kind, layer.text, layer.parameter_bytes // _FLOAT_BYTES)
    return Op(
        name,
        code=layer.text,
        forward_s=0.0 if layer.loading_ms else layer.forward_ms * 1e-3,
        backward_s=0.0 if layer.loading_ms else layer.backward_ms * 1e-3,
        activation_bytes=layer.activation_bytes,
        variables=tuple(Variable(f"{name}.{kind}.{part}", shape) for part, shape in shapes),
    )


def _shapes(kind: str, text: str, elements: int) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each variable that the text names, if they have `elements` together.

    Else one flat variable.
    """
    if elements == 0:
        return []
    named = _named_shapes(kind, text)
    if named is not None:
        for shapes in ([("weight", named[0]), ("bias", named[1])], [("weight", named[0])]):
            if sum(math.prod(shape) for _, shape in shapes) == elements:
                return shapes
    return [("parameters", (elements,))]


def _named_shapes(kind: str, text: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(shape of the weight, of the bias) of PyTorch's layers; None for others."""
    listed = re.findall(r"(?<![\w.])[0-9]{1,12}(?![\w.])", text)
    numbers = [min(int(number), MAX_SHAPE) for number in listed]
    if kind == "Linear":
        inputs = re.search(r"in_features=([0-9]{1,12})", text)
        outputs = re.search(r"out_features=([0-9]{1,12})", text)
        if inputs is None or outputs is None:
            return None
        return (int(outputs[1]), int(inputs[1])), (int(outputs[1]),)
    if kind == "Conv2d" and len(numbers) >= 2:
        kernel = re.search(r"kernel_size=\(([0-9]{1,6}), ([0-9]{1,6})\)", text)
        if kernel is None:
            return None
        groups = re.search(r"groups=([0-9]{1,9})", text)
        channels = numbers[0] // max(int(groups[1]) if groups else 1, 1)
        return (numbers[1], channels, int(kernel[1]), int(kernel[2])), (numbers[1],)
    if kind in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm") and numbers:
        return (numbers[0],), (numbers[0],)
    if kind == "Embedding" and len(numbers) >= 2:
        return (numbers[0], numbers[1]), ()
    return None
