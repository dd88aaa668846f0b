"""Load this package's entry points as torchrun does, in an interpreter that has imported nothing else; print one JSON object.

    load_entry_point.py [--torchrun]      also import what `torchrun` itself imports, after that

seconds: `load()()` of all entry points of this package together. modules: what that imported. torchrun_s: the import of
torch.distributed.run, or null. Torch has most of the standard library's part loaded when it comes to entry points, so
`seconds` is an upper bound.
"""

import json
import sys
import time
from importlib.metadata import entry_points

points = [point for point in entry_points(group="torchrun.handlers") if point.value.startswith("elastic_ext.")]
if not points:
    sys.exit("no entry point of elastic_ext is installed; expected one in the group torchrun.handlers; pip install the package")

before = set(sys.modules)
start = time.perf_counter()
for point in points:
    point.load()()
seconds = time.perf_counter() - start
modules = sorted(set(sys.modules) - before)

torchrun_s = None
if sys.argv[1:] == ["--torchrun"]:
    start = time.perf_counter()
    import torch.distributed.run  # noqa: F401

    torchrun_s = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "modules": modules, "torchrun_s": torchrun_s}))
