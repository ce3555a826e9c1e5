"""Loads simulators that versions before 0.2 logged to MLflow; their files name this module."""

from autotune.tracking.logged_models import _load_pyfunc as _load_pyfunc
