"""The reader of printed tracebacks: on what libraries print here, on recorded samples of others, cut anywhere, and in time."""

import os
import re
import subprocess
import sys
import time
import traceback

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.failures import traceback_forms, tracebacks
from elastic_ext.failures.tracebacks import ended_with, last_exception
from tests.failures.test_classify import _repeats, sre_parser

FRAMES = '  File "/job/train.py", line 9, in load\n    return row["labels"]\n           ~~~^^^^^^^^^^\n'
PLAIN = f"Traceback (most recent call last):\n{FRAMES}KeyError: 'labels'\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
SECOND = f"Traceback (most recent call last):\n{FRAMES}RuntimeError: cannot load\n"

# Each has the lines that the program of this version printed, with fewer and other frames and with chains put together of two.
LOGURU = """\
2026-11-29 17:42:46.401 | ERROR    | __main__:<module>:27 - An error has been caught in function '<module>':
Traceback (most recent call last):

> File "/job/train.py", line 27, in <module>
    main()
    └ <function main at 0x7ff953fd7600>

  File "/job/train.py", line 7, in load
    return row["labels"]
           └ {'a': 1}

KeyError: 'labels'

"""
LOGURU_CHAIN = f"""{LOGURU}
The above exception was the direct cause of the following exception:


Traceback (most recent call last):

> File "/job/train.py", line 12, in chained
    raise RuntimeError("cannot load") from e

RuntimeError: cannot load
"""
HYDRA_HINT = "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."
HYDRA = f"Error executing job with overrides: ['lr=1']\n{PLAIN}\n{HYDRA_HINT}\n"
RAY_TASK = (
    "\x1b[36mray::WorkerDict.load()\x1b[39m (pid=9188, ip=192.0.2.2, actor_id=2593, repr=<r.WorkerDict object at 0x7f18>)\n"
)
RAY = f"""\
Traceback (most recent call last):
  File "/job/train.py", line 23, in <module>
    ray.get(worker.load.remote({{}}))
  File "/lib/ray/_private/worker.py", line 1053, in get_objects
    raise value.as_instanceof_cause()
ray.exceptions.RayTaskError(KeyError): {RAY_TASK}           ^^^^^^^^^^^^^^^^^^
{FRAMES}KeyError: 'labels'
"""
RAY_CHAIN = f"{RAY}{CAUSE}{RAY_TASK}           ^^^^^^^^^^^\n{FRAMES}RuntimeError: cannot load\n".replace(
    "(KeyError)", "(RuntimeError)"
)
ACTOR = "\x1b[36m(WorkerDict pid=1365, ip=192.0.2.7)\x1b[0m "
RAY_LOG = "".join(f"{ACTOR}{line}\n" for line in PLAIN.splitlines())
RAY_UNHANDLED = (
    f"ERROR worker.py:439 -- Unhandled error (suppress with 'RAY_IGNORE_UNHANDLED_ERRORS=1'): {RAY_TASK}{FRAMES}KeyError: 'x'\n"
)
COLOURED = """\
Traceback (most recent call last):
  File \x1b[35m"/job/train.py"\x1b[0m, line \x1b[35m9\x1b[0m, in \x1b[35mload\x1b[0m
    return \x1b[31mrow\x1b[0m\x1b[1;31m["labels"]\x1b[0m
           \x1b[31m~~~\x1b[0m\x1b[1;31m^^^^^^^^^^\x1b[0m
\x1b[1;35mKeyError\x1b[0m: \x1b[35m'labels'\x1b[0m
"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/job/train.py", line 25, in main
  |     raise ExceptionGroup("several", [error, inner])
  | ExceptionGroup: several (3 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/job/train.py", line 18, in load
    |     raise error
    | ValueError: a
    | a note: of it
    +---------------- 2 ----------------
    | ExceptionGroup: in (1 sub-exception)
    +-+---------------- 1 ----------------
      | Traceback (most recent call last):
      |   File "/job/train.py", line 21, in load
      |     raise KeyError("cc")
      | KeyError: 'cc'
      |\x20
      | The above exception was the direct cause of the following exception:
      |\x20
      | Traceback (most recent call last):
      |   File "/job/train.py", line 23, in load
      |     raise OSError(28, "No space") from error
      | OSError: [Errno 28] No space
      +------------------------------------
    +---------------- 3 ----------------
    | TypeError: never raised
    +------------------------------------
"""
SYNTAX = '  File "/job/train.py", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n'
RICH_LOG = """\
[11/29/26 17:44:20] ERROR    Training failed                        train.py:9
                             ╭─ Traceback (most recent call last─╮
                             │ /job/train.py:5                   │
                             │ in <module>                       │
                             │                                   │
                             │ ❱  5 try: load({})                │
                             ╰───────────────────────────────────╯
                             KeyError: 'labels'

                             The above exception was the direct
                             cause of the following exception:

                             ╭─ Traceback (most recent call last─╮
                             │ /job/train.py:8 in main           │
                             │                                   │
                             │ ❱  8 │   raise RuntimeError(      │
                             ╰───────────────────────────────────╯
                             RuntimeError: a long message that
                             wraps at the width of the console
"""
RANKS = "".join(f"[rank0]: {line}\n" for line in [*PLAIN.splitlines(), "a note"])
# name: text, class, classes in `wrapped`, whether it ends with the traceback
SAMPLES = {
    "Python 3.13": (PLAIN, "KeyError", (), True),
    "Python 3.13, chain": (PLAIN + CAUSE + SECOND, "RuntimeError", ("KeyError",), True),
    "Python 3.13, context": (PLAIN + CONTEXT + SECOND, "RuntimeError", (), True),
    "Python 3.13, colours": (COLOURED, "KeyError", (), True),
    "Python 3.13, group": (GROUP, "ExceptionGroup", ("ValueError", "ExceptionGroup", "TypeError", "OSError", "KeyError"), True),
    "Python 3.13, of a group": (f"{GROUP}{CAUSE}{SECOND}", "RuntimeError",
                               ("ExceptionGroup", "ValueError", "ExceptionGroup", "TypeError", "OSError", "KeyError"), True),
    "Python 3.13, script": (SYNTAX, "SyntaxError", (), True),
    "Python 3.13, thread": (f"Exception in thread Thread-1 (load):\n{PLAIN}", "KeyError", (), False),
    "Python 3.13, process": (f"Process SpawnProcess-1:\n{PLAIN}", "KeyError", (), True),
    "Python 3.13, logging": (f"[2026-11-29 17:44:05][root][ERROR] - {PLAIN}", "KeyError", (), True),
    "torch 2.13, with a note": (RANKS, "KeyError", (), True),
    "loguru 0.7.3": (LOGURU, "KeyError", (), True),
    "loguru 0.7.3, chain": (LOGURU_CHAIN, "RuntimeError", ("KeyError",), True),
    "hydra 1.3.8": (HYDRA, "KeyError", (), True),
    "Ray 2.60.0": (RAY, "KeyError", (), True),
    "Ray 2.60.0, chain": (RAY_CHAIN, "RuntimeError", ("KeyError",), True),
    "Ray 2.60.0, log of a worker": (RAY_LOG, "KeyError", (), False),
    "Ray 2.60.0, no call waits": (RAY_UNHANDLED, "KeyError", (), False),
    "rich 15.0.0, RichHandler": (RICH_LOG, "RuntimeError", ("KeyError",), True),
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "[default0]:"])
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_read(name, prefix):
    text, kind, wrapped, ends = SAMPLES[name]
    text = "".join(f"{prefix}{line}\n" for line in text.splitlines())
    found = last_exception(f"{prefix}Epoch 1\n{text}")
    assert (found.type, tuple(each.type for each in found.wrapped)) == (kind, wrapped)
    assert found.frames[-1].startswith("/job/train.py:")
    assert ended_with(text) == (found if ends else None)
    assert ended_with(f"{text}{prefix}step 3 loss 2.5\n") is None


def test_whole_exceptions_are_read():
    found = last_exception(RAY)
    assert (found.type, found.message, found.frames) == ("KeyError", "'labels'", ("/job/train.py:9 in load",))
    found = last_exception(RICH_LOG)
    assert (found.message, found.frames) == (
        "a long message that wraps at the width of the console",
        ("/job/train.py:8 in main",),
    )
    assert last_exception(LOGURU).frames == ("/job/train.py:27 in <module>", "/job/train.py:7 in load")
    assert last_exception(PLAIN.replace("KeyError", "job.main.<locals>.OddError")).type == "job.main.<locals>.OddError"


# What follows the exception. True: nothing of the script's.
AFTER = {
    "": True,
    "\n\n": True,
    "step 3 loss 2.5\n": False,
    "2026-11-29 17:42:47 INFO retrying\n": False,
    "  more of the message\n": True,
    "[W1129 17:42:46.1 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before exit\n": True,
    "[W1129 17:42:46.123456789 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=3): Broken pipe\n": True,
    "[rank0]:[E1129 17:42:46.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout\n": False,
    "/lib/resource_tracker.py:254: UserWarning: resource_tracker: 1 leaked semaphore objects\n  warnings.warn('x'\n": True,
    "Exception ignored in: <_io.TextIOWrapper name='<stdout>'>\nBrokenPipeError: [Errno 32] Broken pipe\n": True,
    f"Exception ignored in: <function f at 0x7f>\n{SECOND}": True,
    f"Exception ignored in: <function f at 0x7f>\n{PLAIN}{CONTEXT}{SECOND}": True,
    f"Exception ignored in: <function f at 0x7f>\n{SECOND}step 3\n": False,
    f"step 3\nException ignored in: <function f at 0x7f>\n{SECOND}": False,
    f"Exception in thread Thread-1 (f):\n{SECOND}": True,
    f"Error in atexit._run_exitfuncs:\n{SECOND}": True,
    "elastic_ext: the checkpoint of step 3 is whole\n": True,
    "E1129 17:42:46.1 123 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 0\n": True,
    "train.sh: line 3:  1234 Aborted                 python train.py\nmake: *** [Makefile:3: train] Error 1\n": True,
    "+ exit 1\nsrun: error: node1: task 0: Exited with exit code 1\n": True,
    "terminate called without an active exception\n": True,
    "terminate called after throwing an instance of 'c10::DistBackendError'\n": False,
    "\r  3%|▎         | 3/100 [00:00<00:07, 12.3it/s]\n": True,
    "\r  3%|▎  | 3/100 [00:00<00:07, 12.3it/s]\r  4%|▍  | 4/100 [00:00<00:07, 12.3it/s]\n": False,
    "  3%|▎  | 3/100 [00:00, 9it/s]\n  4%|▍  | 4/100 [00:00, 9it/s]\n  5%|▍  | 5/100 [00:00, 9it/s]\n".lstrip(): False,
    f"{ACTOR}step 3\n": True,
    "wandb: Find logs at: /job/wandb\n": True,
    '"""\n': False,
}


@pytest.mark.parametrize("after", AFTER)
def test_only_the_scripts_output_hides_the_end(after):
    for text in (PLAIN + after, re.sub("(?m)^(?=.)", "[default1]:", PLAIN + after)):
        found = ended_with(text)
        assert (found and found.type) == ("KeyError" if AFTER[after] else None)


CUDA = (
    "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in the manual of CUDA.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions.\n\n"
    "Exception raised from c10_cuda_check_implementation at CUDAException.cpp:44:\nframe #0: c10::Error\n"
)


@pytest.mark.parametrize(
    ("message", "ends"),
    [
        (CUDA, True),
        ("NCCL error in: NCCLUtils.cpp:77\nncclRemoteError: A call failed\nLast error:\nsocket closed\n", True),
        ("\nThe library is not installed\n", True),
        ("expected one of:\na\n", True),
        ("Error(s) in loading state_dict:\n\tMissing key(s): a\n", True),
        ("a note is no different from output\nstep 3\n", False),
    ],
)
def test_lines_of_a_message_are_no_output(message, ends):
    assert bool(ended_with(f"Traceback (most recent call last):\n{FRAMES}RuntimeError: {message}")) == ends


def test_other_ranks_do_not_hide_the_end():
    text = "".join(f"[default0]:{line}\n[default1]:step 3\n" for line in PLAIN.splitlines())
    assert ended_with(text).type == "KeyError"
    assert ended_with(f"{text}[default0]:step 3\n") is None


# Cut texts. An answer is wrong if its class is none of the sample's: a half of a name, say, or a word of a message or of a log.


def classes(name):
    """The classes of a sample: of the exception, of what it was raised from or while handling, and of a group's members."""
    return {"KeyError"} | {SAMPLES[name][1], *SAMPLES[name][2]}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_cut_sample_shows_no_other_class(name):
    data = SAMPLES[name][0].encode()
    found = set()
    for text in (text.decode(errors="replace") for at in range(len(data)) for text in (data[:at], data[at:])):
        last = last_exception(text)
        found |= {each.type for each in (last, ended_with(text), *(last.wrapped if last else ())) if each}
    assert found <= classes(name)


def test_a_cut_class_name_is_not_one():
    text = PLAIN.partition("KeyError")[0]
    for end in ("job.LostError", "KeyErr", "torch.Out", "Key\x1b[0"):
        assert last_exception(text + end) is ended_with(text + end) is None
    for end in ("AssertionError", "job.LostError\n", "job.LostError: x"):
        assert last_exception(text + end).type == ended_with(text + end).type == end.strip().partition(":")[0]


lines = st.sampled_from(
    sorted({line for text, *_ in SAMPLES.values() for line in text.splitlines()} | {"", "ray::(pid=", "|", "+", "\0"})
)


@given(st.text(max_size=99) | st.lists(lines, max_size=40).map("\n".join))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read(text):
    if ended := ended_with(text):
        assert ended.type
    last_exception(text)


# Time.

PATTERNS = [
    (module.__name__, value)
    for module in (tracebacks, traceback_forms)
    for value in vars(module).values()
    if isinstance(value, re.Pattern)
]


@pytest.mark.parametrize(("module", "pattern"), PATTERNS, ids=lambda value: getattr(value, "pattern", value))
def test_no_pattern_can_backtrack_for_long(module, pattern):
    assert all(most < 5000 for _, most, _ in _repeats(sre_parser.parse(pattern.pattern))), module


HARD = {
    "output": "step 1 loss 2.5 lr 0.001 throughput 123 tokens/s\n",
    "headers": "Traceback (most recent call last):\n",
    "headers of a box": "│ ╭─ Traceback (most recent call last) ─╮\n",
    "headers of a group": "x | Traceback (most recent call last):\ny\n",
    "tasks": "  ray::f() (pid=1)\n x\n",
    "ignored": f"Exception ignored in: f\n{PLAIN}",
    "chained": f"{PLAIN}{CAUSE}",
    "groups": GROUP,
    "files": '  File "a", line 1\nx\n',
    "escapes": "\x1b[0m\x1b]8;;",
    "lines": "\n",
    "a line": "a",
}


def milliseconds(text):
    took = []
    for _ in range(5):
        began = time.process_time()
        last_exception(text)
        ended_with(text)
        took.append(time.process_time() - began)
    return min(took) * 1000


@pytest.mark.parametrize("piece", HARD.values(), ids=HARD)
def test_any_64_kib_are_read_in_time(piece):
    """5 ms for output with a traceback at its end, on a machine of 2026; here ten times that, as it may be busy."""
    text = piece * (65536 // len(piece))
    assert milliseconds(f"{text}{PLAIN}") < 50
    assert milliseconds(text) < 200


# What the libraries print here.

RICH = """\
import sys
from rich.traceback import install
install(show_locals="locals" in sys.argv)
def load(row):
    return row["labels"]
def main():
    try:
        load({"a": 1})
    except KeyError as error:
        if "context" in sys.argv:
            raise RuntimeError("cannot load")
        cause = None if "none" in sys.argv else error
        raise RuntimeError(MESSAGE) from cause
MESSAGE = "cannot load the row, because the file /data/train/part-01 has no such column, nor any other one"
main()
"""


def printed(code, *words, **environment):
    """What a script prints to stderr."""
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, timeout=60).stderr.decode()


@pytest.mark.seam
@pytest.mark.parametrize("environment", [{}, {"PYTHONIOENCODING": "ascii"}, {"FORCE_COLOR": "1"}, {"COLUMNS": "40"}],
                         ids=["plain", "ascii", "colour", "narrow"])  # fmt: skip
@pytest.mark.parametrize("how", ["cause", "locals", "none", "context"])
def test_what_rich_prints_is_read(how, environment):
    pytest.importorskip("rich")
    text = printed(RICH, how, **{"COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **environment})
    found = ended_with(f"Epoch 1\n{text}")
    assert found is not None, text
    assert found == last_exception(text)
    assert found.type == "RuntimeError"
    if how != "context":
        assert found.message == "cannot load the row, because the file /data/train/part-01 has no such column, nor any other one"
    assert [each.type for each in found.wrapped] == (["KeyError"] if how in ("cause", "locals") else [])
    assert ended_with(f"{text}step 3\n") is None


@pytest.mark.seam
@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no groups")
def test_what_rich_prints_of_a_group():
    pytest.importorskip("rich")
    raising = "raise ExceptionGroup('g', [ValueError('a'), ExceptionGroup('in', [OSError(28, 'No space')])])"
    found = ended_with(printed(f"from rich.traceback import install\ninstall()\n{raising}", COLUMNS="80"))
    assert found.type == "ExceptionGroup"
    if found.wrapped:  # since rich 14.1
        assert [each.type for each in found.wrapped] == ["ValueError", "ExceptionGroup", "OSError"]


@pytest.mark.seam
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("def f(): f()\nf()", "RecursionError"),
        ("x = = 1", "SyntaxError"),
        ("compile('x = = 1', 'a.py', 'exec')", "SyntaxError"),
        ("import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()\nraise KeyError", "KeyError"),
        ("import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()", None),
        ("class A:\n    def __del__(self): 1 / 0\na = A()\nraise KeyError", "KeyError"),
        ("import atexit\natexit.register(lambda: 1 / 0)\nraise KeyError", "KeyError"),
        (
            "import sys, traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\nprint(1, file=sys.stderr)",
            None,
        ),
    ],
)
def test_what_python_prints_is_read(code, kind):
    found = ended_with(printed(code))
    assert (found and found.type) == kind


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no groups")
def test_groups_and_notes_of_this_python():
    error = ValueError("a")
    error.add_note("a note: of it")
    with pytest.raises(ExceptionGroup) as raised:  # noqa: F821 - since 3.11
        raise ExceptionGroup("several", [error, KeyError("b")])  # noqa: F821
    text = "".join(traceback.format_exception(raised.value))
    assert ended_with(text) == last_exception(text)
    assert [each.type for each in ended_with(text).wrapped] == ["ValueError", "KeyError"]
