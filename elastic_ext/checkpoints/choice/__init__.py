"""Choose the checkpoint that a round resumes from, and agree on it with the other nodes.

selection.py    choose the newest complete one of several candidates (pure)
kin.py          families of names that belong together: which one to resume from (pure)
discovery.py    find the candidates in a directory and check each
evidence.py     what lies beside checkpoints and says which are whole
below.py        what lies in a directory that has none to resume from
resolution.py   agree on one answer across the nodes of a round; messages.py: the messages for that
run_start.py    when the run began, for resume_from after a restart
blame.py        quarantine the checkpoint that a failure is blamed on
listing.py      list all checkpoints of a directory, for the commands
"""
