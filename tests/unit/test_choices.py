"""Choices in turn: every combination once, and any first ones a fair sample."""

from __future__ import annotations

from collections import Counter

from autotune.rng import generator
from autotune.strategy_space.moves.choices import Choices, InTurn


def answers(choices: Choices) -> tuple[int, ...]:
    """Ask three questions; the number of options and of questions depends on the answers."""
    first = choices.pick(5)
    if first == 4:
        return (first,)
    second = choices.pick(1 + 2 * first)
    return first, second, choices.pick(3)


def test_every_combination_comes_once() -> None:
    given = [answers(choices) for choices in InTurn(generator(0))]
    every = {(a, b, c) for a in range(4) for b in range(1 + 2 * a) for c in range(3)} | {(4,)}
    assert len(given) == len(every) and set(given) == every


def test_options_take_turns_until_they_have_no_further_combination() -> None:
    given = [answers(choices) for choices in InTurn(generator(0))]
    assert len({first for first, *_ in given[:5]}) == 5
    assert len({first for first, *_ in given[5:9]}) == 4  # (4,) is over after its turn
    of_last = [second for first, *rest in given if first == 3 for second in rest[:1]]
    assert set(Counter(of_last[:7]).values()) == {1}


def test_a_run_without_a_question_is_the_only_one() -> None:
    assert len([None for _ in InTurn(generator(0))]) == 1


def test_the_order_depends_on_the_generator_alone() -> None:
    orders = [[answers(choices) for choices in InTurn(generator(seed))] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
