"""Compression of gradients by mixed precision and by the other compressors of a space."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autotune.errors import InvalidInput
from autotune.optimizer.edits import like
from autotune.optimizer.state import CriticalPath, State
from autotune.strategy_space.plan import Message
from autotune.strategy_space.space import CompressorSetting
from autotune.strategy_space.strategy import CASTS, Shard, SparseHandling

PORTIONS = 2
"""Proposed settings of a compressor, the shortest t_sync first."""


@dataclass(frozen=True)
class MixedPrecision:
    """Send gradients as fp16 or bf16, all of them or those on the critical path.

    `compute_factor`: time of the computation in mixed precision by its time in full precision, as
    the caller measured it. No rule of thumb replaces it, since it depends on the device and the
    model. Only the script can change the computation; states that assume the factor state it.
    """

    compute_factor: float | None = None

    name = "mixed precision"

    def __post_init__(self) -> None:
        if self.compute_factor is not None and not 0 < self.compute_factor < float("inf"):
            raise InvalidInput(
                "a measured factor of the computation must be finite and above 0, "
                f"but is {self.compute_factor}"
            )

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        for kind in path.problem.space.compressors:
            if kind not in CASTS:
                continue
            for portion in (range(len(path.plan.messages)), path.messages):
                shards = _compressed(path, portion, CompressorSetting(kind))
                if not shards:
                    continue
                cast = state.with_strategy(like(state, path.problem, shards))
                yield cast
                factor = self.compute_factor
                if factor is not None and state.compute_factor == 1:
                    note = (
                        f"computation in mixed precision takes {factor:g} of its time, "
                        "as the caller measured"
                    )
                    yield replace(cast, compute_factor=factor, assumed=(*state.assumed, note))


class ErrorFeedback:
    """Use compressors with error feedback (int8, top-k, PowerSGD) if they shorten t_sync."""

    name = "error feedback compression"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        for kind in path.problem.space.compressors:
            if not kind.error_feedback:
                continue
            ranked: list[tuple[float, int, dict[int, Shard]]] = []
            for setting in path.problem.space.settings_of(kind):
                shards = {
                    n: shard
                    for n, shard in _compressed(path, path.messages, setting).items()
                    if self._shorter(path, n, shard)
                }
                gain_s = sum(
                    path.sync_s([path.plan.messages[n]])
                    - path.sync_s([_as(path.plan.messages[n], s)])
                    for n, s in shards.items()
                )
                ranked.append((-gain_s, len(ranked), shards))
            for _, _, shards in sorted(ranked)[:PORTIONS]:
                if shards:
                    yield state.with_strategy(like(state, path.problem, shards))

    @staticmethod
    def _shorter(path: CriticalPath, number: int, shard: Shard) -> bool:
        message = path.plan.messages[number]
        return path.sync_s([_as(message, shard)]) < path.sync_s([message])


def _compressed(
    path: CriticalPath, numbers: Iterable[int], setting: CompressorSetting
) -> dict[int, Shard]:
    """The messages that can be compressed this way and are not yet, each with its new shard.

    Only the compressor differs, and a direct exchange that it needs whole has one piece.
    """
    shards = {}
    for number in numbers:
        message = path.plan.messages[number]
        allowed = setting.compressor in path.problem.space.compressors_for(message.dtype)
        if (
            allowed
            and message.sparse is SparseHandling.DENSE
            and setting != (message.compressor, message.ratio, message.rank)
        ):
            shard = Shard(
                message.synchronizer,
                placement=message.owner,
                hierarchical=message.hierarchical,
                shares=message.shares,
                pieces=1 if setting.compressor.error_feedback else message.pieces,
            )
            shards[number] = replace(shard, **setting._asdict())
    return shards


def _as(message: Message, shard: Shard) -> Message:
    return replace(
        message,
        compressor=shard.compressor,
        ratio=shard.ratio,
        rank=shard.rank,
        pieces=shard.pieces,
    )
