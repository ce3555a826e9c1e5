"""The compressors in plain numpy, for comparison with the rewritten TensorFlow graphs.

Each takes what all ranks would send, v_r = g_r / w + e_r, as flat arrays, and returns the sum that
all ranks get and the new residual of each rank.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

from autotune.strategy_space.plan import Message
from autotune.strategy_space.strategy import ROOTED, Compressor

Sums = tuple[np.ndarray, list[np.ndarray]]
BLOCK, LEVELS = 1024, np.float32(127)
ONE = np.float32(1)


def twin(message: Message, values: Sequence[np.ndarray], starts: dict[str, np.ndarray]) -> Sums:
    if message.compressor is Compressor.INT8:
        return _int8_rooted(message, values) if message.owner is not None else _int8(values)
    if message.compressor is Compressor.TOP_K:
        return _top_k(message, values)
    if message.compressor is Compressor.POWER_SGD:
        return _power_sgd(message, values, starts)
    return np.sum(values, 0), [np.zeros_like(one) for one in values]


def _round_trip(row: np.ndarray) -> np.ndarray:
    """Encode a row of blocks as int8 and decode it."""
    blocks = -(-len(row) // BLOCK)
    length = -(-len(row) // blocks)
    assert length * blocks == len(row)
    cut = row.reshape(blocks, length)
    scale = np.abs(cut).max(1) / LEVELS
    inverse = np.divide(ONE, scale, out=np.zeros_like(scale), where=scale > 0)
    return (np.rint(cut * inverse[:, None]) * scale[:, None]).reshape(-1)


def _padded(values: np.ndarray, rows: int) -> np.ndarray:
    length = -(-len(values) // rows)
    blocks = -(-length // BLOCK)
    length = blocks * -(-length // blocks)
    padded = np.zeros((rows, length), values.dtype)
    padded.reshape(-1)[: len(values)] = values
    return padded


def _in_order(rows: Sequence[np.ndarray]) -> np.ndarray:
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _int8(values: Sequence[np.ndarray]) -> Sums:
    ranks, size = len(values), len(values[0])
    cut = [_padded(one, ranks) for one in values]
    sent = [np.stack([_round_trip(row) for row in one]) for one in cut]
    lost = [one - other for one, other in zip(cut, sent, strict=True)]
    result = np.zeros_like(cut[0])
    for shard in range(ranks):
        total = _in_order([one[shard] for one in sent])
        result[shard] = _round_trip(total)
        lost[shard][shard] += total - result[shard]
    return result.reshape(-1)[:size], [one.reshape(-1)[:size] for one in lost]


def _int8_rooted(message: Message, values: Sequence[np.ndarray]) -> Sums:
    size = len(values[0])
    cut = [_padded(one, 1)[0] for one in values]
    sent = [_round_trip(one) for one in cut]
    lost = [one - other for one, other in zip(cut, sent, strict=True)]
    total = _in_order(sent)
    result = _round_trip(total)
    assert message.owner is not None
    lost[message.owner] += total - result
    return result[:size], [one[:size] for one in lost]


def _largest(values: np.ndarray, ratio: float) -> np.ndarray:
    k = math.ceil(len(values) * ratio)
    chosen = np.argsort(-np.abs(values), kind="stable")[:k]
    picked = np.zeros_like(values)
    picked[chosen] = values[chosen]
    return picked


def _top_k(message: Message, values: Sequence[np.ndarray]) -> Sums:
    assert message.ratio is not None
    sent = [_largest(one, message.ratio) for one in values]
    lost = [one - other for one, other in zip(values, sent, strict=True)]
    total = _in_order(sent)
    if message.synchronizer not in ROOTED:
        return total, lost
    result = _largest(total, message.ratio)
    assert message.owner is not None
    lost[message.owner] = lost[message.owner] + (total - result)
    return result, lost


def _power_sgd(
    message: Message, values: Sequence[np.ndarray], starts: dict[str, np.ndarray]
) -> Sums:
    rank = message.rank
    assert rank is not None
    result, lost = np.zeros_like(values[0]), [np.zeros_like(one) for one in values]
    end = 0
    for part in message.slices:
        begin, end = end, end + part.elements
        place, columns = slice(begin, end), part.elements // part.rows
        matrices = [one[place].reshape(part.rows, columns).astype("float64") for one in values]
        if part.rows == 1 or rank * (part.rows + columns) >= part.elements:
            result[place] = np.sum(matrices, 0).reshape(-1)
            continue
        name = f"{part.variable}|{part.axis}|{part.start}|{rank}"
        if name not in starts:
            random = np.random.default_rng(zlib.crc32(name.encode()))
            first = random.standard_normal((columns, rank))
            starts[name] = first / np.linalg.norm(first, axis=0)
        basis, _ = np.linalg.qr(np.sum([one @ starts[name] for one in matrices], 0))
        factors = [one.T @ basis for one in matrices]
        total = np.sum(factors, 0)
        result[place] = (basis @ total.T).reshape(-1)
        for kept, matrix, factor in zip(lost, matrices, factors, strict=True):
            kept[place] = (matrix - basis @ factor.T).reshape(-1)
        starts[name] = total / np.linalg.norm(total, axis=0)
    return result, lost
