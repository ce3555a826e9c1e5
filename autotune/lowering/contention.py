"""Messages that compete with kernels for a device take longer (Daydream, sec. 6.5).

A message that the device's computation accompanies all the time is longer by the share
`RuntimeCosts.contention` than alone, and in proportion for a part of it. The parts are those of the
replay without contention. Longer messages end later, so the share of a message that ends behind
the computation is a little too large.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.dfg.graph import COMPUTATION, Dfg, Kind
from autotune.dfg.replay import replay
from autotune.dfg.utilisation import covered_within_s
from autotune.lowering.network import MessageOps

SENT = (Kind.SEND, Kind.VIRTUAL)
"""Kinds of the parts of a message on the network; virtual ones are what occupies no port."""
_IS_SENT = np.isin(np.arange(len(Kind)), SENT)
_COMPUTES = np.isin(np.arange(len(Kind)), list(COMPUTATION))


def contended(dfg: Dfg, message_ops: Sequence[MessageOps], contention: float) -> Dfg:
    """The graph with messages that are longer by up to the share `contention`."""
    if not contention:
        return dfg
    in_message = np.zeros(dfg.ops + 1, dtype=np.int64)
    for ops in message_ops:
        for firsts, lasts in ops.ranges:
            in_message += np.bincount(firsts, minlength=dfg.ops + 1)
            in_message -= np.bincount(lasts + 1, minlength=dfg.ops + 1)
    takes_time = dfg.duration_s > 0
    sent = (np.cumsum(in_message)[:-1] > 0) & takes_time & _IS_SENT[dfg.kind]
    computes = _COMPUTES[dfg.kind] & takes_time
    if not sent.any() or not computes.any():
        return dfg
    computes &= dfg.worker == dfg.worker[computes].min()  # workers are equal
    timeline = replay(dfg)
    start_s, end_s = timeline.start_s, timeline.end_s
    lengths_s = end_s[sent] - start_s[sent]
    within_s = covered_within_s(start_s[computes], end_s[computes], start_s[sent], end_s[sent])
    shares = np.divide(within_s, lengths_s, out=np.zeros(len(within_s)), where=lengths_s > 0)
    durations_s = dfg.duration_s.copy()
    durations_s[sent] *= 1.0 + contention * np.clip(shares, 0.0, 1.0)
    return dfg.with_durations(durations_s)
