"""Choose the checkpoint that a round resumes from, and agree on it with the other nodes.

selection.py    choose the newest complete one of several candidates (pure)
discovery.py    find the candidates in a directory and check each
resolution.py   agree on one answer across the nodes of a round; messages.py: the messages for that
run_start.py    when the run began, for resume_from after a restart
blame.py        quarantine the checkpoint that a failure is blamed on
listing.py      list all checkpoints of a directory, for the commands
"""
