#!/usr/bin/env python3
"""finetune_t5.py under the name that a TrainJob calls it by, with the same options; README.md says where the name comes from."""

from finetune_t5 import run

if __name__ == "__main__":
    run()
