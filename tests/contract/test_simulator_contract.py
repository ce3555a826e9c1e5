"""The contract of `autotune.simulators.interface.Simulator`, on ours and on a plugin's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic_job import job_spec

from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.features.extract import extract
from autotune.rng import generator
from autotune.simulators.interface import Example, Simulator
from autotune.simulators.linear import linear_simulator
from autotune.simulators.registry import SIMULATORS
from autotune.simulators.rnn import rnn_simulator
from autotune.simulators.training import TrainingRecipe
from autotune.strategy_space.plan import PlannedStrategy
from autotune.strategy_space.strategy import (
    Partition,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

RECIPE = TrainingRecipe(epochs=5, warm_epochs=2, threads=1)


def small_gat() -> Simulator:
    from autotune.simulators.gat import gat_simulator  # its import takes seconds

    return gat_simulator(RECIPE, hidden=4, heads=2)


MAKERS: dict[str, Callable[[], Simulator]] = {
    "linear": lambda: linear_simulator(RECIPE),
    "rnn": lambda: rnn_simulator(RECIPE, hidden=8, layers=2),
    "gat": small_gat,
}


@pytest.fixture
def plugin(example_plugin: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Discover the example plugin, whose entry point is a simulator."""
    monkeypatch.syspath_prepend(str(example_plugin))
    with SIMULATORS.separate():
        yield


Make = Callable[[], Simulator]


@pytest.fixture(params=[*MAKERS, "perceptron"])
def make(request: pytest.FixtureRequest, plugin: None) -> Make:
    return MAKERS.get(request.param) or SIMULATORS[request.param]


@pytest.fixture
def fitted(make: Make, examples: list[Example]) -> Simulator:
    simulator = make()
    simulator.fit(examples, seed=0)
    return simulator


def test_a_job_may_name_the_simulator_of_a_plugin(plugin: None):
    assert job_spec(simulators=("linear", "perceptron")).simulators == ("linear", "perceptron")
    with pytest.raises(InvalidInput, match="must be some of linear, rnn, gat, perceptron, but"):
        job_spec(simulators=("perceptrom",))


def split_variable(variable: Variable, draw: np.random.Generator) -> VariableStrategy:
    parts = int(draw.integers(1, 4))
    sizes = (variable.shape[0] - parts + 1,) + (1,) * (parts - 1)
    shards = tuple(
        Shard(Synchronizer.PARAMETER_SERVER, placement=int(draw.integers(2)))
        if draw.random() < 0.3
        else Shard(Synchronizer.ALL_REDUCE, group=int(draw.integers(3)))
        for _ in range(parts)
    )
    return VariableStrategy(variable.name, shards, Partition(0, sizes) if parts > 1 else None)


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """Return examples of two domains with models of different sizes; some variables are split."""
    cluster = Cluster("c", tuple(Host(name, 1, 1e8, 1e-4, 1e10, 1e-5) for name in "ab"))
    everything = []
    for domain, count in (("small", 4), ("large", 7)):
        variables = tuple(Variable(f"v{i}", (100 * (i + 1), 4)) for i in range(count))
        workload = Workload(domain, variables, (), 1e-3, 2e-3, 1e-4)
        for number in range(12):
            draw = generator(7, domain, number)
            strategy = Strategy(tuple(split_variable(variable, draw) for variable in variables))
            features = extract(PlannedStrategy.of(strategy, workload, 2), workload, cluster)
            step_s = features.analytic_step_s * float(draw.uniform(1, 1.5))
            everything.append(Example(features, step_s, domain))
    return everything


@pytest.fixture(scope="module")
def features(examples: list[Example]):
    return [example.features for example in examples]


def test_seconds_are_positive_finite_and_one_per_strategy(fitted: Simulator, features):
    predicted = fitted.predict_step_s(features)
    assert predicted.shape == (len(features),)
    assert np.isfinite(predicted).all() and (predicted > 0).all()
    assert fitted.predict_step_s([]).shape == (0,)


def test_rows_do_not_influence_one_another(fitted: Simulator, features):
    together = fitted.predict_step_s(features)
    backwards = fitted.predict_step_s(features[::-1])[::-1]
    apart = [fitted.predict_step_s([item])[0] for item in features]
    for predicted in (backwards, apart):
        np.testing.assert_allclose(predicted, together, rtol=1e-5)


def test_embeddings_have_unit_norm(fitted: Simulator, features):
    hidden = fitted.embed(features)
    assert hidden.shape[0] == len(features)
    np.testing.assert_allclose(np.linalg.norm(hidden, axis=1), 1.0, rtol=1e-5)


def test_the_seed_decides_everything_and_the_global_generator_is_left_alone(
    make: Make, examples: list[Example], features
):
    predictions = []
    for disturbance in (1, 2):
        torch.manual_seed(disturbance)
        simulator = make()
        state = torch.random.get_rng_state()
        simulator.fit(examples, seed=3)
        assert torch.equal(torch.random.get_rng_state(), state)
        predictions.append(simulator.predict_step_s(features))
    np.testing.assert_array_equal(predictions[0], predictions[1])


def test_saved_and_loaded_simulators_predict_the_same(
    make: Make, fitted: Simulator, features, tmp_path: Path
):
    other = make()
    fitted.save(tmp_path / "simulator")
    state = torch.random.get_rng_state()
    other.load(tmp_path / "simulator")
    assert torch.equal(torch.random.get_rng_state(), state)
    expected = fitted.predict_step_s(features)
    np.testing.assert_array_equal(other.predict_step_s(features), expected)
    np.testing.assert_array_equal(other.embed(features), fitted.embed(features))
    assert {file.suffix for file in (tmp_path / "simulator").iterdir()} == {".safetensors", ".json"}


def test_a_loaded_simulator_goes_on_learning(make: Make, examples: list[Example], tmp_path: Path):
    simulator, other = make(), make()
    simulator.fit(examples[:12], seed=0)
    simulator.save(tmp_path)
    other.load(tmp_path)
    assert other.fit(examples, seed=0, warm_start=True).epochs == RECIPE.warm_epochs
    assert make().fit(examples, seed=0, warm_start=True).epochs == RECIPE.epochs


def test_another_kind_of_simulator_is_not_loaded(fitted: Simulator, tmp_path: Path):
    fitted.save(tmp_path)
    for maker in (maker for name, maker in MAKERS.items() if name != fitted.name):
        with pytest.raises(InvalidInput, match="is stored"):
            maker().load(tmp_path)


def test_damaged_or_missing_weights_give_one_clear_error(
    make: Make, fitted: Simulator, tmp_path: Path
):
    fitted.save(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"not weights")
    with pytest.raises(InvalidInput, match=r"weights\.safetensors"):
        make().load(tmp_path)
    with pytest.raises(InvalidInput, match="cannot read"):
        make().load(tmp_path / "nowhere")
    (tmp_path / "weights.safetensors").unlink()
    os.mkfifo(tmp_path / "weights.safetensors")
    with pytest.raises(InvalidInput, match="must be a regular file"):
        make().load(tmp_path)


@pytest.mark.parametrize("name", ["slope", "base_scale"])
def test_a_description_that_would_turn_the_ranking_around_is_refused(
    make: Make, fitted: Simulator, tmp_path: Path, name: str
):
    fitted.save(tmp_path)
    path = tmp_path / "simulator.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, name: -data[name]}))
    with pytest.raises(InvalidInput, match="must be above 0"):
        make().load(tmp_path)


def test_a_simulator_must_learn_before_its_use(make: Make, examples, features, tmp_path: Path):
    uses = (
        lambda simulator: simulator.predict_step_s(features[:1]),
        lambda simulator: simulator.embed(features[:1]),
        lambda simulator: simulator.save(tmp_path),
    )
    for use in uses:
        with pytest.raises(InvalidInput, match="call fit or load first"):
            use(make())
    with pytest.raises(InvalidInput, match="at least 2 examples"):
        make().fit(examples[:1], seed=0)


def test_a_simulator_learns_from_as_few_as_two_examples(make: Make, examples: list[Example]):
    simulator = make()
    simulator.fit(examples[:2], seed=0)
    assert (simulator.predict_step_s([examples[5].features]) > 0).all()
