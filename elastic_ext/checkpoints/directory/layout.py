"""What lies in a directory of checkpoints beside them: everything of ours below `.elastic_ext/`, which no listing takes for a
checkpoint. The files are how processes of one job, and of the jobs after it, tell each other about checkpoints:

    quarantine/NAME.json         in the remote directory: never resume from this checkpoint (`marks`)
    pin/NAME.json                in the remote directory: never prune this checkpoint (`marks`)
    generation-NNNNNNNN          in the remote directory: a group of workers has opened it (`generations`)
    resume_from/RUN.json         in the remote directory: where a run was told to begin (`choice/beginning.py`)
    copying, copying_from/NODE   in the remote directory: what the nodes copy there now (`copying/`)
    copied_to                    in a local directory: the remote one that it belongs to (`tiers`)
    choosing, loading/NAME       in a local directory: locks of agents that choose and workers that load (`pins`)

Each file is written and read by the one module that is named. None has a version: fields may be added, and a reader passes over
those that it does not know. A file that cannot be understood never makes a checkpoint usable that was not.
"""

MARKERS = ".elastic_ext"
