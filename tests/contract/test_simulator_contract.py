"""The contract of `autotune.simulators.interface.Simulator`, on ours and on a plugin's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic_job import job_spec

from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.features.extract import extract
from autotune.rng import generator
from autotune.simulators.gat import gat_simulator
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
MAKERS: dict[str, Callable[[], Simulator]] = {
    "linear": lambda: linear_simulator(RECIPE),
    "rnn": lambda: rnn_simulator(RECIPE, hidden=8, layers=2),
    "gat": lambda: gat_simulator(RECIPE, hidden=4, heads=2),
}


@pytest.fixture
def plugin(example_plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Discover the example plugin, whose entry point is a simulator."""
    monkeypatch.syspath_prepend(str(example_plugin))
    monkeypatch.setattr(SIMULATORS, "_plugins", None)
    monkeypatch.setattr(SIMULATORS, "_entries", dict(SIMULATORS._entries))


@pytest.fixture(params=[*MAKERS, "perceptron"])
def make(request: pytest.FixtureRequest, plugin: None) -> Callable[[], Simulator]:
    return MAKERS.get(request.param) or SIMULATORS[request.param]


def test_a_job_may_name_the_simulator_of_a_plugin(plugin: None) -> None:
    assert job_spec(simulators=("linear", "perceptron")).simulators == ("linear", "perceptron")
    with pytest.raises(InvalidInput, match="must be some of linear, rnn, gat, perceptron, but"):
        job_spec(simulators=("perceptrom",))


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """Return examples of two domains with models of different sizes; some variables are split."""
    cluster = Cluster(
        "c", (Host("a", 1, 1e8, 1e-4, 1e10, 1e-5), Host("b", 1, 1e8, 1e-4, 1e10, 1e-5))
    )
    found = []
    for domain, variables in (("small", 4), ("large", 7)):
        workload = Workload(
            domain,
            tuple(Variable(f"v{i}", (100 * (i + 1), 4)) for i in range(variables)),
            (),
            1e-3,
            2e-3,
            1e-4,
        )
        for number in range(12):
            draw = generator(7, domain, number)
            choices = []
            for variable in workload.variables:
                parts = int(draw.integers(1, 4))
                sizes = (variable.shape[0] - parts + 1,) + (1,) * (parts - 1)
                shards = tuple(
                    Shard(Synchronizer.PARAMETER_SERVER, placement=int(draw.integers(2)))
                    if draw.random() < 0.3
                    else Shard(Synchronizer.ALL_REDUCE, group=int(draw.integers(3)))
                    for _ in range(parts)
                )
                choices.append(
                    VariableStrategy(
                        variable.name, shards, Partition(0, sizes) if parts > 1 else None
                    )
                )
            strategy = Strategy(tuple(choices))
            features = extract(PlannedStrategy.of(strategy, workload, 2), workload, cluster)
            found.append(
                Example(features, features.analytic_step_s * float(draw.uniform(1, 1.5)), domain)
            )
    return found


def test_seconds_are_positive_finite_and_one_per_strategy(
    make: Callable[[], Simulator], examples: list[Example]
) -> None:
    simulator = make()
    simulator.fit(examples, seed=0)
    predicted = simulator.predict_step_s([example.features for example in examples])
    assert predicted.shape == (len(examples),)
    assert np.isfinite(predicted).all()
    assert (predicted > 0).all()
    assert simulator.predict_step_s([]).shape == (0,)


def test_rows_do_not_influence_one_another(
    make: Callable[[], Simulator], examples: list[Example]
) -> None:
    simulator = make()
    simulator.fit(examples, seed=0)
    features = [example.features for example in examples]
    together = simulator.predict_step_s(features)
    np.testing.assert_allclose(simulator.predict_step_s(features[::-1])[::-1], together, rtol=1e-5)
    np.testing.assert_allclose(
        [simulator.predict_step_s([item])[0] for item in features], together, rtol=1e-5
    )


def test_embeddings_have_unit_norm(make: Callable[[], Simulator], examples: list[Example]) -> None:
    simulator = make()
    simulator.fit(examples, seed=0)
    hidden = simulator.embed([example.features for example in examples])
    assert hidden.shape[0] == len(examples)
    np.testing.assert_allclose(np.linalg.norm(hidden, axis=1), 1.0, rtol=1e-5)


def test_the_seed_decides_everything_and_the_global_generator_is_left_alone(
    make: Callable[[], Simulator], examples: list[Example]
) -> None:
    features = [example.features for example in examples]
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
    make: Callable[[], Simulator], examples: list[Example], tmp_path: Path
) -> None:
    features = [example.features for example in examples]
    simulator, other = make(), make()
    simulator.fit(examples, seed=0)
    simulator.save(tmp_path / "simulator")
    state = torch.random.get_rng_state()
    other.load(tmp_path / "simulator")
    assert torch.equal(torch.random.get_rng_state(), state)
    np.testing.assert_array_equal(
        other.predict_step_s(features), simulator.predict_step_s(features)
    )
    np.testing.assert_array_equal(other.embed(features), simulator.embed(features))
    assert {file.suffix for file in (tmp_path / "simulator").iterdir()} == {".safetensors", ".json"}


def test_a_loaded_simulator_goes_on_learning(
    make: Callable[[], Simulator], examples: list[Example], tmp_path: Path
) -> None:
    simulator, other = make(), make()
    simulator.fit(examples[:12], seed=0)
    simulator.save(tmp_path)
    other.load(tmp_path)
    assert other.fit(examples, seed=0, warm_start=True).epochs == RECIPE.warm_epochs
    assert make().fit(examples, seed=0, warm_start=True).epochs == RECIPE.epochs


def test_another_kind_of_simulator_is_not_loaded(
    make: Callable[[], Simulator], examples: list[Example], tmp_path: Path
) -> None:
    simulator = make()
    simulator.fit(examples, seed=0)
    simulator.save(tmp_path)
    others = [maker() for name, maker in MAKERS.items() if name != simulator.name]
    for other in others:
        with pytest.raises(InvalidInput, match="is stored"):
            other.load(tmp_path)


def test_damaged_or_missing_weights_give_one_clear_error(
    make: Callable[[], Simulator], examples: list[Example], tmp_path: Path
) -> None:
    simulator = make()
    simulator.fit(examples, seed=0)
    simulator.save(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"not weights")
    with pytest.raises(InvalidInput, match=r"weights\.safetensors"):
        make().load(tmp_path)
    with pytest.raises(InvalidInput, match="cannot read"):
        make().load(tmp_path / "nowhere")


def test_before_it_has_learned_it_says_so(
    make: Callable[[], Simulator], examples: list[Example], tmp_path: Path
) -> None:
    features = [examples[0].features]
    for use in (
        lambda: make().predict_step_s(features),
        lambda: make().embed(features),
        lambda: make().save(tmp_path),
    ):
        with pytest.raises(InvalidInput, match="call fit or load first"):
            use()
    with pytest.raises(InvalidInput, match="at least 2 examples"):
        make().fit(examples[:1], seed=0)


def test_it_learns_from_as_few_as_two_examples(
    make: Callable[[], Simulator], examples: list[Example]
) -> None:
    simulator = make()
    simulator.fit(examples[:2], seed=0)
    assert (simulator.predict_step_s([examples[5].features]) > 0).all()
