"""Measure sets of ops as one kernel of XLA against the ops: `python -m benchmarks.op_fusion`.

A case is a typical part of a training step in one size: chains of elementwise ops, layer norm, GELU
and batch norm (forward and backward), a whole update by Adam. All sets that the product would
propose for it are kernels in one graph, and none in the other. Three sides run in turns, with
variables as inputs and `--threads` threads: the kernels, the ops one by one in the ranks' session
(Grappler is off), and the ops one by one in a session with TensorFlow's own graph optimizers
(`benchmarks.op_fusion.sides`). Compiling does not count.

The last line is one JSON object. Ratios are time of the faster unfused side / time fused: above 1
fusion is faster. `ratio_geomean`, `worst`: over all cases. `chosen_geomean`, `chosen_worst`: if
only sets that pay alone are fused, as the tuner does. A case without such a set, or whose sets do
not compile together, counts with the ops one by one in the ranks' session. `exact_cases`: cases
whose partition graphs have exactly the fused sets as compiled clusters, of `measured_cases`.
`uncompiled_cases`: cases whose paying sets do not compile together; they are not exact.
`skipped_cases`: cases that XLA cannot compile. `grappler_faster_cases`: cases whose rival is the
session with Grappler.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from statistics import geometric_mean
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3", KERAS_BACKEND="tensorflow")

from benchmarks.op_fusion.figures import Figures, figures_of, line_of
from benchmarks.op_fusion.sides import GRAPPLER, SideTimes, side_times
from benchmarks.repository import machine, option_parser

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Elements of a tensor: 16 KiB to 16 MiB."""
QUICK = SIZES[:3]
WIDTH = 256
LEFT_OUT = ("Placeholder", "Const", "NoOp")
CHAINS = (4, 8, 16)


def chain(ops: int) -> Callable[[Any, Any], Any]:
    import tensorflow as tf

    kinds = (lambda x: x * 1.01, lambda x: x + 0.5, tf.nn.relu, tf.abs)

    def run(x: Any, _: Any) -> Any:
        for number in range(ops):
            x = kinds[number % len(kinds)](x)
        return [x]

    return run


def with_gradient(layer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    import tensorflow as tf

    def run(x: Any, upstream: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, upstream)
        return [y, tape.gradient(y, x, upstream)]

    return run


def gelu(x: Any, _: Any) -> Any:
    import tensorflow as tf

    return tf.nn.gelu(x, approximate=True)


def layer_norm(x: Any, _: Any) -> Any:
    import tensorflow as tf

    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, 0.1, 1.2, 1e-5)


def batch_norm(x: Any, _: Any) -> Any:
    import tensorflow as tf

    mean, variance = tf.nn.moments(x, [0])
    return tf.nn.relu(tf.nn.batch_normalization(x, mean, variance, 0.1, 1.2, 1e-5))


def adam(value: Any, gradient: Any) -> Any:
    """The update of Keras's Adam, with both moments as further tensors of the same values."""
    import tensorflow as tf

    first = value + (gradient - value) * 0.1
    second = value + (tf.square(gradient) - value) * 0.001
    return [value - first * 1e-3 / (tf.sqrt(second) + 1e-7), first, second]


def cases() -> dict[str, Callable[[Any, Any], Any]]:
    return {
        **{f"chain of {ops}": chain(ops) for ops in CHAINS},
        "layer norm": with_gradient(layer_norm),
        "GELU": with_gradient(gelu),
        "batch norm, ReLU": with_gradient(batch_norm),
        "Adam": adam,
    }


class Case:
    """A part of a step as a graph, with its sets of ops."""

    def __init__(self, body: Callable[[Any, Any], Any], elements: int, config: Any) -> None:
        import tensorflow as tf

        from runtime_rewriter.tensorflow.fusible_sets import Phase, sets_of_graph
        from runtime_rewriter.tensorflow.graph_view import GraphView, TensorName
        from runtime_rewriter.tensorflow.training_graph import Types

        spec = tf.TensorSpec([elements // WIDTH, WIDTH], tf.float32)
        function = tf.function(lambda x, y: body(x, y), autograph=False)
        graph = function.get_concrete_function(spec, spec).graph
        self.config, self.view = config, GraphView(graph.as_graph_def())
        self.types = Types.of(graph.as_graph_def())
        self.results = [TensorName.of(tensor.name) for tensor in graph.outputs]
        self.ops = [n for n, node in self.view.nodes.items() if node.op not in LEFT_OUT]
        kept = {str(one) for one in self.results}
        phases = dict.fromkeys(self.ops, Phase.FORWARD)
        self.sets = sets_of_graph(self.view, self.types, phases, kept, "CPU")

    def apart(self) -> list[Any]:
        """The proposed sets, without those that overlap with larger ones."""
        return _disjoint(self.sets)

    def paying(self, repeats: int) -> list[Any]:
        """The sets that pay alone, as the tuner chooses them."""
        from runtime_rewriter.tensorflow.fused_times import measured_times

        times = measured_times(
            self.view, self.types, self.sets, {}, self.config, budget_s=60, repeats=repeats
        )
        paying = [one for one, found in times.items() if found.pays]
        return _disjoint(sorted(paying, key=lambda one: -times[one].saved_s))

    def times(self, sets: list[Any], repeats: int) -> SideTimes | None:
        """The whole part with these sets against the part without any."""
        scopes = dict.fromkeys(self.ops, "")
        for number, one in enumerate(sets):
            scopes.update(dict.fromkeys(one.ops, f"set_{number}"))
        return side_times(self.view, self.types, scopes, self.config, self.results, repeats)


def _disjoint(sets: list[Any]) -> list[Any]:
    chosen: list[Any] = []
    for one in sets:
        taken = {op for other in chosen for op in other.ops}
        if taken.isdisjoint(one.ops):
            chosen.append(one)
    return chosen


def measure(name: str, elements: int, config: Any, repeats: int) -> Figures | None:
    case = Case(cases()[name], elements, config)
    sets = case.apart()
    times = case.times(sets, repeats)
    if times is None:
        return None
    paying = case.paying(repeats)
    together = case.times(paying, repeats) if paying else None
    return figures_of(name, elements, sets, times, paying, together)


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of each rank; the default is 1")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--quick", action="store_true", help="the three smallest sizes")
    options = parser.parse_args()
    import tensorflow as tf

    from runtime_rewriter.tensorflow.servers import session_config

    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    config = session_config()
    config.experimental.collective_group_leader = ""
    figures: list[Figures] = []
    skipped = 0
    for name in cases():
        for elements in QUICK if options.quick else SIZES:
            figure = measure(name, elements, config, options.repeats)
            if figure is None:
                print(f"{name}, {elements} elements: XLA cannot compile it", file=sys.stderr)
                skipped += 1
                continue
            figures.append(figure)
            print(line_of(figure), flush=True)
    print(
        json.dumps(
            {
                "ratio_geomean": geometric_mean([one.ratios[1] for one in figures]),
                "worst": min(one.ratios[1] for one in figures),
                "chosen_geomean": geometric_mean([one.chosen_ratio for one in figures]),
                "chosen_worst": min(one.chosen_ratio for one in figures),
                "measured_cases": len(figures),
                "exact_cases": sum(one.exact for one in figures),
                "uncompiled_cases": sum(one.uncompiled for one in figures),
                "skipped_cases": skipped,
                "grappler_faster_cases": sum(one.rival == GRAPPLER for one in figures),
                "cases": [asdict(one) for one in figures],
                "threads": options.threads,
                "repeats": options.repeats,
                "tensorflow": tf.__version__,
                **machine(),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
