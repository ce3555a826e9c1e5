"""Loads a file of the user's own what-ifs. It is run as any Python file of the user."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.files import is_file
from autotune.whatif.registry import WHAT_IFS


def load_what_ifs(path: Path) -> tuple[str, ...]:
    """Run the file, which registers what-ifs by `@what_if`; their names.

    Raises `InvalidInput` if it is no Python file, raises something, or registers nothing.
    """
    if path.suffix != ".py" or not is_file(path):
        raise InvalidInput(f"--load needs a Python file that registers what-ifs, but is {path}")
    before = set(WHAT_IFS)
    name = f"autotune_what_ifs_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{path} must run without an error, but raised {type(error).__name__}: {error}"
        ) from error
    loaded = tuple(one for one in WHAT_IFS if one not in before)
    if not loaded:
        raise InvalidInput(
            f"{path} must register at least one what-if with @what_if (autotune.whatif.registry), "
            "but registers none"
        )
    return loaded
