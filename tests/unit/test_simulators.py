"""Simulators learn what the analytic ranker misses; each part of the recipe has its effect."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from autotune.cluster import Cluster, Host
from autotune.costs.sync_cost import message_costs
from autotune.errors import InvalidInput
from autotune.features.compute_cost import overlap_step_s
from autotune.features.extract import extract
from autotune.features.flat import flatten
from autotune.rng import generator
from autotune.simulators.batch import Scaling, chunks, collate
from autotune.simulators.evaluation import pairwise_accuracy
from autotune.simulators.gat import gat_simulator
from autotune.simulators.interface import Example, Simulator
from autotune.simulators.linear import linear_simulator
from autotune.simulators.registry import SIMULATORS
from autotune.simulators.residual import calibrate
from autotune.simulators.rnn import rnn_simulator
from autotune.simulators.training import (
    TrainingRecipe,
    domain_batches,
    pairwise_ranking_loss,
    sharpness,
    split_off_validation,
    torch_threads,
)
from autotune.strategy_space.plan import PlannedStrategy, plan
from autotune.strategy_space.strategy import (
    Compressor,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

TIE_BAND = 0.01


def four_hosts() -> Cluster:
    return Cluster("four", tuple(Host(f"h{i}", 1, 125e6, 5e-5, 10e9, 5e-6) for i in range(4)))


def small_model(variables: int = 12) -> Workload:
    sizes = generator(0, "model").integers(2_000, 200_000, variables).tolist()
    ready = np.linspace(0.002, 0.02, variables).tolist()
    return Workload(
        "small",
        tuple(
            Variable(f"v{i:02d}", (n,), ready_s=r)
            for i, (n, r) in enumerate(zip(sizes, ready, strict=True))
        ),
        (),
        0.01,
        0.02,
        0.002,
    )


def random_strategy(workload: Workload, seed: int, number: int) -> Strategy:
    draw = generator(seed, "strategy", number)
    served, merged = draw.random() * 0.5, int(draw.integers(1, 6))
    choices = []
    for position, variable in enumerate(workload.variables):
        compressor = Compressor.FP16 if draw.random() < 0.3 else Compressor.NONE
        if draw.random() < served:
            shard = Shard(
                Synchronizer.PARAMETER_SERVER, compressor, placement=int(draw.integers(4))
            )
        else:
            shard = Shard(Synchronizer.ALL_REDUCE, compressor, group=position // merged)
        choices.append(VariableStrategy(variable.name, (shard,)))
    return Strategy(tuple(choices))


def measured_examples(
    count: int,
    seed: int,
    hidden_overhead_s: float,
    workload: Workload | None = None,
    domain: str = "d",
) -> list[Example]:
    """Return examples with a true overhead per message that the analytic ranker does not know."""
    workload, cluster = workload or small_model(), four_hosts()
    examples = []
    for number in range(count):
        strategy = random_strategy(workload, seed, number)
        made = plan(strategy, workload, cluster.world_size)
        true_cost_s = message_costs(made, cluster, workload).channel_s + hidden_overhead_s
        step_s = overlap_step_s(flatten(made, workload), true_cost_s, workload)
        examples.append(
            Example(extract(PlannedStrategy(strategy, made), workload, cluster), step_s, domain)
        )
    return examples


def accuracy(simulator: Simulator, examples: list[Example]) -> float:
    predicted = simulator.predict_step_s([example.features for example in examples])
    return pairwise_accuracy(predicted, [example.step_s for example in examples], TIE_BAND)


def replay_accuracy(examples: list[Example]) -> float:
    replayed = [example.features.replayed_step_s for example in examples]
    return pairwise_accuracy(replayed, [example.step_s for example in examples], TIE_BAND)


@pytest.mark.parametrize("name", ["linear", "rnn", "gat"])
def test_a_simulator_learns_the_hidden_message_overhead_that_the_replay_misses(name: str) -> None:
    examples = measured_examples(110, seed=1, hidden_overhead_s=0.01)
    training, held_out = examples[:60], examples[60:]
    simulator = SIMULATORS[name]()
    simulator.fit(training, seed=0)
    assert accuracy(simulator, held_out) > replay_accuracy(held_out) + 0.05


@pytest.fixture(scope="module")
def many() -> list[Example]:
    return measured_examples(72, seed=15, hidden_overhead_s=0.01)


def disturbed(examples: list[Example], seed: int) -> list[Example]:
    """Return examples whose truth is the replay with 5 % of noise, so nothing can be learned."""
    noise = generator(seed, "noise").normal(0, 0.05, len(examples))
    return [
        Example(example.features, (example.features.replayed_step_s or 0) * float(np.exp(by)), "d")
        for example, by in zip(examples, noise, strict=True)
    ]


@pytest.mark.parametrize("name", ["linear", "gat"])
def test_a_few_trials_do_not_cost_what_the_replay_knows(name: str, many: list[Example]) -> None:
    """With twelve noisy trials, four trainings lose at most two pairs in a hundred."""
    losses = []
    for seed in range(4):
        examples = disturbed(many, seed)
        training = [number for number in range(len(examples)) if number % 6 == seed]
        held_out = [example for number, example in enumerate(examples) if number % 6 != seed]
        simulator = SIMULATORS[name]()
        simulator.fit([examples[number] for number in training], seed=seed)
        losses.append(replay_accuracy(held_out) - accuracy(simulator, held_out))
    assert np.mean(losses) < 0.02


def test_a_prior_that_outweighs_all_trials_leaves_the_ranking_to_the_start(
    many: list[Example],
) -> None:
    """The start is the replay or, with a warm start, the earlier weights."""
    training, held_out = many[:40], many[40:]
    held = TrainingRecipe(
        prior_weight=1e9, validation_share=0.0, threads=1
    )  # no validation part, which would keep the start too
    simulator = linear_simulator(held)
    simulator.fit(training, seed=0)
    assert accuracy(simulator, held_out) == pytest.approx(replay_accuracy(held_out), abs=0.01)
    simulator.recipe = TrainingRecipe(learning_rate=0.01, threads=1)
    simulator.fit(training, seed=0)
    learned = accuracy(simulator, held_out)
    assert learned > replay_accuracy(held_out) + 0.03
    simulator.recipe = held
    simulator.fit(disturbed(training, 4), seed=0, warm_start=True)
    assert accuracy(simulator, held_out) == pytest.approx(learned, abs=0.01)


def test_sharpness_is_the_factor_that_explains_the_order_best(many: list[Example]) -> None:
    draw = generator(4, "sharpness")
    examples = many[:30]
    scores = torch.tensor(draw.normal(size=30))
    for wanted in (2.0, 8.0):
        log_measured = scores + torch.tensor(draw.logistic(size=30)) / wanted
        found = sharpness(scores, range(30), examples, log_measured, TIE_BAND)
        factors = [2.0 ** (step / 2) for step in range(13)]
        slow = [
            sum(
                np.log1p(np.exp(factor * float(scores[i] - scores[j])))
                for i in range(30)
                for j in range(30)
                if float(log_measured[j] - log_measured[i]) > np.log1p(TIE_BAND)
            )
            for factor in factors
        ]
        assert found == factors[int(np.argmin(slow))]
    ordered = torch.arange(30, dtype=torch.float64)
    assert sharpness(ordered, range(30), examples, ordered, TIE_BAND) == 64.0
    assert sharpness(ordered, range(30), examples, torch.zeros(30), TIE_BAND) == 1.0


def test_torch_keeps_its_number_of_threads_after_training() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        linear_simulator(TrainingRecipe(epochs=1, threads=1)).fit(
            measured_examples(4, seed=14, hidden_overhead_s=0.0), seed=0
        )
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_an_untrained_simulator_ranks_exactly_as_the_replay() -> None:
    examples = measured_examples(30, seed=2, hidden_overhead_s=0.01)
    for make in (linear_simulator, rnn_simulator, gat_simulator):
        simulator = make(TrainingRecipe(epochs=0, threads=1))
        simulator.fit(examples, seed=0)
        assert accuracy(simulator, examples) == pytest.approx(replay_accuracy(examples))


def test_two_domains_are_learned_together_though_their_models_differ_in_size() -> None:
    first = measured_examples(40, seed=3, hidden_overhead_s=0.01, domain="a")
    second = measured_examples(
        40, seed=4, hidden_overhead_s=0.01, workload=small_model(20), domain="b"
    )
    simulator = rnn_simulator(TrainingRecipe(epochs=20, threads=1), hidden=16, layers=1)
    simulator.fit(first + second, seed=0)
    both = [example.features for example in (first[0], second[0], first[1])]
    apart = [float(simulator.predict_step_s([item])[0]) for item in both]
    np.testing.assert_allclose(simulator.predict_step_s(both), apart, rtol=1e-5)


def test_warm_start_keeps_what_was_learned_and_needs_few_epochs() -> None:
    examples = measured_examples(100, seed=5, hidden_overhead_s=0.01)
    recipe = TrainingRecipe(learning_rate=0.01, epochs=100, warm_epochs=0)
    simulator = linear_simulator(recipe)
    simulator.fit(examples[:60], seed=0)
    before = accuracy(simulator, examples[60:])
    report = simulator.fit(examples[:80], seed=0, warm_start=True)
    assert report.epochs == 0
    assert accuracy(simulator, examples[60:]) == pytest.approx(before)


def test_a_time_limit_ends_training_after_the_running_epoch() -> None:
    simulator = linear_simulator(TrainingRecipe(epochs=10_000, time_limit_s=0.0))
    report = simulator.fit(measured_examples(20, seed=6, hidden_overhead_s=0.01), seed=0)
    assert report.epochs == 1
    assert "time limit" in report.stopped


def test_equal_measurements_leave_the_ranking_of_the_replay_alone() -> None:
    examples = [
        Example(e.features, 0.1, "d") for e in measured_examples(10, seed=7, hidden_overhead_s=0.0)
    ]
    simulator = linear_simulator()
    simulator.fit(examples, seed=0)
    order = np.argsort([example.features.replayed_step_s for example in examples])
    predicted = simulator.predict_step_s([example.features for example in examples])
    assert (np.diff(predicted[order]) >= 0).all()


def test_ranking_loss_equals_its_slow_twin() -> None:
    draw = generator(0, "loss")
    scores, times = draw.normal(size=9), draw.uniform(0.1, 0.2, 9)
    terms = [
        np.log1p(np.exp(scores[i] - scores[j]))
        for i in range(9)
        for j in range(9)
        if times[j] > times[i] * 1.05
    ]
    loss = pairwise_ranking_loss(torch.tensor(scores), torch.log(torch.tensor(times)), 0.05)
    assert loss is not None
    assert float(loss) == pytest.approx(np.mean(terms))


def test_ranking_loss_has_no_pair_inside_the_tie_band() -> None:
    assert (
        pairwise_ranking_loss(torch.zeros(3), torch.log(torch.tensor([1.0, 1.001, 1.002])), 0.01)
        is None
    )


def test_batches_hold_one_domain_each_and_no_lonely_example() -> None:
    one = measured_examples(7, seed=8, hidden_overhead_s=0.0, domain="a")
    two = measured_examples(4, seed=9, hidden_overhead_s=0.0, domain="b")
    examples = one + two
    batches = domain_batches(range(len(examples)), examples, 3, generator(0, "order"))
    assert all(
        len({examples[index].domain for index in batch}) == 1 and len(batch) > 1
        for batch in batches
    )
    assert (
        len(set().union(*batches)) == sum(map(len, batches)) == 9
    )  # the seventh and the fourth are alone in their batches


def test_validation_part_is_drawn_from_every_domain_and_left_out_when_tiny() -> None:
    examples = measured_examples(40, seed=8, hidden_overhead_s=0.0, domain="a") + measured_examples(
        5, seed=8, hidden_overhead_s=0.0, domain="b"
    )
    training, validation = split_off_validation(examples, 0.2, seed=1)
    assert len(validation) == 8
    assert {examples[index].domain for index in validation} == {"a"}
    assert sorted(training + validation) == list(range(45))


def test_a_plan_that_several_domains_measured_is_validated_or_trained_on() -> None:
    examples = measured_examples(40, seed=8, hidden_overhead_s=0.0, domain="a") + measured_examples(
        40, seed=8, hidden_overhead_s=0.0, domain="b"
    )
    examples = [
        replace(example, group=f"plan {number % 50}") for number, example in enumerate(examples)
    ]
    training, validation = split_off_validation(examples, 0.2, seed=1)
    assert not {examples[index].group for index in training} & {
        examples[index].group for index in validation
    }
    assert sorted(training + validation) == list(range(80)) and 12 <= len(validation) <= 20


def test_calibration_is_increasing_even_where_scores_point_the_wrong_way() -> None:
    slope, _ = calibrate(np.array([0.0, 1.0, 2.0]), np.array([3.0, 2.0, 1.0]))
    assert slope > 0
    slope, intercept = calibrate(np.array([0.0, 1.0, 2.0]), np.array([1.0, 3.0, 5.0]))
    assert (slope, intercept) == pytest.approx((2.0, 1.0))
    assert calibrate(np.ones(3), np.array([1.0, 2.0, 3.0])) == pytest.approx((1.0, 1.0))


def test_predictions_are_near_the_measured_seconds() -> None:
    examples = measured_examples(60, seed=10, hidden_overhead_s=0.01)
    simulator = linear_simulator()
    simulator.fit(examples, seed=0)
    predicted = simulator.predict_step_s([example.features for example in examples])
    measured = np.array([example.step_s for example in examples])
    assert np.median(np.abs(predicted / measured - 1)) < 0.15


def test_collate_places_every_shard_at_its_strategy_and_variable() -> None:
    small = measured_examples(2, seed=11, hidden_overhead_s=0.0)
    large = measured_examples(1, seed=11, hidden_overhead_s=0.0, workload=small_model(20))
    features = [example.features for example in small + large]
    batch = collate(features, Scaling.of(features, ["d", "d", "e"]), with_edges=True)
    assert batch.lengths.tolist() == [12, 12, 20]
    expected = [
        row * 20 + variable
        for row, item in enumerate(features)
        for variable in item.shard_variable.tolist()
    ]
    assert batch.shard_slot.tolist() == expected
    assert batch.edges is not None
    assert (
        batch.shard_strategy[batch.edges[0]].tolist()
        == batch.shard_strategy[batch.edges[1]].tolist()
    )


def test_chunks_cover_everything_once_in_order() -> None:
    features = [
        example.features for example in measured_examples(3, seed=12, hidden_overhead_s=0.0)
    ]
    many = features * 400
    parts = list(chunks(many))
    assert [item for part in parts for item in part] == many
    assert max(len(part) for part in parts) <= 512
    assert list(chunks([])) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": -1},
        {"batch_size": 1},
        {"learning_rate": 0.0},
        {"validation_share": 1.0},
        {"prior_weight": -1.0},
    ],
)
def test_a_recipe_that_cannot_train_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        TrainingRecipe(**wrong)  # type: ignore[arg-type]


def test_an_example_needs_a_real_measurement() -> None:
    features = measured_examples(1, seed=13, hidden_overhead_s=0.0)[0].features
    with pytest.raises(InvalidInput, match="above 0 s"):
        Example(features, float("nan"), "d")
