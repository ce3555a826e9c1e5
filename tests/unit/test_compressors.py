"""int8, top-k and PowerSGD without ranks: decoded values, residuals, and overflows."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autotune.errors import InvalidInput
from autotune.strategy_space.compressors import INT8_BLOCK
from autotune.strategy_space.plan import TensorSlice
from runtime_rewriter.compression import RowLayout, gains, matrix_shape, picked
from runtime_rewriter.pytorch.exchange.power_sgd import LowRank, start_tensor
from runtime_rewriter.pytorch.exchange.quantise import QuantisedRows
from runtime_rewriter.pytorch.exchange.residuals import Feedback, Residuals
from runtime_rewriter.pytorch.exchange.top_k import PickedRows, largest

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.float64]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- int8


@given(elements=st.integers(1, 10**7), rows=st.integers(1, 64))
def test_rows_cover_the_message_with_little_padding(elements: int, rows: int) -> None:
    layout = RowLayout.of(elements, rows)
    assert layout.rows == rows and layout.block <= INT8_BLOCK
    assert elements <= layout.elements < elements + rows * (layout.blocks + 1)


def sent_by(rows: QuantisedRows | PickedRows, values: Tensor) -> Tensor:
    """The received `values`, which hold the residual afterwards."""
    arrived = torch.empty_like(values)
    rows.encode_(values)
    rows.decode(arrived) if isinstance(rows, QuantisedRows) else rows.sum_into(arrived)
    return arrived


def quantised(values: Tensor, rows: int = 1) -> Tensor:
    layout = RowLayout.of(len(values), rows)
    return sent_by(QuantisedRows(layout, values.dtype, CPU), values)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("elements", "rows"), [(1, 1), (5, 4), (2500, 4), (300_000, 2)])
def test_decoded_values_and_residual_add_up_to_the_input(
    dtype: torch.dtype, elements: int, rows: int
) -> None:
    layout = RowLayout.of(elements, rows)
    values = torch.zeros(layout.elements, dtype=dtype)
    values[:elements] = noise(elements, dtype=dtype) * noise(elements, seed=1, dtype=dtype).exp()
    before = values.clone()
    arrived = sent_by(QuantisedRows(layout, dtype, CPU), values)
    blocks = (rows, layout.blocks, layout.block)
    step = before.view(blocks).abs().amax(2, keepdim=True) / 127
    assert bool((values.view(blocks).abs() <= step * 0.5001).all()), "not to the nearest level"
    roundoff = float(before.abs().amax()) * torch.finfo(dtype).eps
    torch.testing.assert_close(arrived + values, before, rtol=0, atol=roundoff)


def test_blocks_of_zeros_and_of_tiny_numbers_are_sent_as_zeros_and_kept() -> None:
    for value in (0.0, 1e-45, 1e-40):
        values = torch.full((8,), value)
        assert torch.equal(quantised(values), torch.zeros(8))
        assert torch.equal(values, torch.full((8,), value))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_decodes_to_nan_and_leaves_no_residual(bad: float) -> None:
    values = noise(3 * INT8_BLOCK)
    values[INT8_BLOCK + 7] = bad
    blocks = quantised(values).view(3, INT8_BLOCK)
    assert bool(blocks[1].isnan().all()) and bool(blocks[[0, 2]].isfinite().all())
    assert bool(values.isfinite().all()), "a residual of NaN would stay for ever"


def test_rows_are_summed_in_their_order() -> None:
    layout = RowLayout.of(5000, 1)
    parts = [noise(layout.elements, seed=seed) for seed in range(3)]
    all_of_them = QuantisedRows(layout.with_rows(3), torch.float32, CPU)
    expected, total = torch.zeros(layout.elements), torch.empty(5000)
    for row, part in enumerate(parts):
        one = QuantisedRows(layout, torch.float32, CPU)
        expected += sent_by(one, part)
        all_of_them.bytes[row] = one.bytes[0]
    all_of_them.sum_into(total)
    assert torch.equal(total, expected)


# -- top-k


def obvious_largest(values: Tensor, k: int) -> list[int]:
    """By a stable sort: the first of equal magnitudes; NaN is the largest."""
    numbers = enumerate(values.tolist())
    keys = [(0, 0.0, i) if math.isnan(v) else (1, -abs(v), i) for i, v in numbers]
    return sorted(index for _, _, index in sorted(keys)[:k])


ODD_VALUES = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, math.inf, -math.inf, math.nan, 1e-45]


@settings(deadline=None)
@given(
    values=st.lists(st.sampled_from(ODD_VALUES), min_size=1, max_size=40),
    data=st.data(),
    dtype=st.sampled_from(FLOATS),
)
def test_the_largest_are_those_of_a_stable_sort(
    values: list[float], data: st.DataObject, dtype: torch.dtype
) -> None:
    k = data.draw(st.integers(1, len(values)))
    tensor = torch.tensor(values, dtype=dtype)
    assert largest(tensor, k).tolist() == obvious_largest(tensor, k)


def test_sampling_never_changes_the_picked_elements() -> None:
    n, k = 700_001, 7001
    kinds = {
        "normal": noise(n),
        "heavy": noise(n) * (4 * noise(n, seed=1)).exp(),
        "periodic": torch.where(torch.arange(n) % 10 == 3, 5.0, 1.0) * noise(n),
        "zeros": torch.zeros(n),
        "mostly zeros": torch.where(torch.arange(n) % 1000 == 1, noise(n), 0.0),
        "sorted": torch.arange(n, dtype=torch.float32),
    }
    for kind, values in kinds.items():
        expected = np.sort(np.argsort(-values.abs().numpy(), kind="stable")[:k])
        assert np.array_equal(largest(values, k).numpy(), expected), kind


@pytest.mark.parametrize("dtype", FLOATS)
def test_picked_elements_move_and_the_others_stay(dtype: torch.dtype) -> None:
    values = noise(1001, dtype=dtype)
    before = values.clone()
    arrived = sent_by(PickedRows(1, picked(1001, 0.01), dtype, CPU), values)
    assert int((arrived != 0).sum()) == 11
    assert float(values.abs().amax()) <= float(arrived[arrived != 0].abs().amin())
    assert torch.equal(arrived + values, before)


def test_surplus_infinities_leave_no_residual() -> None:
    values = noise(100)
    values[10:30] = math.inf
    arrived = sent_by(PickedRows(1, 2, torch.float32, CPU), values)
    assert int(arrived.isinf().sum()) == 2 and bool(values.isfinite().all())


# -- PowerSGD

SHAPES = [(6, 4, 3, 3), (7,), (12, 10), (), (2, 2)]


def step(parts: list[Tensor], all_starts: list[dict[int, Tensor]], rank: int) -> list[Tensor]:
    """One exchange in this process; leaves the sum in `parts` and returns the residuals."""

    def low_rank(values: Tensor, starts: dict[int, Tensor]) -> LowRank:
        def start_of(number: int) -> Tensor:
            columns = matrix_shape(SHAPES[number])[1]
            return starts.setdefault(number, start_tensor(str(number), columns, rank, values))

        return LowRank(values, SHAPES, rank, 4, start_of)

    lows = [low_rank(*one) for one in zip(parts, all_starts, strict=True)]
    behind: list[Tensor] = []
    for one in lows:
        one.project()
    total = torch.stack([one.left for one in lows]).sum(0)
    for one, values in zip(lows, parts, strict=True):
        one.left.copy_(total)
        one.project_back()
        behind.append(values.clone())
    total = torch.stack([one.right for one in lows]).sum(0)
    for one in lows:
        one.right.copy_(total)
        one.restore()
    return behind


def test_matrices_are_factored_and_small_slices_travel_whole() -> None:
    assert gains((6, 4, 3, 3), 2)
    assert not any((gains((7,), 1), gains((), 1), gains((2, 2), 1), gains((6, 6), 3)))
    elements = sum(math.prod(shape) for shape in SHAPES)
    parts = [noise(elements, seed=seed, dtype=torch.float64) for seed in range(3)]
    before = torch.stack(parts).sum(0)
    lost = torch.stack(step(parts, [{}, {}, {}], 2)).sum(0)
    assert all(torch.equal(part, parts[0]) for part in parts)
    torch.testing.assert_close(parts[0] + lost, before, rtol=0, atol=1e-13)
    matrix, whole = slice(6 * 36), slice(6 * 36, 6 * 36 + 7)
    assert torch.equal(parts[0][whole], before[whole]) and not bool(lost[whole].any())
    assert float(lost[matrix].norm()) < float(before[matrix].norm())


def test_a_matrix_of_that_rank_is_exact_and_steps_converge_to_the_best_approximation() -> None:
    exact = torch.zeros(6 * 36 + 7 + 120 + 1 + 4, dtype=torch.float64)
    product = noise(12, 2, dtype=torch.float64) @ noise(2, 10, dtype=torch.float64)
    exact[223:343] = product.flatten()
    parts = [exact.clone()]
    starts: list[dict[Any, Any]] = [{}]
    assert float(step(parts, starts, 2)[0].abs().amax()) < 1e-13
    matrix = noise(12, 10, dtype=torch.float64)
    for _ in range(200):
        parts[0][223:343] = matrix.flatten()
        step(parts, starts, 2)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    best = u[:, :2] * s[:2] @ v[:2]
    torch.testing.assert_close(parts[0][223:343].view(12, 10), best, rtol=0, atol=1e-6)


def test_a_gradient_of_zeros_or_nan_does_not_end_the_warm_start() -> None:
    elements = 348
    starts: list[dict[Any, Any]] = [{}]
    for filling in (0.0, math.nan, math.inf, 0.0):
        parts = [torch.full((elements,), filling)]
        behind = step(parts, starts, 2)
        assert bool(behind[0].isfinite().all())
        assert all(bool(s.isfinite().all()) and bool(s.any()) for s in starts[0].values())
        assert bool(parts[0].isfinite().all()) == (filling == 0.0)
    parts = [noise(elements)]
    before = parts[0].clone()
    behind = step(parts, starts, 2)
    torch.testing.assert_close(parts[0] + behind[0], before)
    assert float(parts[0][:216].norm()) > 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 100, 300])
def test_one_element_that_is_not_finite_on_one_rank_is_seen_by_all(bad: float, place: int) -> None:
    parts = [noise(348, seed=seed) for seed in range(2)]
    parts[1][place] = bad
    step(parts, [{}, {}], 1)
    assert all(not bool(part.isfinite().all()) for part in parts)


# -- residuals

PARAMETERS = {"a": torch.zeros(4, 6), "b": torch.zeros(3)}
LEFT, RIGHT = TensorSlice("a", 8, 1, 0, 2), TensorSlice("a", 16, 1, 2, 6)


def test_a_residual_is_one_tensor_per_variable_and_freed_once_sent() -> None:
    residuals = Residuals(PARAMETERS, 0, 1)
    assert residuals.waiting(LEFT) is None and not residuals
    residuals.residual_of(LEFT).fill_(1.0)
    residuals.residual_of(RIGHT).fill_(2.0)
    whole = residuals.of("a")
    assert whole is not None and float(whole.sum()) == 8 + 32
    residuals.release(LEFT)
    assert float(whole.sum()) == 32
    residuals.release(LEFT)  # again, as every step of a plan that compresses the other slice does
    assert residuals.of("a") is not None
    residuals.release(RIGHT)
    assert residuals.of("a") is None and not residuals


def test_a_slice_that_is_kept_again_has_not_been_sent() -> None:
    residuals = Residuals(PARAMETERS, 0, 1)
    residuals.residual_of(LEFT)
    residuals.release(LEFT)
    residuals.residual_of(LEFT).fill_(1.0)
    residuals.release(RIGHT)
    waiting = residuals.waiting(LEFT)
    assert waiting is not None and float(waiting.sum()) == 8


def test_feedback_keeps_the_residuals_of_its_slices_and_releases_the_others() -> None:
    residuals = Residuals(PARAMETERS, 0, 1)
    residuals.residual_of(RIGHT).fill_(5.0)
    feedback = Feedback(residuals, [(LEFT, torch.ones(4, 2)), (RIGHT, torch.ones(4, 4))])
    feedback.feed((0,))
    feedback.keep()
    feedback.sent()
    expected = torch.cat([torch.ones(4, 2), torch.zeros(4, 4)], 1)
    assert torch.equal(torch.as_tensor(residuals.of("a")), expected)


def filled() -> Residuals:
    residuals = Residuals(PARAMETERS, 1, 2)
    residuals.residual_of(LEFT).copy_(noise(4, 2))
    residuals.factor(LEFT, 1, lambda: noise(2, 1))
    return residuals


def test_a_saved_state_is_plain_and_gives_the_same_residuals() -> None:
    saved = io.BytesIO()
    torch.save(filled().state_dict(), saved)
    saved.seek(0)
    again = Residuals(PARAMETERS, 1, 2)
    again.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(torch.as_tensor(again.of("a")), torch.as_tensor(filled().of("a")))
    assert torch.equal(again.factor(LEFT, 1, lambda: torch.zeros(2, 1)), noise(2, 1))


NARROW, DOUBLE = {"a": torch.zeros(4, 5)}, {"a": torch.zeros(4, 6, dtype=torch.float64)}
SHORT, UNKNOWN = {"a|1|0|2|1": torch.zeros(3, 1)}, {"c|1|0|2|1": torch.zeros(2, 1)}
NARROW_RULE = r"residual of 'a' must be torch.float32 of shape \(4, 5\)"


@pytest.mark.parametrize(
    ("parameters", "rank", "size", "change", "rule"),
    [
        (PARAMETERS, 0, 2, {}, "is of rank 1 of 2 and this is rank 0 of 2"),
        (PARAMETERS, 1, 4, {}, "is of rank 1 of 2 and this is rank 1 of 4"),
        ({"b": torch.zeros(3)}, 1, 2, {}, "unknown variable 'a'"),
        (NARROW, 1, 2, {}, NARROW_RULE),
        (DOUBLE, 1, 2, {}, "must be torch.float64"),
        (PARAMETERS, 1, 2, {"format": 2}, "reads compression state 1, but the state has 2"),
        (PARAMETERS, 1, 2, {"factors": SHORT}, r"must be torch.float32 of shape \(2, 1\)"),
        (PARAMETERS, 1, 2, {"factors": UNKNOWN}, "names no variable"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    parameters: dict[str, Tensor], rank: int, size: int, change: dict[str, object], rule: str
) -> None:
    residuals = Residuals(parameters, rank, size)
    with pytest.raises(InvalidInput, match=rule):
        residuals.load_state_dict(filled().state_dict() | change)
    assert not residuals
