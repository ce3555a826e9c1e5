"""Python's garbage collector, kept from stopping a step.

What crosses the step makes a few objects per variable and step, enough for a full collection every some dozen steps. That looks at every
object of the process: 0.1 to 0.3 s where torch is imported, while all other ranks wait.
"""

from __future__ import annotations

import gc

_frozen = False


def freeze_garbage() -> None:
    """Collect now what nobody holds; later collections look only at what is made from then on, until `thaw_garbage`.

    What is there now and becomes garbage later stays until then. Does nothing where the script has switched collection off.
    """
    global _frozen
    thaw_garbage()  # what was frozen before may be garbage by now
    if not gc.isenabled():
        return
    gc.collect()
    gc.freeze()
    _frozen = True


def thaw_garbage() -> None:
    """Later collections look at everything again. What somebody else froze stays so if nothing was frozen here."""
    global _frozen
    if _frozen:
        gc.unfreeze()
    _frozen = False
