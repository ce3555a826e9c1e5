"""BlueConnect: an all-reduce taken apart by the levels of the network."""

from __future__ import annotations

from dataclasses import replace

from autotune.errors import InvalidInput
from autotune.lowering.steps import Scope
from autotune.lowering.traffic import Collective
from autotune.whatif.base import Base
from autotune.whatif.changes.distributed import all_reduces, times_on
from autotune.whatif.messages.cluster_size import training_cluster
from autotune.whatif.messages.message_stages import Stage, staged
from autotune.whatif.messages.waiting import refuse_changed_messages
from autotune.whatif.question import Question
from autotune.whatif.registry import what_if


@what_if(
    "blueconnect",
    title="BlueConnect: all-reduce in stages within and between hosts",
    source="BlueConnect (MLSys 2019); Daydream, Alg. 8",
    enact="autotune tune --cluster cluster.yaml --address auto -- python train.py  # finds "
    "hierarchical plans",
)
def blueconnect(base: Base, question: Question) -> Base:
    """An all-reduce is a reduce-scatter inside each host, one all-reduce per device between the
    hosts, and an all-gather inside.

    The devices of a host share its interface, so together the middle stage moves the whole message
    once. Stages of different messages overlap, since they use different links. The factorization
    is that of the cluster: devices per host times hosts.
    """
    times = times_on(base, training_cluster(question))
    if times.on_one_host or times.most_on_a_host < 2:
        raise InvalidInput(
            "BlueConnect needs several hosts with several devices each, but cluster "
            f"{times.cluster.name!r} has {len(times.cluster.hosts)} host(s) with at most "
            f"{times.most_on_a_host} devices"
        )
    refuse_changed_messages(base)
    messages = all_reduces(base)
    sizes_bytes = base.size_bytes[messages]
    inside = "network inside hosts"
    stages = (
        Stage(
            "reduce_scatter",
            inside,
            times.seconds(Collective.REDUCE_SCATTER, sizes_bytes, Scope.HOSTS),
        ),
        Stage(
            "all_reduce",
            "network between hosts",
            times.seconds(Collective.ALL_REDUCE, sizes_bytes, Scope.LEADERS),
        ),
        Stage("all_gather", inside, times.seconds(Collective.ALL_GATHER, sizes_bytes, Scope.HOSTS)),
    )
    return replace(staged(base, messages, stages), messages="blueconnect")
