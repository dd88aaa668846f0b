"""The progress table: shared memory in which workers write their progress and the agent reads it.

Wire protocol, version 14. The table is a file with one row per worker of this node, in slot order. A row has ROW_BYTES bytes:
native unsigned 64-bit fields at the indices below. Each field has one writer and is written by one store, so there are no locks.
The bootstrap and `elastic_ext.training` write the fields below AGENT_FIELDS; the agent writes those from AGENT_FIELDS on. The
bootstrap sets its fields to 0 when the worker starts, and writes PID last: while PID is 0, the other fields mean nothing.

The agent announces the table and its version in `worker_env`. Increase VERSION when the meaning or the place of a field changes.

This file is loaded by path in every worker before the user's script, so it imports nothing.
"""

VERSION = 14
ROW_BYTES = 4096

PID = 0  # pid of the worker; 0 until all other fields are in place
STEPS = 1  # optimizer steps done
LAST_STEP_NS = 2  # time.monotonic_ns() of the last step; 0: none yet
FIRST_STEP_NS = 3
OPTIM_HOOKED = 4  # 1: torch.optim is imported and steps are counted
STACKS_ARMED = 5  # 1: worker_env.STACKS_SIGNAL has its handler

# Written by elastic_ext.training, if the script uses it.
ASKS_FOR_SAVES = 6  # 1: the script asks at its step boundaries whether to save
SAVES = 7  # checkpoints that the worker has seen committed
SAVE_NS = 8  # duration of the last committed save, from the request to the commit
SAVED_STEP = 9  # step of the last committed save, plus 1
SAVE_KEPT = 10  # number of the last save on demand that was committed
SAVE_FAILED = 11  # number of the last save on demand that failed

# Written when a worker ends with an exception or a failing sys.exit.
ENDS_WITH = 12  # its exit code, never 0: the script is over and its error file is complete
EXIT_HANDLERS_DONE = 13  # 1: all threads and exit handlers have finished; only the interpreter's own teardown is left

# A sign of life is a step, a progress report or a change of phase.
PHASE = 14  # index into PHASES
PHASE_SINCE_NS = 15
PROGRESS = 16  # progress reports
SIGN_NS = 17  # time.monotonic_ns() of the last sign of life; 0: none yet

FAILED_SAVES = 18  # saves that failed

PHASES = ("", "step", "data", "compile", "checkpoint", "eval", "exit")  # exit: the script is over, its process is not
GAPS = 19
"""First field of the histograms, one per phase: how many gaps between two signs of life ended in this phase, by length. A gap
of n ms counts in bucket n.bit_length(), so bucket b holds gaps of at least 2 ** (b - 1) ms and less than 2 ** b ms."""
GAP_BUCKETS = 24  # the last one holds all gaps of 70 minutes and more
ANSWERS = GAPS + len(PHASES) * GAP_BUCKETS  # 1 plus the number of worker_env.ANSWER_SIGNALs answered; 0: it answers none

SAVES_NS = ANSWERS + 1  # duration of all committed saves
SAVED_AT_NS = ANSWERS + 2  # time.monotonic_ns() of the last commit

ENDED_AT_NS = ANSWERS + 3  # time.monotonic_ns() of the exception that ended the script; 0: none has

# Written by elastic_ext.training: loads of checkpoints, and checks of their files for damage, which are a part of a load.
LOADS = ANSWERS + 4
LOADS_NS = ANSWERS + 5  # duration of all loads
CHECKS = ANSWERS + 6
CHECKS_NS = ANSWERS + 7  # duration of all checks

# For the status of the job.
TOTAL_STEPS = ANSWERS + 8  # optimizer steps of the whole job, as the script reported them; 0: it did not
STEPS_BEFORE = ANSWERS + 9  # steps of the job before the first one of this worker, as the script reported them, plus 1

# What the training thread spends its time on. Only `settle` writes these, in that thread. A reader that needs the end of the last
# settled span adds SPENT to BEGAN_NS: that sum never mixes two spans.
ACCOUNTS = (
    *("startup", "productive", "lost_work", "data_wait"),
    *("compile", "checkpoint_save", "checkpoint_load", "stopping"),
)
BEGAN_NS = ANSWERS + 10  # time.monotonic_ns() when the bootstrap took over
SETTLED_NS = BEGAN_NS + 1  # end of the last settled span
SPENT = BEGAN_NS + 2  # first field: settled nanoseconds, one field per account
DOING = SPENT + len(ACCOUNTS)  # 1 plus the account of what the thread does, if the script says so; 0: that of the phase
TOKENS = DOING + 1  # tokens reported by the script
MEGAFLOPS = DOING + 2  # millions of floating-point operations reported by the script
SAVED_AFTER = DOING + 3  # STEPS when the last committed save began

# Copies of the state in memory (elastic_ext.checkpoints.memory).
COPIES = DOING + 4  # copies that were committed
COPIES_STALL_NS = COPIES + 1  # for how long they have stalled training
COPIED_STEP = COPIES + 2  # step of the last one, plus 1
COPY_EVERY = COPIES + 3  # steps from one to the next
FAILED_COPIES = COPIES + 4
UNUSABLE_COPIES = COPIES + 5  # those that the worker should load, and that were damaged or did not fit
PARTS_SENT = COPIES + 6  # parts of copies that another node has, too
PARTS_NOT_SENT = COPIES + 7  # those that it does not have
SENT_BYTES = COPIES + 8

# What torch's flight recorder says; see bootstrap/recorder.py. Times are in time.monotonic_ns().
OUTSTANDING_NS = COPIES + 9  # since when a collective of this worker has been outstanding and none has completed; 0: none is
OUTSTANDING_AT_NS = COPIES + 10  # when that was last read
OUTSTANDING_BEGUN = COPIES + 11  # 1: it does not wait for the worker's own device
SAMPLES = COPIES + 12  # samples of when this worker issued its collectives, written to worker_env.issued_path
JIT_SAVES = COPIES + 13  # 1: SIGTERM only begins transformers' just-in-time save; see `runner.saves_just_in_time`
RECORD_BROKEN = COPIES + 14  # 1: a line of the record of saves could not be written: none of it may be believed
RESUMES = COPIES + 15  # 1: the script takes the agent's word for what to resume from, so None makes it begin from nothing

# What the script shows of itself by `elastic_ext.report`. Of each gauge: the size of its name in bytes, written last, 0: there is
# none; its value, a float64; its name in ASCII, padded.
GAUGES = COPIES + 16
MOST_GAUGES = 16
GAUGE_NAME_BYTES = 64
GAUGE_FIELDS = 2 + GAUGE_NAME_BYTES // 8
OWN_PREFIXES = ("elastic_ext_", "process_")  # of the agent's own families

# Written by the agent.
AGENT_FIELDS = GAUGES + MOST_GAUGES * GAUGE_FIELDS
SAVE_WANTED = AGENT_FIELDS  # number of the latest requested save on demand
REPEATED = AGENT_FIELDS + 1  # how many of the first steps were done before the restart


def is_gauge_name(name: str) -> bool:
    """Return whether Prometheus allows this name, and it is not the agent's."""
    return name.isascii() and name.isidentifier() and len(name) <= GAUGE_NAME_BYTES and not name.startswith(OWN_PREFIXES)


def note_sign(row: memoryview, now_ns: int) -> None:
    """Record a sign of life and the gap that it ends. row: the calling worker's, as unsigned 64-bit fields."""
    last_ns = row[SIGN_NS]
    if last_ns:
        bucket = min(((now_ns - last_ns) // 1_000_000).bit_length(), GAP_BUCKETS - 1)
        row[GAPS + row[PHASE] * GAP_BUCKETS + bucket] += 1
    row[SIGN_NS] = now_ns


_WORK, _LOST = ACCOUNTS.index("productive"), ACCOUNTS.index("lost_work")
# By phase, before and after the first step. Before it, a checkpoint is loaded; after it, saved.
_BEFORE = tuple(
    map(ACCOUNTS.index, ("startup", "productive", "data_wait", "compile", "checkpoint_load", "productive", "stopping"))
)
_AFTER = tuple(
    map(ACCOUNTS.index, ("productive", "productive", "data_wait", "compile", "checkpoint_save", "productive", "stopping"))
)


def account(doing: int, phase: int, steps: int, repeated: int) -> int:
    """Return the account of the span that is not settled yet. The arguments are the fields of these names."""
    if doing:
        return doing - 1
    found = (_AFTER if steps else _BEFORE)[phase]
    return _LOST if found == _WORK and steps < repeated else found


def settle(row: memoryview, now_ns: int) -> None:
    """End a span of the training thread's time. Call this before the row says that something else begins."""
    spent = SPENT + account(row[DOING], row[PHASE], row[STEPS], row[REPEATED])
    row[spent] += max(0, now_ns - row[SETTLED_NS])  # less than 0 only if another thread has just settled
    row[SETTLED_NS] = now_ns


def end(row: memoryview, now_ns: int) -> None:
    """End the script's part in the row. What a failed one did last stays unsettled: perhaps it has waited for a lost peer."""
    if row[ENDS_WITH]:
        row[DOING] = 1 + account(row[DOING], row[PHASE], row[STEPS], row[REPEATED])
    else:
        settle(row, now_ns)
        row[DOING] = 0
    row[PHASE] = PHASES.index("exit")
    row[JIT_SAVES] = 0  # what the script has left to do at its exit may get its time
