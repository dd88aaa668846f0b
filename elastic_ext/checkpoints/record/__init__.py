"""The record of saves: what the workers wrote below the directories of checkpoints, and which saves that proves to be whole.

journal.py  read the workers' journals (their lines: see workers/bootstrap/saves.py)
fold.py     what was saved, by the events of all ranks of a round
proof.py    decide which saves of a round are proved, and why
stored.py   what is kept of that beside the checkpoints, and whether it still holds (`features/record/watch.py` writes it)
"""
