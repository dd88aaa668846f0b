"""Jobs of 64 to 131,072 GPUs in virtual time: what failures cost them, with the decisions of the real modules.

inputs.py     published figures with their sources, and what is assumed
causes.py     what a failure looks like: evidence for the classifier, and the truth that it does not know
decisions.py  reports to the real judgement, and whether what it decides is right
sides.py      ours, stock and an ideal one: how long each takes for what
job.py        one job: a heap of events, and the account of its time
rounds.py     the real state machine of rounds through one failure, with as many nodes as a job has
scheduled.py  one job under a schedule of failures, beside a real one
study.py      many jobs: means and their confidence, curves, and what limits

The scripts are benchmarks/simulate.py and benchmarks/compressed.py.
"""
