"""Python's garbage collector, kept from stopping a step.

What crosses the step makes a few objects per variable and step, enough for a full collection every some dozen steps. That looks at every
object of the process: 0.1 to 0.3 s where torch is imported, while all other ranks wait.
"""

from __future__ import annotations

import gc


def settle_garbage() -> None:
    """Collect now what nobody holds; later collections look only at what is made from then on, until this is called again.

    Does nothing where the script has switched collection off: it has its own way then.
    """
    if not gc.isenabled():
        return
    gc.unfreeze()  # what was frozen before may be garbage by now
    gc.collect()
    gc.freeze()
