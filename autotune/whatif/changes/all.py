"""Importing this module registers all what-ifs."""

import autotune.whatif.changes.batchnorm
import autotune.whatif.changes.elementwise
import autotune.whatif.changes.encoding
import autotune.whatif.changes.graphs
import autotune.whatif.changes.hardware
import autotune.whatif.changes.kernel_times
import autotune.whatif.changes.metaflow
import autotune.whatif.changes.offloading  # noqa: F401
