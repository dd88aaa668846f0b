"""A directory of checkpoints as a whole, and the local tier in front of it.

layout.py       the files beside the checkpoints
marks.py        quarantine and pin checkpoints
generations.py  the fence: only the newest group of workers may commit
pruning.py      choose and remove old checkpoints
transfer.py     copy a checkpoint to another directory
tiers.py        the parts of a checkpoint on the nodes' local disks
pins.py         keep a local checkpoint until it is loaded
"""
