"""Real jobs that save in many ways, and are killed at random moments: what each restart resumes from is checked.

`python -m tests.chaos.kills --jobs=own,inplace --kills=100 --seed=1`. The jobs are tests/scripts/killed_job.py.
"""
