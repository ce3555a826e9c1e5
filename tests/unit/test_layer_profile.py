"""Layer profiles in PipeDream's format are read, or refused with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.errors import InvalidInput
from autotune.profiling.formats.layer_profile import (
    MAX_BYTES,
    parse_layer_profile,
    read_layer_profile,
)

DATA = (
    Path(os.environ.get("AUTOTUNE_REFERENCE_DATA", Path(__file__).parents[2] / "../shared/data"))
    / "layer_profiles"
)


def line(
    node: int,
    text: str,
    forward: str = "1.0",
    backward: str = "2.0",
    activation: str = "8.0",
    parameters: str = "0.0",
) -> str:
    times = f"forward_compute_time={forward}, backward_compute_time={backward}"
    sizes = f"activation_size={activation}, parameter_size={parameters}"
    return f"node{node} -- {text} -- {times}, {sizes}"


LINEAR = "Linear(in_features=4, out_features=2, bias=True)"
CONV = "Conv2d(3, 8, kernel_size=(3, 5), stride=(1, 1), groups=1, bias=False)"
NORM = "BatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True)"
SMALL = "\n".join(
    [
        line(3, LINEAR, "0.5", "1.5", "16.0", "40.000"),
        line(1, CONV, parameters="1440"),
        line(2, NORM, activation="[4.0; 6.5]", parameters="64"),
        line(4, "Strange(7)", parameters="28.000"),
        *(f"\tnode{n} -- node{n + 1}" for n in (1, 2, 3)),
    ]
)


def test_layers_become_ops_in_execution_order_with_times_in_seconds() -> None:
    graph = parse_layer_profile(SMALL, "small")
    assert [op.name for op in graph.ops] == ["node1", "node2", "node3", "node4"]
    assert (graph.ops[2].forward_s, graph.ops[2].backward_s) == (0.5e-3, 1.5e-3)
    assert graph.ops[1].activation_bytes == 10.5
    assert graph.edges == ((0, 1), (1, 2), (2, 3))
    assert graph.source == "measured"


def test_shapes_come_from_the_text_where_they_need_the_stated_bytes() -> None:
    graph = parse_layer_profile(SMALL, "small")
    shapes = [[v.shape for v in op.variables] for op in graph.ops]
    assert shapes == [[(8, 3, 3, 5)], [(8,), (8,)], [(2, 4), (2,)], [(7,)]]
    other = parse_layer_profile(line(1, LINEAR, parameters="44.0"), "other")
    assert [v.shape for v in other.ops[0].variables] == [(11,)]


def test_the_workload_has_gradients_in_backward_order_and_reads_in_forward_order() -> None:
    workload = parse_layer_profile(SMALL, "small").workload()
    variables = workload.variables
    assert [v.name.split(".")[0][-1] for v in variables] == list("433221")
    ready_s = [2.0e-3, 3.5e-3, 3.5e-3, 5.5e-3, 5.5e-3, 7.5e-3]
    assert [v.ready_s for v in variables] == pytest.approx(ready_s)
    needed_s = [2.5e-3, 2.0e-3, 2.0e-3, 1.0e-3, 1.0e-3, 0.0]
    assert [v.needed_s for v in variables] == pytest.approx(needed_s)
    assert variables[-1].needed_s == 0.0
    assert (workload.forward_s, workload.backward_s) == pytest.approx((3.5e-3, 7.5e-3))


def test_a_row_of_inputs_is_the_loading_of_data_before_the_forward_pass() -> None:
    rows = [line(1, "Input0", "7.0", "0.5"), line(2, "Input", "2.0", "0.0"), line(3, "Inputs")]
    graph = parse_layer_profile("\n".join([*rows, line(4, "A", parameters="4")]), "loading")
    workload = graph.workload()
    assert [(op.forward_s, op.backward_s) for op in graph.ops[:2]] == [(0.0, 0.0)] * 2
    assert workload.update_s == pytest.approx(9.5e-3)
    assert (workload.forward_s, workload.backward_s) == pytest.approx((2e-3, 4e-3))


SIZED = line(1, "A", parameters="4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "line 1: a layer must be"),
        (f"{SIZED}\n{line(1, 'B')}", "line 2: .* names each node once, but node1"),
        (line(1, "A", forward="-1"), "a layer must be"),
        (line(1, "A", forward="1e999", parameters="4"), "numbers from 0"),
        (line(1, "A", forward="nan"), "a layer must be"),
        (line(1, "A", activation="[1; x]"), "numbers from 0"),
        (line(1, "A", parameters="4.5"), "whole bytes"),
        (f"{SIZED}\n\tnode1 - node2", "an edge must be"),
        (f"{SIZED}\n\tnode1 -- node2", "node2, which has no line"),
        (f"{SIZED}\n{line(2, 'B')}\n\tnode1 -- node2\n\tnode2 -- node1", "no cycle"),
        (line(1, "A"), "needs an op with a variable"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_layer_profile(text, "broken")


def test_files_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_text(SMALL)
    assert read_layer_profile(path).model == "large"
    with path.open("r+b") as file:
        file.truncate(MAX_BYTES + 1)  # sparse: it takes no room
    with pytest.raises(InvalidInput, match=f"at most {MAX_BYTES} bytes"):
        read_layer_profile(path)
    with pytest.raises(InvalidInput, match="cannot read"):
        read_layer_profile(tmp_path / "none.txt")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="UTF-8"):
        read_layer_profile(path)


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("vgg16", 138_357_544, 32),
        ("resnet50", 25_557_032, 161),
        ("inception_v3", None, 292),
        ("gnmt", None, None),
        ("densenet121", None, 364),
    ],
)
def test_published_profiles_have_the_parameters_of_their_models(
    name: str, parameters: int | None, tensors: int | None
) -> None:
    if not DATA.is_dir():
        pytest.skip(f"the reference data are not at {DATA}; set AUTOTUNE_REFERENCE_DATA")
    workload = read_layer_profile(DATA / f"{name}.txt").workload()
    assert parameters is None or sum(v.elements for v in workload.variables) == parameters
    assert tensors is None or len(workload.variables) == tensors
    assert workload.source == "measured"
    loading_s = {"vgg16": 17.972e-3, "resnet50": 18.962e-3, "inception_v3": 21.7e-3, "gnmt": 0.0}
    assert workload.update_s == pytest.approx(loading_s.get(name, 9.085e-3))
    ready = [v.ready_s or 0.0 for v in workload.variables]
    assert ready == sorted(ready) and ready[-1] <= workload.backward_s * (1 + 1e-9)
