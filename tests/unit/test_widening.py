"""A simulator of before the latest raw features predicts what it predicted then."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_simulators import features_of, measured_examples

from autotune.errors import InvalidInput
from autotune.features.raw import RAW_FEATURES
from autotune.simulators.registry import SIMULATORS
from autotune.simulators.widening import LATER_FEATURES

OLD = [at for at, name in enumerate(RAW_FEATURES) if name not in LATER_FEATURES]


@pytest.mark.parametrize("name", ["linear", "rnn", "gat"])
def test_a_simulator_without_the_later_features_predicts_the_same(tmp_path, name: str) -> None:
    examples = measured_examples(12, 0)
    simulator = SIMULATORS[name]()
    simulator.fit(examples, 0)
    simulator.save(tmp_path)
    forget_features(tmp_path)
    loaded = SIMULATORS[name]()
    loaded.load(tmp_path)
    expected = simulator.predict_step_s(features_of(examples))
    assert loaded.predict_step_s(features_of(examples)) == pytest.approx(expected, rel=1e-6)


def test_other_features_are_refused(tmp_path) -> None:
    simulator = SIMULATORS["linear"]()
    simulator.fit(measured_examples(12, 0), 0)
    simulator.save(tmp_path)
    path = tmp_path / "simulator.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "raw_features": stored["raw_features"][1:]}))
    with pytest.raises(InvalidInput, match="features that differ"):
        SIMULATORS["linear"]().load(tmp_path)


def forget_features(folder) -> None:
    """Leave out the later features, as an earlier version stored a simulator."""
    description, weights = folder / "simulator.json", folder / "weights.safetensors"
    stored = json.loads(description.read_text())
    stored["raw_features"] = [RAW_FEATURES[at] for at in OLD]
    description.write_text(json.dumps(stored))
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        for axis, size in enumerate(tensor.shape):
            if size == len(RAW_FEATURES):
                tensors[name] = tensors[name].index_select(axis, torch.tensor(OLD)).contiguous()
    save_file(tensors, weights)
