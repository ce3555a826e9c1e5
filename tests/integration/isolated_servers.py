"""The network namespace in which a test process starts TensorFlow's servers.

They listen on all interfaces without authentication. gRPC shares threads between the servers of a
process, and each thread connects from the namespace in which it was started: with two namespaces,
servers of one may look for each other in the other.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

from runtime_rewriter.private_network import new_network_namespace

WAIT_S = 120.0


@cache
def isolated() -> ThreadPoolExecutor:
    """A thread in the one network namespace of this process's servers."""
    return ThreadPoolExecutor(1, initializer=new_network_namespace)
