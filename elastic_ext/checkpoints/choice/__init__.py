"""Choose the checkpoint that a round resumes from, and agree on it with the other nodes.

agreement.py    agree on one answer across the nodes of a round, from all sources; quarantine what is to blame
listing.py      find the candidates in a directory and check each
decisions.py    choose among candidates; the messages between nodes, and what follows from them (pure)
"""
