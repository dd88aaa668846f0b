#!/usr/bin/env python3
"""train_fsdp.py as a script that saves checkpoints/checkpoint_epoch_N.pt after each epoch and checks all ranks every 10 steps.

It takes the same options; README.md says where its name comes from.
"""

import sys

from train_fsdp import run

if __name__ == "__main__":
    run(["--save-every=epoch", "--health-every=10", *sys.argv[1:]])
