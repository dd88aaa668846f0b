"""The nodes of a round agree on the checkpoint that it resumes from, and quarantine the one that a failure is blamed on."""
