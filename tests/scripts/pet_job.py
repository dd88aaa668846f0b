"""Say on one line who this worker is."""

import os
import sys

env = os.environ
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS")
sys.stdout.write("pet " + " ".join(env[name] for name in names) + "\n")
