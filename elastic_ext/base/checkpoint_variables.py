"""The environment variables with which an agent tells its workers and its copier about checkpoints. The agent sets all of them.

Version 1: variables may be added, but never change their meaning. With `checkpoint_dir` set, a worker finds:

    ELASTIC_EXT_CHECKPOINT_DIR   the setting checkpoint_dir: a URL or an absolute path, also where the user gave a relative one
    ELASTIC_EXT_LOCAL_DIR        the setting local_dir, likewise; "" for none
    ELASTIC_EXT_RESUME_FROM      absolute path or URL of the checkpoint to resume from, or of the file in it that this rank wrote;
                                 "": begin from nothing
    ELASTIC_EXT_RESUME_STEP      its step, a decimal number; absent if neither its content nor its name gives one
    ELASTIC_EXT_MEMORY_DIR       the agent's directory in memory for copies of the state; "" or absent for none
    ELASTIC_EXT_MEMORY_LIMIT     how many bytes this worker's copies may have there, all together
    ELASTIC_EXT_MEMORY_EVERY     the setting memory_every, a decimal number; absent for the default
    ELASTIC_EXT_MEMORY_PEER      Unix socket of the agent, which sends copies in memory to another node; "" or absent for none
"""

from __future__ import annotations

CHECKPOINT_DIR = "ELASTIC_EXT_CHECKPOINT_DIR"
LOCAL_DIR = "ELASTIC_EXT_LOCAL_DIR"
RESUME_FROM = "ELASTIC_EXT_RESUME_FROM"
RESUME_STEP = "ELASTIC_EXT_RESUME_STEP"
MEMORY_DIR = "ELASTIC_EXT_MEMORY_DIR"
MEMORY_LIMIT = "ELASTIC_EXT_MEMORY_LIMIT"
MEMORY_EVERY = "ELASTIC_EXT_MEMORY_EVERY"
MEMORY_PEER = "ELASTIC_EXT_MEMORY_PEER"


def resume_variables(path: str, step: int | None) -> dict[str, str]:
    """Return the variables for a checkpoint. path: "" to begin from nothing. step: None if it is unknown."""
    return {RESUME_FROM: path, **({} if step is None else {RESUME_STEP: str(step)})}
