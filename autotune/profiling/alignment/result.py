"""What an alignment found, and how certain it is."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.arrays import FloatArray


@dataclass(frozen=True, eq=False)
class Alignment:
    """`offset_s` (R,): what to add to the times of each rank to have them on the first rank's clock, whose own is 0.

    - `drift` (R,): what is added besides per second of the rank's time before or after `middle_s` (R,), which counts from the earliest
      rank's origin; the same for all ranks of a machine, 0 for the first rank's and where no drift was sure. `drift_spread` (R,): its
      standard deviation over the bootstrap samples; where it is taken as 0, the error of the estimate, infinite where there is none.
    - `low_s`, `high_s` (R,): what the order of events allows: no member of a collective ends before all have begun. Infinite for a rank
      that shares no collective with the others. Every offset within is possible; outside, some event would come before its cause.
    - `spread_s` (R,): standard deviation of the offset over bootstrap samples of the steps (of the collectives where there is one step).
    - `slack_s` (K,): by how much each collective breaks the order at the offsets found, 0 nearly always; `transactions` (K,) names them.
    - `end_spread_s`: median over the collectives of the standard deviation of their members' ends, before and after alignment.
    - `notes`: what was left out or could not be told.
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
        """(R,) what to add to each rank's time `at_s` (R,), counted from the earliest rank's origin."""
        corrected: FloatArray = self.offset_s + self.drift * (at_s - self.middle_s)
        return corrected

    @property
    def worst_slack_s(self) -> float:
        return float(self.slack_s.max(initial=0.0))

    @property
    def residuals(self) -> dict[str, float]:
        """Collectives that break the order even so, with by how much, s; the worst first."""
        broken = [
            (name, float(slack))
            for name, slack in zip(self.transactions, self.slack_s, strict=True)
            if slack > 0
        ]
        return dict(sorted(broken, key=lambda item: -item[1]))
