"""Compression of what is sent: mixed precision, and the other compressors of a space. Lossy, so only where the space has them."""

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
"""Settings of a compressor that are proposed, those with the shortest t_sync first."""


@dataclass(frozen=True)
class MixedPrecision:
    """Gradients travel as fp16 or bf16, all of them or those on the critical path.

    The computation is scaled only by a factor that the caller measured (`compute_factor`: time in mixed precision over time in full):
    what half precision does to kernels is a property of the device and the model, and no rule of thumb stands in for it. Changing the
    computation is the script's business; the states that assume it say so.
    """

    compute_factor: float | None = None

    name = "mixed precision"

    def __post_init__(self) -> None:
        if self.compute_factor is not None and not 0 < self.compute_factor < float("inf"):
            raise InvalidInput(
                f"a measured factor of the computation must be finite and above 0, but is {self.compute_factor}"
            )

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        for kind in path.problem.space.compressors:
            if kind not in CASTS:
                continue
            for portion in (range(len(path.plan.messages)), path.messages):
                shards = _compressed(path, portion, CompressorSetting(kind))
                if not shards:
                    continue
                found = state.with_strategy(like(state, path.problem, shards))
                yield found
                if self.compute_factor is not None and state.compute_factor == 1:
                    note = f"computation in mixed precision takes {self.compute_factor:g} of its time, as the caller measured"
                    yield replace(
                        found, compute_factor=self.compute_factor, assumed=(*state.assumed, note)
                    )


class ErrorFeedback:
    """The compressors that keep what they left out (int8, top-k, PowerSGD), where they shorten t_sync, compression included."""

    name = "error feedback compression"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        for kind in path.problem.space.compressors:
            if not kind.error_feedback:
                continue
            found: list[tuple[float, int, dict[int, Shard]]] = []
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
                found.append((-gain_s, len(found), shards))
            for _, _, shards in sorted(found)[:PORTIONS]:
                if shards:
                    yield state.with_strategy(like(state, path.problem, shards))

    @staticmethod
    def _shorter(path: CriticalPath, number: int, shard: Shard) -> bool:
        message = path.plan.messages[number]
        return path.sync_s([_as(message, shard)]) < path.sync_s([message])


def _compressed(
    path: CriticalPath, numbers: Iterable[int], setting: CompressorSetting
) -> dict[int, Shard]:
    """Those of the messages that can be compressed so and are not yet, with the shard that says it."""
    found = {}
    for number in numbers:
        message = path.plan.messages[number]
        allowed = setting.compressor in path.problem.space.compressors_for(message.dtype)
        if (
            allowed
            and message.sparse is SparseHandling.DENSE
            and setting != (message.compressor, message.ratio, message.rank)
        ):
            placement = message.owner
            shard = Shard(
                message.synchronizer, placement=placement, hierarchical=message.hierarchical
            )
            found[number] = replace(shard, **setting._asdict())
    return found


def _as(message: Message, shard: Shard) -> Message:
    return replace(message, compressor=shard.compressor, ratio=shard.ratio, rank=shard.rank)
