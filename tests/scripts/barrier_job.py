"""barrier_job.py [absent:RANK]     ten health barriers; the rank that is named does not come to the last one"""

import os
import sys

import elastic_ext
from elastic_ext.base.errors import RanksMissing

rank = os.environ["RANK"]
for number in range(10):
    if number == 9 and f"absent:{rank}" in sys.argv:
        break
    try:
        elastic_ext.health_barrier(2 if number == 9 and len(sys.argv) > 1 else 60)
    except RanksMissing as error:
        print(f"rank {rank}: {error} {error.ranks}", flush=True)
print(f"passed {rank}", flush=True)
