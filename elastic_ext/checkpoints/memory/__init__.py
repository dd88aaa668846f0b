"""The memory tier: copies of the training state in memory that belongs to the agent, so that they outlive a worker.

Each worker has two buffers, files in a directory of the agent on tmpfs. The agent removes the directory at its end; the reaper
removes it if the agent is killed. The directory has the form of a local tier (`directory/tiers.py`), so the same code lists it
and finds out what is whole. A node has the parts of its own ranks, and those of another node:

    step_00000120.g0003/rank_00001.mem   a buffer of rank 1 with its part of this generation of the copy (`part.py`)
    step_00000120.g0003/manifest.json    written last, with sizes and checksums of all ranks' parts: the commit
    .elastic_ext/spare/...               buffers that hold nothing yet

One of the two buffers holds the last committed copy, the other is written next. Before its first byte is written, the buffer is
moved out of the directory of its older copy, which from then on lacks a part and so is not whole. The next copy begins only when
every rank knows that the last one is committed on every node. So there is a whole copy at any time after the first commit,
whenever and wherever a worker is killed.

Training waits only for the copy into the buffer. A thread then computes the checksum and commits. If anything fails, on any rank,
nothing is committed, the last copy stays, and the log says so once.

saver.py     copy, step after step, and commit: from the parts of all ranks to a manifest on each node
pace.py      how often, and whether that is safe beside training (pure)
part.py      the content of one buffer; the files, mapped, and which of the two is next; from mapped parts back into the state,
             also on other nodes or with another number of ranks
devices.py   copy from a GPU beside training
mirror.py    each rank's part on another node, too

Which copy a round resumes from is decided with the other tiers, in `choice/`.
"""
