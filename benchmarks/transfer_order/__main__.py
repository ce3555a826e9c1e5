"""In which order do tensors between two TensorFlow servers arrive, if they share a link?

`python -m benchmarks.transfer_order` (root, for a network namespace of its own). One server sends
tensors that become ready one after the other, faster than the link carries them. If the
connection carries one after the other, they arrive at equal distances; if they share it, the first
ones arrive late. Pushes and pulls of a parameter server are such transfers, and `star_order` in
`autotune.lowering.costs.TENSORFLOW_COSTS` rests on the result. The last line is one JSON object:
mean errors of both hypotheses, relative to the measured times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.repository import machine, option_parser
from runtime_rewriter.private_network import new_network_namespace

TENSORS, GAP_S = 8, 7e-3
SIZES_BYTES = (700 * 2**10, 2 * 2**20)
LINK_MBIT = 333
"""A third of a gigabit: the share of one of three workers at a server's port."""
PAYLOAD = 1448 / 1538
MTU = 1500
PORTS = (23501, 23502)
RUNS, WARMUP = 10, 3


def in_order_s(size_bytes: float, bytes_per_s: float) -> list[float]:
    """Arrivals if the connection carries one tensor after the other."""
    ends_s: list[float] = []
    for number in range(TENSORS):
        begin_s = max(number * GAP_S, ends_s[-1] if ends_s else 0.0)
        ends_s.append(begin_s + size_bytes / bytes_per_s)
    return ends_s


def shared_s(size_bytes: float, bytes_per_s: float) -> list[float]:
    """Arrivals if all tensors that are ready share the link evenly."""
    ready_s = [number * GAP_S for number in range(TENSORS)]
    left: dict[int, float] = {}
    ends_s = dict.fromkeys(range(TENSORS), 0.0)
    for number, (now_s, until_s) in enumerate(pairwise([*ready_s, np.inf])):
        left[number] = size_bytes
        while left:
            first = min(left, key=left.__getitem__)
            step_s = min(left[first] * len(left) / bytes_per_s, until_s - now_s)
            left = {one: size - step_s * bytes_per_s / len(left) for one, size in left.items()}
            now_s += step_s
            ended = [one for one, size in left.items() if size <= 1e-6 * size_bytes]
            for one in ended:
                ends_s[one] = now_s
                del left[one]
            if not ended:
                break
    return list(ends_s.values())


def measured_s(servers: Sequence[Any], config: Any, size_bytes: int) -> NDArray[np.float64]:
    """Median arrivals, from the time when all tensors are filled."""
    import tensorflow as tf

    from runtime_rewriter.tensorflow.emulation import waited

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        with tf.device("/job:worker/task:1/device:CPU:0"):
            filled = [tf.fill([size_bytes // 4], float(number)) for number in range(TENSORS)]
            with tf.control_dependencies(filled):
                begin = tf.timestamp()
            sent: list[Any] = []
            for number, values in enumerate(filled):
                ready, _ = waited(begin, number * GAP_S)
                with tf.control_dependencies([ready, *sent[-1:]]):
                    sent.append(tf.identity(values))
        ends = []
        with tf.device("/job:worker/task:0/device:CPU:0"):
            for tensor in sent:
                with tf.control_dependencies([tf.identity(tensor)]):
                    ends.append(tf.timestamp())
        with v1.Session(servers[0].target, graph=graph, config=config) as session:
            runs = np.array([session.run([begin, *ends]) for _ in range(RUNS)])[WARMUP:]
    arrivals: NDArray[np.float64] = np.median(runs[:, 1:] - runs[:, :1], axis=0)
    return arrivals


def main() -> int:
    option_parser(__doc__).parse_args()
    try:
        new_network_namespace()
        link = ("rate", f"{LINK_MBIT}mbit", "burst", "64kb", "limit", "1mb")
        for words in (
            ("ip", "link", "set", "lo", "mtu", str(MTU)),
            ("tc", "qdisc", "add", "dev", "lo", "root", "tbf", *link),
        ):
            subprocess.run(words, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"this benchmark needs root, ip and tc, but: {error}", file=sys.stderr)
        return 2
    os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3", no_proxy="*")
    import tensorflow as tf

    from runtime_rewriter.tensorflow.servers import session_config

    config = session_config()
    config.inter_op_parallelism_threads = TENSORS
    addresses = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in PORTS]})
    servers = [
        tf.distribute.Server(addresses, job_name="worker", task_index=task, config=config)
        for task in range(len(PORTS))
    ]
    bytes_per_s = LINK_MBIT * 1e6 / 8 * PAYLOAD
    errors: dict[str, list[float]] = {"error_mean_in_order": [], "error_mean_shared": []}
    for size_bytes in SIZES_BYTES:
        arrivals_s = measured_s(servers, config, size_bytes)
        print(f"{size_bytes / 2**20:.1f} MiB each, ms: measured", *np.round(1e3 * arrivals_s))
        for key, expected in (
            ("error_mean_in_order", in_order_s(size_bytes, bytes_per_s)),
            ("error_mean_shared", shared_s(size_bytes, bytes_per_s)),
        ):
            print(f"  {key.removeprefix('error_mean_')}:", *np.round(1e3 * np.array(expected)))
            errors[key] += np.abs(np.array(expected) / arrivals_s - 1).tolist()
    means = {key: float(np.mean(of)) for key, of in errors.items()}
    print(json.dumps(means | machine()), flush=True)
    os._exit(0)  # a server has no end of its own


if __name__ == "__main__":
    sys.exit(main())
