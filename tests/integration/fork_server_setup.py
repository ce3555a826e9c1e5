"""Imported first by fork servers, which `torch_world.ensure_running` starts.

Importing needs no collections; `torch_world.exempt_imports` lets forked processes collect again.
The folders of tests, which lead PYTHONPATH, are for this server alone, and not for what its
processes start.
"""

import gc
import os

gc.disable()
*_, _inherited = os.environ.pop("PYTHONPATH").split(os.pathsep, 2)
if _inherited:
    os.environ["PYTHONPATH"] = _inherited
