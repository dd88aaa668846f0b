"""The files beside the checkpoints of a directory, all but UNFINISHED below `.elastic_ext/`: hidden, so never a checkpoint.
Processes of one job, and of later jobs, use them to tell each other about checkpoints:

    quarantine/NAME.json         in the remote directory: do not resume from this checkpoint (`marks`)
    pin/NAME.json                in the remote directory: do not prune this checkpoint (`marks`)
    generation-NNNNNNNN          in the remote directory: a group of workers has opened it (`generations`)
    resume_from/RUN.json         in the remote directory: the resume_from at which a run began (`choice/run_start.py`)
    copying, copying_from/NODE   in the remote directory: the checkpoint that the nodes copy there now (`copying/`)
    copied_to                    in a local directory: the remote directory that it belongs to (`tiers`)
    fetched/                     in a local directory: files that other nodes sent for a load (`writing/`)
    choosing, loading/NAME       in a local directory: locks of agents that choose and workers that load (`pins`)

Only the named module reads and writes each file. The files have no version: fields may be added, and readers ignore unknown
ones. A mark that cannot be parsed counts as set.
"""

MARKERS = ".elastic_ext"

UNFINISHED = "-unfinished"  # NAME-unfinished beside a checkpoint: it is being written, copied or removed; NeMo's own mark, too
