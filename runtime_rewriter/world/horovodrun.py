"""Reads the options of `horovodrun` by its own parser, so that all are known."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

from autotune.errors import InvalidInput
from runtime_rewriter.horovod.own_autotuner import own_autotuner_refusal

ELASTIC_REFUSAL = (
    "elastic Horovod cannot be controlled: its ranks change during the trials, and its rendezvous "
    "unpickles what anyone on the network sends; start the script with a fixed -np"
)


GLOO = "--gloo"


def read_horovodrun(words: list[str]) -> tuple[list[str], dict[str, str], int, list[str]]:
    """The options, the variables that they set, the number of ranks, and the command's words.

    Where the ranks run is left to the cluster that they are tuned on. The options name gloo, whose
    operations the ranks of a tuning job use. Otherwise horovodrun imports TensorFlow once more, to
    see whether Horovod was built with MPI.
    """
    try:
        from horovod.runner.common.util import config_parser
        from horovod.runner.launch import parse_args
    except ImportError as error:
        raise InvalidInput(
            f"horovodrun needs Horovod in this environment, which `make horovod` builds: {error}"
        ) from error
    options = _parsed(parse_args, words)
    if options.host_discovery_script or options.min_num_proc or options.max_num_proc:
        raise InvalidInput(ELASTIC_REFUSAL)
    if options.use_mpi or options.use_jsrun or options.mpi_args:
        raise InvalidInput(
            "the ranks of a tuning job use Horovod's gloo operations, so its present setup would "
            "not be measured as it is under horovodrun's --mpi, --mpi-args or --jsrun; leave the "
            "option out"
        )
    if options.autotune:
        raise own_autotuner_refusal("horovodrun's --autotune")
    variables: dict[str, Any] = config_parser.set_env_from_args({}, options)
    before = words[: len(words) - len(options.command)]
    if not options.use_gloo:
        before = [GLOO, *before]
    texts = {name: str(value) for name, value in variables.items()}
    return before, texts, int(options.num_proc), list(options.command)


def _parsed(parse_args: Any, words: list[str]) -> Any:
    complaint, own_words = io.StringIO(), sys.argv
    try:
        sys.argv = ["horovodrun", *words]  # it takes no words as an argument
        with contextlib.redirect_stdout(complaint), contextlib.redirect_stderr(complaint):
            return parse_args()
    except SystemExit:
        said = complaint.getvalue().strip().splitlines() or ["it starts nothing"]
        problem = said[-1].partition("error: ")[2] or said[-1]
    except (ValueError, OSError) as error:
        problem = str(error)
    finally:
        sys.argv = own_words
    raise InvalidInput(f"horovodrun does not understand its options: {problem}")
