"""Its presence puts this folder on the import path, so that tests of every kind share `synthetic_job`; and a Ray that they share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def cluster_of_two() -> Iterator[object]:
    """A connection to a private local Ray cluster with room for two ranks."""
    from runtime_rewriter.ray_cluster import RayCluster, RayPlace

    connected = RayCluster(RayPlace(), 2)
    yield connected
    connected.close()
