"""Theorems 1 to 3 of dPRO (MLSys 2022, sec. 5.1): when to fuse two neighbouring ops, or their two tensors.

Two ops p1, p2 (the paper's n-1 and n) run one after the other from time A on; their tensors q1, q2 are sent one after the other on a
channel that is free at Q (the paper's q^e of n-2), each when its op has ended. With no fusion

    e1 = max(Q, A + p1) + t1        T = max(e1, A + p1 + p2) + t2

T is when the second tensor is synchronized, which is what all three theorems compare.

| symbol | paper | meaning | unit |
|---|---|---|---|
| p1, p2 | p^d | durations of the ops | s |
| f | opfs_time | duration of the fused op | s |
| t1, t2 | q^d, t_sync(s, k*) | durations of the synchronizations | s |
| t12 | t_sync(s1 + s2, k*) | duration of the fused tensor's | s |
| A | - | when the first op starts | s |
| Q | q^e of n-2 | when the channel is free | s |
| e1 | q^e of n-1 | when the first tensor is synchronized | s |
| c2 | p^e of n | when the second op ends: A + p1 + p2 without op fusion | s |

Readings, each shown by tests/property/test_optimizer_theorems.py:

- Theorem 1 holds as printed for every Q where f >= p1. Without that, its second half ("otherwise worse") fails: a fused op that
  is shorter than its first part lets the first tensor start earlier. It speaks of T alone. The ops behind p2 start earlier in any case,
  so what Theorem 1 refuses can still make the whole step shorter where computation bounds it; the search therefore asks the replay.
- Theorem 2 holds as printed where t never falls with the size, and t12 < t1 + t2 or Q <= c2. Where the channel is busy beyond
  c2 (Q > c2) and messages do not get cheaper together, the printed condition fuses to no or to bad effect. `tensor_fusion_pays` compares
  the two ends themselves and needs none of this.
- Theorem 3 needs f <= p1 + p2 for its first half and t12 <= t1 + t2 for its second. Neither is a law: a bad fused kernel is slower
  than its parts, and measured collectives may cost more per byte when they are large.
"""

from __future__ import annotations


def end_s(
    start_s: float, p1_s: float, p2_s: float, free_s: float, t1_s: float, t2_s: float
) -> float:
    """T without any fusion."""
    first_s = max(free_s, start_s + p1_s) + t1_s
    return max(first_s, start_s + p1_s + p2_s) + t2_s


def end_op_fused_s(
    start_s: float, fused_s: float, free_s: float, t1_s: float, t2_s: float
) -> float:
    """T with the ops fused and the tensors not: both are ready when the fused op ends."""
    return max(free_s, start_s + fused_s) + t1_s + t2_s


def end_tensor_fused_s(computed_s: float, free_s: float, t12_s: float) -> float:
    """T with the tensors fused; `computed_s` is the end of the second op, or of the fused one."""
    return max(free_s, computed_s) + t12_s


def op_fusion_pays(p1_s: float, p2_s: float, fused_s: float, t1_s: float) -> bool:
    """Theorem 1: t1 <= p1 + p2 - f. True for ops without a tensor (t1 = 0) unless the fused op is slower than its parts."""
    return t1_s <= p1_s + p2_s - fused_s


def tensor_fusion_pays_printed(
    first_end_s: float, computed_s: float, t2_s: float, t12_s: float
) -> bool:
    """Theorem 2 as printed: e1 > c2 + t12 - t2."""
    return first_end_s > computed_s + t12_s - t2_s


def tensor_fusion_pays(
    first_end_s: float, computed_s: float, t2_s: float, t12_s: float, free_s: float
) -> bool:
    """Theorem 2 without its assumptions: whether T is smaller with the tensors fused, for any cost of messages."""
    return end_tensor_fused_s(computed_s, free_s, t12_s) < max(first_end_s, computed_s) + t2_s


def both_fusions_pay(
    p1_s: float, p2_s: float, fused_s: float, t1_s: float, t2_s: float, t12_s: float
) -> bool:
    """Whether Theorem 3 may be used: fusing both is no worse than either alone, whatever A and Q are."""
    return fused_s <= p1_s + p2_s and t12_s <= t1_s + t2_s
