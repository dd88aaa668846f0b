"""Seeded runs: a job on hosts of its own, faults by a schedule that follows from the seed, checks over the recorded history."""
