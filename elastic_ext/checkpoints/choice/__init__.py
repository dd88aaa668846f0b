"""Choose the checkpoint that a round resumes from, and agree on it with the other nodes.

resolution.py   agree on one answer across the nodes of a round
sources.py      what there is in the nodes' memory, in their local directories and in checkpoint_dir; quarantine what is to blame
offers.py       the messages for that, and what follows from them (pure)
discovery.py    find the candidates in a directory and check each
selection.py    choose the newest complete one of several candidates (pure)
"""
