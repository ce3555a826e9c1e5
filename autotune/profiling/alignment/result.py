"""The result of an alignment, and its uncertainty."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.arrays import FloatArray


@dataclass(frozen=True, eq=False)
class Alignment:
    """One clock for R ranks, found from K collectives and pairs of a send and its receive.

    - `offset_s` (R,): add it to the times of a rank for the first rank's clock, whose own is 0.
    - `drift` (R,): add this too, per second of the rank's time after `middle_s` (R,), which counts
      from the earliest rank's origin. It is equal for all ranks of a machine, and 0 for the first
      rank's machine and where no drift was certain.
    - `drift_spread` (R,): its standard deviation over the bootstrap samples. For a drift taken as
      0, the error of the estimate, infinite without one.
    - `low_s`, `high_s` (R,): the interval that the order of events allows: no member of a
      collective ends before all have begun, no receive before its send has. Infinite for a rank
      that shares no collective with the first, and no messages in both directions.
    - `spread_s` (R,): standard deviation of the offset over bootstrap samples of the steps (of the
      collectives, where there is one step). Where only messages lead to a rank, at least that of a
      uniform distribution over the offsets that they allow.
    - `slack_s` (K,): by how much each collective breaks the order at these offsets, nearly always
      0; `transactions` (K,) names them.
    - `end_spread_s`: median over the collectives of the standard deviation of their members' ends,
      before and after alignment; 0 without a collective.
    - `notes`: what was left out or is unknown.
    """

    offset_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray
    spread_s: FloatArray
    slack_s: FloatArray
    transactions: tuple[str, ...]
    end_spread_s: tuple[float, float]
    drift: FloatArray
    drift_spread: FloatArray
    middle_s: FloatArray
    notes: tuple[str, ...] = ()

    def correction_s(self, at_s: FloatArray) -> FloatArray:
        """(R,) seconds to add to each rank's time `at_s` (R,), from the earliest rank's origin."""
        corrected: FloatArray = self.offset_s + self.drift * (at_s - self.middle_s)
        return corrected

    @property
    def worst_slack_s(self) -> float:
        return float(self.slack_s.max(initial=0.0))

    @property
    def residuals(self) -> dict[str, float]:
        """Collectives that still break the order, with the seconds, worst first."""
        slack_s = dict(zip(self.transactions, self.slack_s.tolist(), strict=True))
        broken = [(name, slack) for name, slack in slack_s.items() if slack > 0]
        return dict(sorted(broken, key=lambda item: -item[1]))
