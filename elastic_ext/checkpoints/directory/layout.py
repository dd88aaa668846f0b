"""The files that lie beside the checkpoints of a directory, all below `.elastic_ext/`, a hidden name that is never a checkpoint.
Processes of one job, and of the jobs after it, use them to tell each other about checkpoints:

    quarantine/NAME.json         in the remote directory: do not resume from this checkpoint (`marks`)
    pin/NAME.json                in the remote directory: do not prune this checkpoint (`marks`)
    generation-NNNNNNNN          in the remote directory: a group of workers has opened it (`generations`)
    resume_from/RUN.json         in the remote directory: the resume_from that a run began at (`choice/beginning.py`)
    copying, copying_from/NODE   in the remote directory: the checkpoint that the nodes copy there now (`copying/`)
    copied_to                    in a local directory: the remote one that it belongs to (`tiers`)
    fetched/                     in a local directory: files that other nodes have sent for a load (`writing/`)
    choosing, loading/NAME       in a local directory: locks of agents that choose and workers that load (`pins`)

Only the named module writes and reads a file. The files have no version: fields may be added, and readers ignore those that they
do not know. A mark that cannot be understood counts as set.
"""

MARKERS = ".elastic_ext"
