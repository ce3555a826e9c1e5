"""Simulators learn what the analytic ranker misses; each part of the recipe has its effect."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotune.cluster import Cluster, Host
from autotune.costs.sync_cost import message_costs
from autotune.errors import InvalidInput
from autotune.features.compute_cost import overlap_step_s
from autotune.features.extract import extract
from autotune.features.flat import flatten
from autotune.features.raw import RAW_FEATURES
from autotune.rng import generator
from autotune.simulators.batch import Scaling, chunks, collate
from autotune.simulators.evaluation import pairwise_accuracy
from autotune.simulators.interface import Example, Simulator
from autotune.simulators.linear import linear_simulator
from autotune.simulators.registry import SIMULATORS
from autotune.simulators.residual import calibrate
from autotune.simulators.rnn import rnn_simulator
from autotune.simulators.training import (
    PAPER_RECIPE,
    TrainingRecipe,
    domain_batches,
    pairwise_ranking_loss,
    sharpness,
    split_off_validation,
    torch_threads,
    train_ranking,
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
    numbered = enumerate(zip(sizes, ready, strict=True))
    named = tuple(Variable(f"v{i:02d}", (n,), ready_s=r) for i, (n, r) in numbered)
    return Workload("small", named, (), 0.01, 0.02, 0.002)


def random_strategy(workload: Workload, seed: int, number: int) -> Strategy:
    draw = generator(seed, "strategy", number)
    served, merged = draw.random() * 0.5, int(draw.integers(1, 6))
    choices = []
    for position, variable in enumerate(workload.variables):
        compressor = Compressor.FP16 if draw.random() < 0.3 else Compressor.NONE
        if draw.random() < served:
            server = int(draw.integers(4))
            shard = Shard(Synchronizer.PARAMETER_SERVER, compressor, placement=server)
        else:
            shard = Shard(Synchronizer.ALL_REDUCE, compressor, group=position // merged)
        choices.append(VariableStrategy(variable.name, (shard,)))
    return Strategy(tuple(choices))


def measured_examples(count: int, seed: int, overhead_s=0.0, workload=None, domain="d"):
    """Return examples whose true overhead per message the analytic ranker does not know."""
    workload, cluster = workload or small_model(), four_hosts()
    examples = []
    for number in range(count):
        strategy = random_strategy(workload, seed, number)
        wanted = plan(strategy, workload, cluster.world_size)
        true_cost_s = message_costs(wanted, cluster, workload).channel_s + overhead_s
        step_s = overlap_step_s(flatten(wanted, workload), true_cost_s, workload)
        features = extract(PlannedStrategy(strategy, wanted), workload, cluster)
        examples.append(Example(features, step_s, domain))
    return examples


def features_of(examples: list[Example]):
    return [example.features for example in examples]


def accuracy(simulator: Simulator, examples: list[Example]) -> float:
    predicted = simulator.predict_step_s(features_of(examples))
    return pairwise_accuracy(predicted, [example.step_s for example in examples], TIE_BAND)


def replay_accuracy(examples: list[Example]) -> float:
    replayed = [example.features.replayed_step_s for example in examples]
    return pairwise_accuracy(replayed, [example.step_s for example in examples], TIE_BAND)


@pytest.mark.parametrize("name", ["linear", "rnn", "gat"])
def test_a_simulator_learns_the_hidden_message_overhead_that_the_replay_misses(name: str):
    examples = measured_examples(110, seed=1, overhead_s=0.01)
    training, held_out = examples[:60], examples[60:]
    simulator = SIMULATORS[name]()
    simulator.fit(training, seed=0)
    assert accuracy(simulator, held_out) > replay_accuracy(held_out) + 0.05


@pytest.fixture(scope="module")
def many() -> list[Example]:
    return measured_examples(72, seed=15, overhead_s=0.01)


def disturbed(examples: list[Example], seed: int) -> list[Example]:
    """Return examples whose truth is the replay with 5 % of noise, so nothing can be learned."""
    noise = generator(seed, "noise").normal(0, 0.05, len(examples))
    return [
        Example(example.features, (example.features.replayed_step_s or 0) * float(np.exp(by)), "d")
        for example, by in zip(examples, noise, strict=True)
    ]


@pytest.mark.parametrize("name", ["linear", "gat"])
def test_a_few_trials_do_not_cost_what_the_replay_knows(name: str, many: list[Example]):
    """With twelve noisy trials, four trainings lose at most two pairs in a hundred."""
    losses = []
    for seed in range(4):
        examples = disturbed(many, seed)
        held_out = [example for number, example in enumerate(examples) if number % 6 != seed]
        simulator = SIMULATORS[name]()
        simulator.fit(examples[seed::6], seed=seed)
        losses.append(replay_accuracy(held_out) - accuracy(simulator, held_out))
    assert np.mean(losses) < 0.02


def test_a_prior_that_outweighs_all_trials_leaves_the_ranking_to_the_start(many: list[Example]):
    """The start is the replay or, with a warm start, the earlier weights."""
    training, held_out = many[:40], many[40:]
    # A validation part would keep the start, too.
    heavy_prior = TrainingRecipe(prior_weight=1e9, validation_share=0.0, threads=1)
    simulator = linear_simulator(heavy_prior)
    simulator.fit(training, seed=0)
    assert accuracy(simulator, held_out) == pytest.approx(replay_accuracy(held_out), abs=0.01)
    simulator.recipe = TrainingRecipe(learning_rate=0.01, threads=1)
    simulator.fit(training, seed=0)
    learned = accuracy(simulator, held_out)
    assert learned > replay_accuracy(held_out) + 0.03
    simulator.recipe = heavy_prior
    simulator.fit(disturbed(training, 4), seed=0, warm_start=True)
    assert accuracy(simulator, held_out) == pytest.approx(learned, abs=0.01)


def test_sharpness_is_the_factor_that_explains_the_order_best(many: list[Example]):
    draw = generator(4, "sharpness")
    examples, factors = many[:30], [2.0 ** (step / 2) for step in range(13)]
    scores = torch.tensor(draw.normal(size=30))
    for wanted in (2.0, 8.0):
        measured = scores + torch.tensor(draw.logistic(size=30)) / wanted
        pairs = itertools.product(range(30), range(30))
        slower = [(i, j) for i, j in pairs if float(measured[j] - measured[i]) > np.log1p(TIE_BAND)]
        gaps = np.array([float(scores[i] - scores[j]) for i, j in slower])
        losses = [np.log1p(np.exp(factor * gaps)).sum() for factor in factors]
        best = factors[int(np.argmin(losses))]
        assert sharpness(scores, range(30), examples, measured, TIE_BAND) == best
    ordered = torch.arange(30, dtype=torch.float64)
    assert sharpness(ordered, range(30), examples, ordered, TIE_BAND) == 64.0
    assert sharpness(ordered, range(30), examples, torch.zeros(30), TIE_BAND) == 1.0


def test_torch_keeps_its_number_of_threads_after_training():
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        simulator = linear_simulator(TrainingRecipe(epochs=1, threads=1))
        simulator.fit(measured_examples(4, seed=14), seed=0)
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_an_untrained_simulator_ranks_exactly_as_the_replay():
    from autotune.simulators.gat import gat_simulator  # its import takes seconds

    examples = measured_examples(30, seed=2, overhead_s=0.01)
    for make in (linear_simulator, rnn_simulator, gat_simulator):
        simulator = make(TrainingRecipe(epochs=0, threads=1))
        simulator.fit(examples, seed=0)
        assert accuracy(simulator, examples) == pytest.approx(replay_accuracy(examples))


def with_feature(examples: list[Example], column: int, values: list[float]) -> list[Example]:
    """Return the examples with other values of a raw feature, one for each example."""
    changed = []
    for example, value in zip(examples, values, strict=True):
        shards = example.features.shards.copy()
        shards[:, column] = value
        changed.append(replace(example, features=replace(example.features, shards=shards)))
    return changed


@pytest.mark.parametrize("name", ["rnn", "gat"])
def test_a_feature_moves_no_prediction_before_it_varied_in_training(name: str):
    """And it does from then on."""
    column = RAW_FEATURES.index("compressor_int8")
    training = with_feature(measured_examples(30, seed=16, overhead_s=0.01), column, [0.0] * 30)
    simulator = SIMULATORS[name]()
    simulator.fit(training, seed=0)
    unseen = with_feature(training, column, [1.0] * 30)

    def moves() -> bool:
        before, after = (simulator.predict_step_s(features_of(each)) for each in (training, unseen))
        return not np.array_equal(before, after)

    assert not moves()
    slower = [replace(one, step_s=2 * one.step_s) for one in unseen[:15]]
    simulator.fit(slower + training[15:], seed=0, warm_start=True)
    assert moves()


def test_two_domains_are_learned_together_though_their_models_differ_in_size():
    first = measured_examples(40, seed=3, overhead_s=0.01, domain="a")
    second = measured_examples(40, 4, 0.01, workload=small_model(20), domain="b")
    simulator = rnn_simulator(TrainingRecipe(epochs=20, threads=1), hidden=16, layers=1)
    simulator.fit(first + second, seed=0)
    both = features_of([first[0], second[0], first[1]])
    apart = [float(simulator.predict_step_s([item])[0]) for item in both]
    np.testing.assert_allclose(simulator.predict_step_s(both), apart, rtol=1e-5)


def test_warm_start_keeps_what_was_learned_and_needs_few_epochs():
    examples = measured_examples(100, seed=5, overhead_s=0.01)
    simulator = linear_simulator(TrainingRecipe(learning_rate=0.01, epochs=100, warm_epochs=0))
    simulator.fit(examples[:60], seed=0)
    before = accuracy(simulator, examples[60:])
    assert simulator.fit(examples[:80], seed=0, warm_start=True).epochs == 0
    assert accuracy(simulator, examples[60:]) == pytest.approx(before)


def test_a_time_limit_ends_training_after_the_running_epoch():
    simulator = linear_simulator(TrainingRecipe(epochs=10_000))
    report = simulator.fit(measured_examples(20, seed=6, overhead_s=0.01), seed=0, limit_s=0.0)
    assert report.epochs == 1 and "time limit" in report.stopped


def test_equal_measurements_leave_the_ranking_of_the_replay_alone():
    features = features_of(measured_examples(10, seed=7))
    simulator = linear_simulator()
    simulator.fit([Example(item, 0.1, "d") for item in features], seed=0)
    order = np.argsort([item.replayed_step_s for item in features])
    assert (np.diff(simulator.predict_step_s(features)[order]) >= 0).all()


def test_ranking_loss_equals_its_slow_twin_and_has_no_pair_inside_the_tie_band():
    draw = generator(0, "loss")
    scores, times = draw.normal(size=9), draw.uniform(0.1, 0.2, 9)
    pairs = itertools.product(range(9), range(9))
    slower = [(i, j) for i, j in pairs if times[j] > times[i] * 1.05]
    expected = np.mean([np.log1p(np.exp(scores[i] - scores[j])) for i, j in slower])
    loss = pairwise_ranking_loss(torch.tensor(scores), torch.log(torch.tensor(times)), 0.05)
    assert float(loss) == pytest.approx(expected)
    ties = torch.log(torch.tensor([1.0, 1.001, 1.002]))
    assert pairwise_ranking_loss(torch.zeros(3), ties, 0.01) is None


def test_batches_hold_one_domain_each_and_no_lonely_example():
    examples = measured_examples(7, 8, domain="a") + measured_examples(4, 9, domain="b")
    batches = domain_batches(range(len(examples)), examples, 3, generator(0, "order"))
    for batch in batches:
        assert len({examples[index].domain for index in batch}) == 1 and len(batch) > 1
    # The seventh and the fourth are alone in their batches.
    assert len(set().union(*batches)) == sum(map(len, batches)) == 9


def test_validation_part_is_drawn_from_every_domain_and_left_out_when_tiny():
    examples = measured_examples(40, 8, domain="a") + measured_examples(5, 8, domain="b")
    training, validation = split_off_validation(examples, 0.2, seed=1)
    assert [examples[index].domain for index in validation] == ["a"] * 8
    assert sorted(training + validation) == list(range(45))


def test_a_plan_that_several_domains_measured_is_validated_or_trained_on():
    examples = measured_examples(40, 8, domain="a") + measured_examples(40, 8, domain="b")
    groups = [f"plan {number % 50}" for number in range(80)]
    grouped = [replace(one, group=name) for one, name in zip(examples, groups, strict=True)]
    training, validation = split_off_validation(grouped, 0.2, seed=1)
    assert not {groups[index] for index in training} & {groups[index] for index in validation}
    assert sorted(training + validation) == list(range(80)) and 12 <= len(validation) <= 20


def repeated(plans: int, repeats: int) -> list[Example]:
    """Return examples of each plan, repeated in turn."""
    examples = measured_examples(plans, seed=22, overhead_s=0.01)
    named = [replace(one, group=f"plan {number}") for number, one in enumerate(examples)]
    return named * repeats


def test_the_share_for_validation_counts_examples_also_of_repeated_plans():
    share = PAPER_RECIPE.validation_share
    training, validation = split_off_validation(repeated(20, 3), share, seed=0)
    assert 9 <= len(validation) <= 12 and len(training) + len(validation) == 60
    for plans, repeats in ((1, 24), (4, 6), (8, 3)):  # no two plans fit into the share
        assert split_off_validation(repeated(plans, repeats), share, 0) == (list(range(24)), [])
    assert split_off_validation(repeated(4, 1), 0.99, 0) == (list(range(4)), [])
    report = linear_simulator(TrainingRecipe(epochs=1, threads=1)).fit(repeated(1, 24), seed=0)
    assert report.epochs == 1


@pytest.mark.parametrize("name", ["rnn", "gat"])
def test_a_simulator_of_shards_names_what_examples_without_shards_lack(name: str):
    examples = measured_examples(4, seed=23)
    bare = [replace(one, features=one.features.without_shards()) for one in examples]
    for lacking in (bare, [*examples, *bare]):
        with pytest.raises(InvalidInput, match="needs the features of shards"):
            SIMULATORS[name]().fit(lacking, seed=0)


def test_training_reseeds_no_gpu(monkeypatch: pytest.MonkeyPatch):
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(1)
    linear_simulator(TrainingRecipe(epochs=1)).fit(measured_examples(4, seed=24), seed=3)
    assert seeds == [1]


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("global_mean", torch.zeros(3)),
        ("global_mean", torch.zeros(1)),
        ("shard_mean", torch.zeros(len(RAW_FEATURES), 1)),
        ("shard_mean", torch.zeros(len(RAW_FEATURES), dtype=torch.int32)),
        ("shard_std", torch.zeros(len(RAW_FEATURES))),
    ],
)
def test_a_saved_scaling_that_no_training_gives_is_refused(
    tmp_path: Path, name: str, moment: torch.Tensor
):
    simulator = linear_simulator(TrainingRecipe(epochs=1, threads=1))
    simulator.fit(measured_examples(4, seed=25), seed=0)
    simulator.save(tmp_path)
    weights = tmp_path / "weights.safetensors"
    save_file({**load_file(weights), f"scaling.{name}": moment}, weights)
    with pytest.raises(InvalidInput, match=rf"scaling\.{name} must"):
        linear_simulator().load(tmp_path)


def test_calibration_is_increasing_even_where_scores_point_the_wrong_way():
    scores = np.array([0.0, 1.0, 2.0])
    assert calibrate(scores, np.array([3.0, 2.0, 1.0]))[0] > 0
    assert calibrate(scores, np.array([1.0, 3.0, 5.0])) == pytest.approx((2.0, 1.0))
    assert calibrate(np.ones(3), np.array([1.0, 2.0, 3.0])) == pytest.approx((1.0, 1.0))


def test_predictions_are_near_the_measured_seconds():
    examples = measured_examples(60, seed=10, overhead_s=0.01)
    simulator = linear_simulator()
    simulator.fit(examples, seed=0)
    measured = np.array([example.step_s for example in examples])
    ratios = simulator.predict_step_s(features_of(examples)) / measured
    assert np.median(np.abs(ratios - 1)) < 0.15


def test_collate_places_every_shard_at_its_strategy_and_variable():
    larger = measured_examples(1, seed=11, workload=small_model(20))
    features = features_of(measured_examples(2, seed=11) + larger)
    batch = collate(features, Scaling.of(features, ["d", "d", "e"]), with_edges=True)
    assert batch.lengths.tolist() == [12, 12, 20]
    slots = [row * 20 + item.shard_variable for row, item in enumerate(features)]
    assert batch.shard_slot.tolist() == np.concatenate(slots).tolist()
    source, target = batch.shard_strategy[batch.edges]
    assert source.tolist() == target.tolist()


def test_chunks_cover_everything_once_in_order():
    many = features_of(measured_examples(3, seed=12)) * 400
    parts = list(chunks(many))
    assert [item for part in parts for item in part] == many
    assert max(len(part) for part in parts) <= 512
    assert list(chunks([])) == []


WRONG = {"epochs": -1, "batch_size": 1, "learning_rate": 0.0}
WRONG |= {"validation_share": 1.0, "prior_weight": -1.0}


@pytest.mark.parametrize(("name", "value"), WRONG.items())
def test_a_recipe_that_cannot_train_is_refused(name: str, value: float):
    with pytest.raises(InvalidInput):
        TrainingRecipe(**{name: value})  # type: ignore[arg-type]


def test_an_example_needs_a_real_measurement():
    [example] = measured_examples(1, seed=13)
    with pytest.raises(InvalidInput, match="above 0 s"):
        Example(example.features, float("nan"), "d")


def test_the_papers_recipe_lowers_the_rate_at_epochs_80_and_160_and_clips_gradients() -> None:
    """AutoSync, supplement sec. 10: Adam with 1e-3, times 0.3 at both, 200 epochs, norm 0.25."""
    examples = measured_examples(40, seed=21, overhead_s=0.01)
    times_s = torch.tensor([example.step_s for example in examples], dtype=torch.float64)
    values = (times_s / times_s.mean() - 1).mul(1e3)[:, None]
    network = torch.nn.Linear(1, 1, dtype=torch.float64)
    torch.nn.init.zeros_(network.weight)
    rates: list[float] = []
    norms: list[float] = []

    def observe(optimizer: torch.optim.Optimizer, *_: object) -> None:
        (group,) = optimizer.param_groups
        gradients = [weight.grad.norm() for weight in group["params"] if weight.grad is not None]
        rates.append(group["lr"])
        norms.append(float(torch.stack(gradients).norm()))

    hook = register_optimizer_step_pre_hook(observe)
    try:
        report = train_ranking(
            network, lambda indices: network(values[indices])[:, 0], examples, PAPER_RECIPE, 0, 200
        )
    finally:
        hook.remove()
    assert report.epochs == PAPER_RECIPE.epochs == 200
    assert rates == pytest.approx([1e-3] * 80 + [3e-4] * 80 + [9e-5] * 40)
    assert norms[0] == pytest.approx(0.25) and max(norms) < 0.25 + 1e-9
