"""The fingerprint of a failure: equal for two failures that are the same; and the frames of an exception, which it needs. Pure.

It holds the type of the exception, the user's innermost frame, and the shape of the message.
"""

from __future__ import annotations

import re
import sys

from elastic_ext.failures.evidence import RaisedException

MAX_SHAPE = 300  # characters of the shape of a message that count in a fingerprint

# Of a message, what varies from one try to the next: quoted text, the name of a host, words that hold a digit or a path (counts,
# ids, addresses), units of memory (GPU memory that runs out again does so by MiB or by GiB), and whether it is a NaN or infinite.
_QUOTED = re.compile(r"(?<!\w)(?:'[^']{0,300}'|\"[^\"]{0,300}\"|`[^`]{0,300}`)(?!\w)")
_VARIES = re.compile(r"[\d/]|\A(?:[KMGT]i?B|bytes|(?i:-?nan|-?inf))\b")
_HOST = re.compile(r"(?i:\b(node|host|hostname))[:=] ?[\w.-]{1,255}")
_HOLDERS = re.compile(r"(?:Process <varies> has <varies> <varies> memory in use\. ?){2,20}")  # of a GPU, one or more

# Parts of the paths of library files. Frames from an error file have no directory: see _LIBRARY_CALLS.
_LIBRARY_PATHS = ("/site-packages/", "/dist-packages/", "/lib/python", "/torch/", "<frozen ")
_STANDARD_MODULES = frozenset(sys.stdlib_module_names)

# Frames of torch in a traceback, as "file function". Both must match, because a user may also have a module.py.
_LIBRARY_CALLS = frozenset(
    {
        "module.py _wrapped_call_impl", "module.py _call_impl", "module.py load_state_dict", "module.py __getattr__",
        "_tensor.py backward", "__init__.py backward", "graph.py _engine_run_backward",
        "optimizer.py wrapper", "optimizer.py profile_hook_step", "_contextlib.py decorate_context",
        "dataloader.py __next__", "dataloader.py _next_data", "dataloader.py _process_data", "fetch.py fetch",
        "linear.py forward", "functional.py cross_entropy", "c10d_logger.py wrapper", "distributed_c10d.py all_reduce",
        "distributed_c10d.py init_process_group", "serialization.py load", "distributed.py forward",
    }
)  # fmt: skip


def of_exception(exception: RaisedException) -> str:
    """Return the fingerprint of a failure with an exception."""
    return f"{exception.type} | {top_user_frame(exception.frames)} | {normalised(exception.message)}"


def of_exit(rule: str, ended: str) -> str:
    """Return the fingerprint of a failure without an exception: the rule that matched, and the signal or the exit code."""
    return f"{rule} | {ended}"


def of_hosts(what: str, hosts: tuple[str, ...]) -> str:
    """Return the fingerprint of a failure of certain hosts together. what: "cut" if they cannot reach each other."""
    return f"{what} | {' | '.join(sorted(hosts))}"


def top_user_frame(frames: tuple[str, ...]) -> str:
    """Return the innermost user frame, else the innermost frame, without its directory; "" if there are no frames."""
    users = [frame for frame in frames if not _is_library(frame)] or list(frames)
    return users[-1].rpartition("/")[2] if users else ""


def _is_library(frame: str) -> bool:
    place, _, function = frame.partition(" in ")
    path = place.rpartition(":")[0]
    if "/" in path:
        return any(part in path for part in _LIBRARY_PATHS)
    return path.startswith("<frozen ") or f"{path} {function}" in _LIBRARY_CALLS or path.removesuffix(".py") in _STANDARD_MODULES


def normalised(message: str) -> str:
    """Return the shape of a message: its first line, with placeholders for what varies; cut after that, as the length varies."""
    line = _HOST.sub(r"\1: <varies>", _QUOTED.sub("<quoted>", message.strip().partition("\n")[0][: 4 * MAX_SHAPE]))
    shape = " ".join("<varies>" if _VARIES.search(word) else word for word in line.split())
    return _HOLDERS.sub("Process <varies> has <varies> <varies> memory in use. ", shape)[:MAX_SHAPE]


def library_of(frames: tuple[str, ...]) -> str:
    """Return the installed module whose frame raised, as "requests.adapters"; "": the script's own frame, or unknown.

    Frames of the standard library are passed over: the caller counts.
    """
    for frame in reversed(frames):
        if found := _INSTALLED.search(frame):
            return found[1].replace("/", ".")
        if not _is_library(frame):
            return ""
    return ""


_INSTALLED = re.compile(r"/(?:site|dist)-packages/([\w/]{1,300})\.py:")
