"""MLflow: every trial as a run, trained simulators as models."""
