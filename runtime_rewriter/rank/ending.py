"""The end of a rank's process, and errors of a script in words."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from autotune.errors import AutotuneError
from autotune.masking import masked, secrets_of
from runtime_rewriter.rank.lightning_ranks import lightning_hint
from runtime_rewriter.rank.missing_libraries import missing_library_hint

MESSAGE_CHARACTERS = 6000


def exit_now(code: int) -> NoReturn:
    """End without a shutdown, which would join threads that wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def describe(error: BaseException) -> str:
    """The error and its place in the user's own files, without our frames and the frameworks', and
    without secrets. Bytes of a path that are no UTF-8 become escapes."""
    secrets = secrets_of(sys.argv, os.environ)
    if isinstance(error, AutotuneError):
        return _encodable(masked(str(error), secrets))
    package = Path(__file__).parents[1]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not Path(frame.filename).is_relative_to(package)
        and not frame.filename.startswith("<frozen")
    ]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    hint = lightning_hint(error, os.environ) or missing_library_hint(error)
    text = masked(f"{type(error).__name__}: {error}{where}{hint}", secrets)
    return _encodable(text)[:MESSAGE_CHARACTERS]


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
