"""The zoo against Tables 1 and 2 of AutoSync's supplement and against known architectures."""

from __future__ import annotations

import pytest

from autotune.errors import InvalidInput
from autotune.strategy_space.builders.registry import BUILDERS
from autotune.strategy_space.plan import plan
from autotune.workload import Workload
from autotune.zoo import architectures
from autotune.zoo.architectures import MODELS, workload
from autotune.zoo.clusters import CLUSTERS, single_flow

# Typed from the paper a second time: name -> task, batch per GPU, millions of parameters.
TABLE_1 = {
    "resnet50": ("image classification", 32, 23),
    "resnet101": ("image classification", 32, 45),
    "inception-v3": ("image classification", 32, 24),
    "vgg16": ("image classification", 32, 138),
    "densenet121": ("image classification", 32, 8),
    "transformer": ("machine translation", 5000, 62),
    "ncf-dense": ("collaborative filtering", 256, 122),
    "ncf-sparse": ("collaborative filtering", 256, 122),
    "bert-3l": ("language modeling", 32, 11),
    "bert-6l": ("language modeling", 32, 36),
    "bert-base": ("language modeling", 32, 110),
    "bert-large": ("language modeling", 8, 340),
}
# Name -> GPUs and Gbit/s of each node.
TABLE_2 = {
    "A1": [(1, 40)] * 16,
    "A2": [(1, 40)] * 11,
    "B1": [(4, 25)] * 2,
    "B2": [(4, 25)] * 3,
    "B3": [(4, 25)] * 4,
    "B4": [(4, 50)],
    "B5": [(4, 50)] * 2,
    "B6": [(4, 50)] * 3,
    "B7": [(4, 50)] * 4,
    "B8": [(4, 50)] * 8,
    "B9": [(1, 10), (4, 25)],
    "B10": [(4, 25), (4, 50)],
    "B11": [(4, 25), (4, 25), (4, 50), (4, 50)],
    "B12": [(1, 25), (4, 50)],
}
GPU_GB = {"titan-x": 12, "g3.4xlarge": 8, "g3.16xlarge": 8, "g4dn.2xlarge": 16, "g4dn.12xlarge": 16}


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    return {variable.name: variable.shape for variable in workload(name).variables}


def test_models_are_those_of_table_1():
    rows = {
        name: (model.task, model.batch_per_gpu, model.stated_parameters // 10**6)
        for name, model in MODELS.items()
    }
    assert rows == TABLE_1
    in_tokens = [name for name, model in MODELS.items() if model.batch_unit == "tokens"]
    assert in_tokens == ["transformer"]


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_match_the_table(name):
    model = MODELS[name]
    assert model.tolerance <= 0.05
    assert model.counted_parameters == pytest.approx(model.stated_parameters, rel=model.tolerance)


def test_parameter_counts_match_the_frameworks():
    """The documentation of Keras or torchvision states them, except the language models'.

    ResNet101: torchvision's, and a bias for each channel of Keras' convolutions. BERT: the encoder
    with its pooler, and the two heads.
    """
    known = {
        "resnet50": 25_557_032,
        "resnet101": 44_549_160 + 52_672,
        "inception-v3": 23_817_352,
        "vgg16": 138_357_544,
        "densenet121": 7_978_856,
        "bert-base": 109_482_240 + (768 * 768 + 3 * 768 + 30522) + (2 * 768 + 2),
        "bert-large": 335_141_888 + (1024 * 1024 + 3 * 1024 + 30522) + (2 * 1024 + 2),
    }
    assert {name: MODELS[name].parameters for name in known} == known


def test_only_resnet50s_stated_count_excludes_its_classifier():
    assert [name for name, model in MODELS.items() if model.not_counted is not None] == ["resnet50"]
    model = MODELS["resnet50"]
    assert model.parameters - model.counted_parameters == 2048 * 1000 + 1000


@pytest.mark.parametrize("name", MODELS)
def test_a_workload_reverses_the_forward_order_and_is_assumed(name):
    trained = workload(name)
    assert trained.variables[::-1] == MODELS[name].variables()
    assert len(trained.index) == len(trained.variables)
    assert (trained.source, trained.compute_s, trained.edges) == ("assumed", 0.0, ())
    assert Workload.from_data(trained.to_data()) == trained


def test_the_classifier_is_ready_first_and_the_stem_or_the_embeddings_last():
    assert next(iter(shapes("resnet50"))) == "predictions/bias"
    for name, last in (
        ("resnet50", "conv1_conv/kernel"),
        ("transformer", "embedding_and_softmax/weights"),
        ("bert-base", "word_embeddings/embeddings"),
    ):
        assert list(shapes(name))[-1] == last


def test_only_the_tables_of_ncf_sparse_have_sparse_gradients():
    sparse = [
        (name, variable.name)
        for name, model in MODELS.items()
        for variable in model.variables()
        if variable.sparse
    ]
    tables = ("embedding_user/embeddings", "embedding_item/embeddings")
    assert sparse == [("ncf-sparse", table) for table in tables]
    assert shapes("ncf-sparse") == shapes("ncf-dense")


def test_shapes_are_in_tensorflows_layout():
    assert shapes("resnet50")["conv1_conv/kernel"] == (7, 7, 3, 64)
    assert shapes("resnet101")["conv4_block23_2_conv/kernel"] == (3, 3, 256, 256)
    assert shapes("vgg16")["fc1/kernel"] == (25088, 4096)
    assert shapes("densenet121")["conv5_block16_1_conv/kernel"] == (1, 1, 992, 128)
    assert shapes("densenet121")["predictions/kernel"] == (1024, 1000)
    assert shapes("inception-v3")["mixed4/branch1/1/conv/kernel"] == (1, 7, 128, 128)
    assert shapes("inception-v3")["predictions/kernel"] == (2048, 1000)
    assert shapes("transformer")["embedding_and_softmax/weights"] == (33708, 512)
    assert shapes("ncf-dense")["embedding_user/embeddings"] == (2_197_225, 40)
    large = shapes("bert-large")
    assert large["word_embeddings/embeddings"] == (30522, 1024)
    assert large["transformer/layer_23/self_attention/query/kernel"] == (1024, 16, 64)
    assert large["transformer/layer_23/intermediate/kernel"] == (1024, 4096)
    assert "transformer/layer_24/output/kernel" not in large


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "resnet50": (53, 161),
        "resnet101": (104, 418),
        "inception-v3": (94, 190),
        "densenet121": (120, 364),
    }.items(),
)
def test_image_models_have_the_convolutions_of_their_names(name, expected):
    """(Convolutions, all variables)."""
    sizes = [len(shape) for shape in shapes(name).values()]
    assert (sizes.count(4), len(sizes)) == expected


@pytest.mark.parametrize(("stage", "inputs"), [(2, 64), (3, 256), (4, 512), (5, 1024)])
def test_resnet_layers_match_torch(stage, inputs):
    """Compare one bottleneck of each stage with torch's modules on the meta device."""
    from torch import nn

    width = 2 ** (stage + 4)
    expected = []
    for a, b, size in (
        (inputs, 4 * width, 1),
        (inputs, width, 1),
        (width, width, 3),
        (width, 4 * width, 1),
    ):
        kernel = nn.Conv2d(a, b, size, bias=False, device="meta").weight
        norm = nn.BatchNorm2d(b, device="meta")
        parameters = (kernel.permute(2, 3, 1, 0), *norm.parameters())
        expected += [tuple(parameter.shape) for parameter in parameters]
    block, variables = f"conv{stage}_block1_", MODELS["resnet50"].variables()
    assert [v.shape for v in variables if v.name.startswith(block)] == expected


def test_a_bert_layer_matches_torchs_encoder_layer():
    from torch import nn

    theirs = nn.TransformerEncoderLayer(1024, 16, 4096, activation="gelu", device="meta")
    variables = MODELS["bert-large"].variables()
    ours = sum(v.elements for v in variables if v.name.startswith("transformer/layer_7/"))
    assert ours == sum(parameter.numel() for parameter in theirs.parameters())


def torchvision_count(name: str) -> int:
    """The parameters of torchvision's model; Keras' Inception v3 normalizes without a scale."""
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    import torch

    extra = {"inception-v3": {"aux_logits": False, "init_weights": False}}.get(name, {})
    with torch.device("meta"):
        built = getattr(models, name.replace("-", "_"))(**extra)
    left_out = "bn.weight" if name == "inception-v3" else "no parameter"
    return sum(p.numel() for key, p in built.named_parameters() if not key.endswith(left_out))


@pytest.mark.parametrize("name", ["resnet50", "inception-v3", "vgg16", "densenet121"])
def test_parameter_counts_match_torchvision(name):
    assert torchvision_count(name) == MODELS[name].parameters


def test_clusters_are_those_of_table_2():
    for name, nodes in TABLE_2.items():
        cluster = CLUSTERS[name]
        rates = [(host.devices, host.link_bytes_per_s * 8 / 1e9) for host in cluster.hosts]
        assert rates == nodes
        assert cluster.world_size == sum(gpus for gpus, _ in nodes)
        assert cluster.source == "assumed"
    assert list(CLUSTERS) == list(TABLE_2)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_device_has_the_memory_of_its_type(name):
    for host in CLUSTERS[name].hosts:
        assert host.memory_bytes == GPU_GB[host.name.rpartition("-")[0]] * 10**9


def test_one_flow_limits_a_pair_of_aws_nodes_but_not_a_server():
    """A1 and A2 are not at AWS; B4 is one node; B9 has 10GbE anyway."""
    limited, b7 = single_flow("B7"), CLUSTERS["B7"]
    pairs = [limited.bandwidth_bytes_per_s(*ranks) for ranks in ((0, 4), (15, 0))]
    assert [*pairs, limited.ring_bytes_per_s] == [10e9 / 8] * 3
    inside_a_node = limited.bandwidth_bytes_per_s(0, 3)
    assert inside_a_node == b7.bandwidth_bytes_per_s(0, 3)
    assert limited.own_bandwidth_bytes_per_s(0) == 50e9 / 8
    assert len(limited.pair_links) == 6
    assert limited.id != b7.id
    for name in ("A1", "A2", "B4", "B9"):
        assert single_flow(name) == CLUSTERS[name]


def test_unknown_names_are_refused_with_the_known_ones():
    refusal = r"models are resnet50, .*bert-large, but 'resnet18' was asked for"
    with pytest.raises(InvalidInput, match=refusal):
        workload("resnet18")
    with pytest.raises(InvalidInput, match=r"clusters are A1, .*B12, but 'C1' was asked for"):
        single_flow("C1")


@pytest.mark.parametrize(
    ("model", "cluster"), [("bert-large", "B11"), ("ncf-sparse", "A2"), ("resnet50", "B9")]
)
@pytest.mark.parametrize("builder", BUILDERS)
def test_every_builder_gives_a_plan(builder, model, cluster):
    trained, where = workload(model), CLUSTERS[cluster]
    built = plan(BUILDERS[builder](trained, where), trained, where.world_size)
    sent = sum(part.elements for message in built.messages for part in message.slices)
    assert sent == MODELS[model].parameters


def test_hyperparameters_are_arguments():
    smaller = architectures.resnet((2, 2, 2, 2), conv_bias=False)
    assert sum(len(variable.shape) == 4 for variable in smaller) == 1 + 8 * 3 + 4
    big = architectures.transformer(6, 1024, 4096, 16)
    assert sum(variable.elements for variable in big) == pytest.approx(210e6, rel=0.01)
