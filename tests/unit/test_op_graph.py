"""Ops and their fusion: the times of the fused workload, and the layers of the coarsened view."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autotune.errors import InvalidInput
from autotune.optimizer.coarsen import coarse_fusion, layers_of, tensor_groups
from autotune.optimizer.fused_time import LaunchGaps
from autotune.profiling.op_graph import Op, OpFusion, OpGraph, summed
from autotune.workload import Variable, Workload
from autotune.zoo.architectures import MODELS
from autotune.zoo.architectures import workload as zoo_workload
from autotune.zoo.assumed_device import AssumedDevice
from autotune.zoo.assumed_models import assumed_ops


def op(name: str, *variables: str, forward_s: float = 1.0, backward_s: float = 2.0) -> Op:
    tensors = tuple(Variable(variable, (4,)) for variable in variables)
    return Op(name, name, forward_s, backward_s, 0.0, tensors)


def branching() -> OpGraph:
    """conv - norm - relu, then two branches that are added."""
    tensors = {"input": "", "conv": "c", "norm": "n1 n2", "relu": "", "left": "l"}
    tensors |= {"left relu": "", "right": "r", "add": "", "add relu": ""}
    ops = tuple(op(name, *variables.split()) for name, variables in tensors.items())
    edges = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (3, 6), (5, 7), (6, 7), (7, 8))
    return OpGraph("branching", ops, edges)


def test_ops_without_tensors_join_their_only_input_layer() -> None:
    graph = branching()
    names = [graph.ops[number].name for number in layers_of(graph)]
    assert names == ["input", "conv", "norm", "norm", "left", "left", "right", "add", "add"]
    assert coarse_fusion(graph).backward == coarse_fusion(graph).forward == frozenset({2, 4, 7})


def test_a_fused_kernel_spans_its_first_read_to_its_last_end() -> None:
    graph = branching()
    fusion = OpFusion(frozenset({1, 2}), frozenset({1}))
    workload = graph.workload(fusion, lambda ops, back: summed(ops, back) - len(ops) + 1)
    times = {v.name: (v.ready_s, v.needed_s) for v in workload.variables}
    assert (workload.forward_s, workload.backward_s) == (7.0, 17.0)
    assert times["c"] == (15.0, 1.0) and times["n1"] == (15.0, 1.0)  # one kernel in both passes
    assert times["r"] == (6.0, 4.0)


def test_fusion_keeps_the_order_of_the_variables() -> None:
    graph = branching()
    names = [v.name for v in graph.workload().variables]
    assert names == ["r", "l", "n2", "n1", "c"]
    all_fused = OpFusion(frozenset(range(8)), frozenset(range(8)))
    assert [v.name for v in graph.workload(all_fused).variables] == names
    assert graph.workload().edges == ((0, 3), (1, 3), (2, 3), (3, 4))


def test_tensors_of_one_op_are_a_group_and_sparse_ones_are_alone() -> None:
    graph = branching()
    assert tensor_groups(graph.workload(), graph) == [[0], [1], [2, 3], [4]]
    names = ("fc.weight", "fc.bias", "emb.weight", "emb.bias", "conv.weight")
    variables = tuple(Variable(name, (4,), sparse=name == "emb.weight") for name in names)
    assert tensor_groups(Workload("m", variables)) == [[0, 1], [2], [3], [4]]


def test_launch_gaps_never_make_a_kernel_shorter_than_its_longest_part() -> None:
    gaps = LaunchGaps(gap_s=0.6, most_ops=3)
    ops: Sequence[Op] = [op(str(i)) for i in range(5)]
    assert gaps(ops[:1], False) == 1.0
    assert gaps(ops[:2], False) == pytest.approx(1.4)
    assert gaps(ops, True) == pytest.approx(10 - 1.2)  # no more than three kernels are saved
    assert LaunchGaps(gap_s=5.0)(ops[:2], True) == 2.0
    with pytest.raises(InvalidInput, match="launch gaps need"):
        LaunchGaps(gap_s=-1.0)


def test_edges_must_lead_forward_and_times_be_finite() -> None:
    with pytest.raises(InvalidInput, match="pairs i < j"):
        OpGraph("m", (op("a", "v"), op("b")), ((1, 0),))
    with pytest.raises(InvalidInput, match="finite times"):
        op("a", forward_s=float("nan"))


@pytest.mark.parametrize("name", MODELS)
def test_assumed_ops_have_the_models_variables_and_source(name: str) -> None:
    device = AssumedDevice(kernel_s=0.0)
    workload = assumed_ops(name, device=device).workload()
    assert workload.id == zoo_workload(name).id and workload.source == "assumed"
    fast = AssumedDevice(flop_per_s=1e18, memory_bytes_per_s=1e18, kernel_s=0.0)
    assert 0 < assumed_ops(name, device=fast).workload().compute_s < workload.compute_s / 1000
    assert not any(None in (v.ready_s, v.needed_s) for v in workload.variables)
    if not name.startswith("ncf"):  # any batch writes its tables in full
        double = assumed_ops(name, 2 * MODELS[name].batch_per_gpu, device).workload()
        assert 1.5 * workload.backward_s < double.backward_s <= 2 * workload.backward_s


PUBLISHED = {"resnet50": 4.09e9, "resnet101": 7.6e9, "inception-v3": 5.7e9, "vgg16": 15.5e9}
PUBLISHED |= {"densenet121": 2.87e9, "bert-base": 11.2e9}
"""Multiplications of one example's forward pass, by the papers; resnet50 by torchvision."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_assumed_arithmetic_matches_publications(name: str) -> None:
    counting = AssumedDevice(flop_per_s=2e9, memory_bytes_per_s=1e30, efficiency=1.0, kernel_s=0.0)
    forward_s = assumed_ops(name, 1, counting).workload().forward_s
    assert 1e9 * forward_s == pytest.approx(PUBLISHED[name], rel=0.08)


COUNTING_FLOP = AssumedDevice(2.0, 1e30, efficiency=1.0, kernel_s=0.0)
COUNTING_ELEMENTS = AssumedDevice(1e30, 4.0, efficiency=1.0, kernel_s=0.0)
"""Devices whose times are the multiplications, and the elements moved."""


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("transformer", ("softmax/matmul", "decoder/layer_0/encdec_attention/scores")),
        ("bert-base", ("cls/predictions/matmul", "transformer/layer_0/self_attention/mix")),
    ],
)
def test_both_operands_of_a_matrix_product_have_a_gradient(
    name: str, products: tuple[str, ...]
) -> None:
    """Also if none is a variable of the op: a table that a lookup shares, or attention."""
    ops = {op.name: op for op in assumed_ops(name, device=COUNTING_FLOP).ops}
    for product in products:
        assert not ops[product].variables
        assert ops[product].backward_s == 2 * ops[product].forward_s > 1e6


@pytest.mark.parametrize(
    ("model", "op", "full"),
    [
        ("transformer", "embedding/gather", True),
        ("bert-3l", "word_embeddings/gather", True),
        ("ncf-dense", "embedding_user/embeddings/gather", True),
        ("ncf-sparse", "embedding_user/embeddings/gather", False),
    ],
)
def test_the_gradient_of_a_dense_table_is_written_in_full(model: str, op: str, full: bool) -> None:
    ops = {one.name: one for one in assumed_ops(model, device=COUNTING_ELEMENTS).ops}
    [table] = ops[op].variables
    written = ops[op].backward_s - 2 * ops[op].forward_s
    assert written == pytest.approx(table.elements if full else 0.0)


@pytest.mark.parametrize(
    ("name", "image", "side", "channels", "kernel"),
    [("vgg16", 224, 224, 64, 3), ("resnet50", 224, 112, 64, 7), ("inception-v3", 299, 149, 32, 3)],
)
def test_the_first_convolution_reads_the_image(
    name: str, image: int, side: int, channels: int, kernel: int
) -> None:
    first = assumed_ops(name, 1, COUNTING_ELEMENTS).ops[0]
    moved = 3 * image**2 + channels * side**2 + 3 * channels * kernel**2
    assert first.forward_s == pytest.approx(moved)


def test_unknown_models_and_empty_batches_are_refused() -> None:
    with pytest.raises(InvalidInput, match="the zoo's models resnet50"):
        assumed_ops("absent")
    with pytest.raises(InvalidInput, match="at least 1, but has 0"):
        assumed_ops("vgg16", 0)
