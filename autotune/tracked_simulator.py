"""Load simulators that earlier versions logged to MLflow; their files name this module."""

from autotune.tracking.logged_models import _load_pyfunc as _load_pyfunc
