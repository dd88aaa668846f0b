"""A directory of checkpoints as a whole, and the local tier in front of it.

own_files.py    manifests, which commit; marks, which quarantine and pin checkpoints
generations.py  the fence: only the newest group of workers may commit
catalogue.py    all checkpoints, each with its state and how it is known
upkeep.py       choose and remove old checkpoints; copy a checkpoint to another directory
tiers.py        the parts of a checkpoint on the nodes' local disks, and locks that keep one until it is loaded

The files beside the checkpoints, all but UNFINISHED below `.elastic_ext/`, are hidden, so never a checkpoint. Processes of one
job, and of later jobs, use them to inform each other about checkpoints:

    quarantine/NAME.json         in either directory: do not resume from this checkpoint (`own_files`)
    pin/NAME.json                in the remote directory: do not prune this checkpoint (`own_files`)
    generation-NNNNNNNN          in the remote directory: a group of workers has opened it (`generations`)
    resume_from/RUN.json         in the remote directory: the resume_from at which a run began (`agreement/`)
    saves/ATTEMPT.ORDER.NAME     in either directory: what is recorded of a save of the job (`record/stored`)
    copying, copying_from/NODE   in the remote directory: the checkpoint that the nodes copy there now (`copying/`)
    copied_to                    in a local directory: the remote directory that it belongs to (`tiers`)
    held/, copied/, removed/,    in a local directory: what is copied of the saves of scripts there (`copying/`)
    used, off
    fetched/                     in a local directory: files that other nodes sent for a load (`ranks`)
    of_nodes/NUMBER/             the same of what a script has saved, with links to this node's own files (`sharing/fetching`)
    mirrored/KEY/                the parts of saves that this node keeps of other nodes (`sharing/mirrored`)
    choosing, loading/NAME       in a local directory: locks of agents that choose and workers that load (`tiers`)

Only the named module reads and writes each file. But for those of `saves/`, the files have no version: fields may be added, and
readers ignore unknown ones. A mark that cannot be parsed counts as set.
"""
