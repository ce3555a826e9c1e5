"""Imported first by fork servers: what they import needs no collections.

`torch_world.exempt_imports` lets each of their processes collect again.
"""

import gc

gc.disable()
