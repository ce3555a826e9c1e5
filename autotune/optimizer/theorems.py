"""Theorems 1 to 3 of dPRO (MLSys 2022, sec. 5.1): when to fuse two neighboring ops or tensors.

Two ops p1, p2 (the paper's n-1 and n) run one after the other from time A. Their tensors q1, q2 are
sent one after the other on a channel that is free at Q, each when its op has ended. Without fusion

    e1 = max(Q, A + p1) + t1        T = max(e1, A + p1 + p2) + t2

T is the end of the second tensor's synchronization. All three theorems compare it.

| symbol | paper | meaning | unit |
|---|---|---|---|
| p1, p2 | p^d | durations of the ops | s |
| f | opfs_time | duration of the fused op | s |
| t1, t2 | q^d, t_sync(s, k*) | durations of the synchronizations | s |
| t12 | t_sync(s1 + s2, k*) | duration of the fused tensor's synchronization | s |
| A | - | start of the first op | s |
| Q | q^e of n-2 | when the channel is free | s |
| e1 | q^e of n-1 | end of the first tensor's synchronization | s |
| c2 | p^e of n | end of the second op: A + p1 + p2 without op fusion | s |

Our readings, each shown by tests/property/test_optimizer_theorems.py:

- Theorem 1 holds as printed for every Q if f >= p1. Otherwise its second half ("otherwise worse")
  fails: a fused op that is shorter than its first part lets the first tensor start earlier. It only
  concerns T. The ops behind p2 start earlier in any case, so a fusion that Theorem 1 rejects can
  still shorten a step that computation bounds. Therefore the search asks the replay.
- Theorem 2 holds as printed if t never falls with the size, and t12 < t1 + t2 or Q <= c2. If the
  channel is busy beyond c2 (Q > c2) and a joint message is not cheaper, the printed condition
  fuses without effect or to a loss. `tensor_fusion_pays` compares the two ends and needs neither.
- Theorem 3 needs f <= p1 + p2 for its first half and t12 <= t1 + t2 for its second. Neither is a
  law: a bad fused kernel is slower than its parts, and large collectives may cost more per byte.
"""

from __future__ import annotations


def end_tensor_fused_s(computed_s: float, free_s: float, t12_s: float) -> float:
    """T with the tensors fused; `computed_s` is the end of the second op, or of the fused one."""
    return max(free_s, computed_s) + t12_s


def op_fusion_pays(p1_s: float, p2_s: float, fused_s: float, t1_s: float) -> bool:
    """Theorem 1: t1 <= p1 + p2 - f. Without a tensor (t1 = 0): the fused op is not slower."""
    return t1_s <= p1_s + p2_s - fused_s


def tensor_fusion_pays(
    first_end_s: float, computed_s: float, t2_s: float, t12_s: float, free_s: float
) -> bool:
    """Theorem 2 without its assumptions: whether T is smaller with the tensors fused."""
    return end_tensor_fused_s(computed_s, free_s, t12_s) < max(first_end_s, computed_s) + t2_s


def both_fusions_pay(
    p1_s: float, p2_s: float, fused_s: float, t1_s: float, t2_s: float, t12_s: float
) -> bool:
    """Whether Theorem 3 applies: for any A and Q, both fusions are no worse than one of them."""
    return fused_s <= p1_s + p2_s and t12_s <= t1_s + t2_s
