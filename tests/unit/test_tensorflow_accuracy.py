"""The pure parts of `benchmarks.replay_accuracy.tensorflow`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.cluster import Bend, Cluster, CollectiveFit, Host
from autotune.lowering.costs import TENSORFLOW_COSTS
from benchmarks.replay_accuracy.tensorflow import (
    TensorFlowStep,
    at_rate,
    chunked,
    served,
    slowed,
    summary,
)
from benchmarks.tensorflow_ranks.layers import layers_of
from benchmarks.transfer_order.__main__ import GAP_S, TENSORS, in_order_s, shared_s

HOSTS = tuple(Host(name, 1, 1e8, 1e-5, 1e9, 1e-6) for name in "abcd")
SIZE = 2**23


def fitted(bends: tuple[Bend, ...] = ()) -> Cluster:
    fit = CollectiveFit("all_reduce", 4, 1e-3, 2e-8, 0.01, 1, SIZE, bends=bends)
    return Cluster("even", HOSTS, fits=(fit,))


@pytest.mark.parametrize("bends", [(), (Bend(2**20, 3e-8),)])
def test_half_the_bandwidth_adds_the_time_of_the_bytes_on_the_link(bends) -> None:
    cluster = fitted(bends)
    (fit,) = at_rate(cluster, slowed(cluster, 0.5)).fits
    more_s = (
        1.5 * SIZE / 1e8 / TENSORFLOW_COSTS["payload"]
    )  # a ring of 4 carries 2 * 3 / 4 of the message
    assert fit.seconds(SIZE) == pytest.approx(cluster.fits[0].seconds(SIZE) + more_s)
    assert at_rate(cluster, cluster).fits == cluster.fits


def test_layers_keep_the_bytes_and_the_time_of_a_model() -> None:
    layers = layers_of("vgg16", 12, SIZE, 0.12)
    assert sum(4 * layer.elements for layer in layers) == pytest.approx(SIZE, rel=1e-3)
    assert sum(layer.forward_s + layer.backward_s for layer in layers) == pytest.approx(0.12)
    assert max(layer.elements for layer in layers) == max(one.elements for one in layers[-4:])


def test_groups_hold_neighbours_in_the_order_of_the_backward_pass() -> None:
    layers = layers_of("resnet50", 12, SIZE, 0.12)
    wanted = chunked("resnet50", layers, 4, 2)
    assert [len(message.slices) for message in wanted.messages] == [4, 4, 4]
    assert wanted.messages[0].slices[0].variable == "layer_11"
    assert replace(wanted, world_size=4).id != wanted.id


def test_served_plans_sum_at_owners_and_cut_variables() -> None:
    layers = layers_of("vgg16", 12, SIZE, 0.12)
    plans = served("vgg16", layers, fitted())
    for wanted in plans.values():
        elements = sum(part.elements for message in wanted.messages for part in message.slices)
        assert elements == sum(layer.elements for layer in layers)
    assert {message.owner for message in plans["one server"].messages} == {0}
    assert {message.owner for message in plans["servers"].messages} == {0, 1, 2, 3}
    assert len(plans["cut servers"].messages) > len(layers)
    assert {len(message.slices) for message in plans["reduce-scatter"].messages} == {12}


def test_errors_are_reported_apart_and_together() -> None:
    one = TensorFlowStep(
        *("even", "vgg16", "4 variables a message"),
        measured_s=1.0,
        predicted_s=1.1,
        aligned_s=1.0,
        unaligned_s=1.2,
        forward_s=(1.0, 1.0),
        backward_s=(1.0, 1.0),
        overhead=0.02,
    )
    keys = summary([one, replace(one, setting="servers", predicted_s=0.7)])
    assert keys["error_mean_tensorflow"] == pytest.approx(0.2)
    assert keys["error_mean_tensorflow_all_reduce"] == pytest.approx(0.1)
    assert keys["error_mean_tensorflow_servers"] == pytest.approx(0.3)
    assert keys["bias_tensorflow"] == pytest.approx(-0.1)


def test_tensors_arrive_in_order_or_together_and_the_last_one_at_the_same_time() -> None:
    slow, fast = 4 * GAP_S * 1e6, 0.5 * GAP_S * 1e6  # bytes, on a link of 1 MB/s
    assert in_order_s(slow, 1e6) == pytest.approx([4 * GAP_S * (n + 1) for n in range(TENSORS)])
    assert shared_s(slow, 1e6)[-1] == pytest.approx(in_order_s(slow, 1e6)[-1])
    assert shared_s(slow, 1e6)[0] > 4 * in_order_s(slow, 1e6)[0]
    assert shared_s(fast, 1e6) == pytest.approx(in_order_s(fast, 1e6))  # none meets another
