"""Load this package's entry points as torchrun does, in an interpreter that has imported nothing else; print one JSON object.

load_entry_point.py [--torchrun]

seconds      the time of `load()()` of all entry points of this package; an upper bound, because torch has already imported
             most of the standard library when it loads entry points
modules      what that imported
torchrun_s   the time to import torch.distributed.run afterwards; null without --torchrun
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
