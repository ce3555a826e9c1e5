"""Messages that compete with kernels for a device take longer (Daydream, sec. 6.5).

A message that the device's computation accompanies all the time is longer by the share
`RuntimeCosts.contention` than alone, and in proportion for a part of it. The parts are those of the
replay without contention. Longer messages end later, so the share of a message that ends behind
the computation is a little too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autotune.dfg.graph import COMPUTATION, Dfg, Kind
from autotune.dfg.replay import replay
from autotune.dfg.utilisation import covered_within_s
from autotune.lowering.network import MessageOps

SENT = (Kind.SEND, Kind.VIRTUAL)
"""Kinds of the parts of a message on the network; virtual ones are what occupies no port."""


def contended(dfg: Dfg, message_ops: Sequence[MessageOps], contention: float) -> Dfg:
    """The graph with messages that are longer by up to the share `contention`."""
    in_message = np.zeros(dfg.ops + 1, dtype=np.int64)
    for ops in message_ops:
        for firsts, lasts in ops.ranges:
            np.add.at(in_message, firsts, 1)
            np.add.at(in_message, lasts + 1, -1)
    sent = (np.cumsum(in_message)[:-1] > 0) & (dfg.duration_s > 0) & np.isin(dfg.kind, SENT)
    computes = np.isin(dfg.kind, list(COMPUTATION)) & (dfg.duration_s > 0)
    if not contention or not sent.any() or not computes.any():
        return dfg
    computes &= dfg.worker == dfg.worker[computes].min()  # workers are equal
    timeline = replay(dfg)
    start_s, end_s = timeline.start_s, timeline.end_s
    lengths_s = end_s[sent] - start_s[sent]
    within_s = covered_within_s(start_s[computes], end_s[computes], start_s[sent], end_s[sent])
    shares = np.divide(within_s, lengths_s, out=np.zeros(len(within_s)), where=lengths_s > 0)
    durations_s = dfg.duration_s.copy()
    durations_s[sent] *= 1.0 + contention * np.clip(shares, 0.0, 1.0)
    return replace(dfg, duration_s=durations_s)
