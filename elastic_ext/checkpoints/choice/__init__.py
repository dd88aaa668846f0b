"""Choose the checkpoint that a round resumes from, and agree on it with the other nodes.

selection.py    which of several candidates is the newest complete one (pure)
discovery.py    the candidates of a directory, and the check of each
resolution.py   one answer for all nodes of a round; messages.py: what they send each other
beginning.py    the setting resume_from after the first restart
blame.py        quarantine the checkpoint that a failure is blamed on
listing.py      all checkpoints of a directory, for the commands
"""
