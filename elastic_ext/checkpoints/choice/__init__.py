"""Choose the checkpoint that a round resumes from, and agree on it with the other nodes.

agreement.py    agree on one answer across the nodes of a round
sources.py      what there is in the nodes' memory, in their local directories and in checkpoint_dir; quarantine what is to blame
offers.py       the messages for that, and what follows from them (pure)
listing.py      find the candidates in a directory and check each
ordering.py     choose the newest complete one of several candidates (pure)
"""
