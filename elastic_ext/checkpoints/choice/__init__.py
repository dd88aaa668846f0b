"""Choose the checkpoint that a round resumes from, and agree on it with the other nodes.

agreement.py    agree on one answer across the nodes of a round, from all sources; quarantine what is to blame
offers.py       the messages for that, and what follows from them (pure)
listing.py      find the candidates in a directory and check each
ordering.py     choose the newest complete one of several candidates (pure)
"""
