"""Short names of numpy's typed arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]
IntArray = NDArray[np.int64]
