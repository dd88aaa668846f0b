"""The record of saves: what the workers wrote below the directories of checkpoints, and which saves that proves to be whole.

journal.py  read the workers' journals (their lines: see workers/bootstrap/saves.py)
proof.py    decide from the events of all ranks of a round which saves are proved, and why
"""
