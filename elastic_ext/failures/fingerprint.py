"""Fingerprints. Equal failures have equal ones: exception type, innermost user frame, shape of the message.

Pure functions, standard library only.
"""

from __future__ import annotations

import re
import sys

from elastic_ext.failures.evidence import RaisedException

MAX_MESSAGE = 300  # characters of a message that count

# Of a message, what varies from one try to the next: quoted text, and words that hold a digit or a path: counts, ids, addresses.
_QUOTED = re.compile(r"(?<!\w)(?:'[^']{0,300}'|\"[^\"]{0,300}\"|`[^`]{0,300}`)(?!\w)")
_VARIES = re.compile(r"[\d/]")

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


def of_cut(hosts: tuple[str, ...]) -> str:
    """Return the fingerprint of a hang between two hosts that cannot reach each other."""
    return f"cut | {' | '.join(sorted(hosts))}"


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
    """Return the shape of a message: its first line, with placeholders for what varies."""
    line = _QUOTED.sub("<quoted>", message.strip().partition("\n")[0][:MAX_MESSAGE])
    return " ".join("<varies>" if _VARIES.search(word) else word for word in line.split())
