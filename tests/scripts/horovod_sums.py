"""One rank of Horovod: print what it built in and what all-reduces of a small tensor give, as JSON.

python horovod_sums.py torch|tensorflow
"""

import importlib
import json
import sys

framework = importlib.import_module(sys.argv[1])
hvd = importlib.import_module(f"horovod.{sys.argv[1]}")
hvd.init()
values = [1.0, 2.0, 3.0]
tensor = getattr(framework, "tensor", None) or framework.constant
mine = tensor([value * (hvd.rank() + 1) for value in values])
answer = {
    "size": hvd.size(),
    "gloo": bool(hvd.gloo_built()),
    "mpi": bool(hvd.mpi_built()),
    "sum": hvd.allreduce(mine, op=hvd.Sum, name="sum").numpy().tolist(),
    "average": hvd.allreduce(mine, op=hvd.Average, name="average").numpy().tolist(),
}
print(json.dumps(answer), flush=True)
hvd.shutdown()
