"""The last exception in a worker's stderr, found in linear time; and fingerprints: equal failures have equal ones.

A fingerprint is the type of the exception, the user's innermost frame, and the shape of the message. Standard library only.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace

from elastic_ext.failures.evidence import RaisedException, Wrapped

HEADER = "Traceback (most recent call last):"
CAUSE = "The above exception was the direct cause of the following exception:"
MAX_CAUSES = 4
MAX_LINES = 2000  # a recursion error prints about that many; later lines are ignored
MAX_MESSAGE_LINES = 50  # indented lines after the first line of a message, e.g. torch's list of missing keys
MAX_LINE = 4096  # characters

_FRAME = re.compile(r'  File "([^"\n]{1,4096})", line (\d{1,9})(?:, in ([^\n]{1,200}))?')
_RAISED = re.compile(r"([^\W\d][\w.]{0,200})(?:: ?|$)")


def last_exception(text: str) -> RaisedException | None:
    """Return the exception of the last traceback in `text`, or None.

    Any text before "Traceback" on its line counts as a prefix, like those that torch ("[rank0]: ") and torchrun ("[default0]:")
    put before each line of a rank. Lines with another prefix are skipped. What it was raised from is in `wrapped`.
    """
    found = None
    causes: list[Wrapped] = []
    end = len(text)
    while len(causes) <= MAX_CAUSES:
        at = text.rfind(HEADER, 0, end)
        if at < 0:
            break
        start = text.rfind("\n", 0, at) + 1
        lines = text[at:end].split("\n", MAX_LINES)[1 : MAX_LINES + 1]
        raised = _read(_without_prefix(lines, text[start:at])) or _read(lines)
        if raised is None:
            break
        if found is None:
            found = raised
        else:
            causes.append(Wrapped(raised.type, raised.message))
        end = text.rfind(CAUSE, 0, start)
        if end < 0 or HEADER in text[end:start]:
            break
    return replace(found, wrapped=tuple(causes)) if found else None


def _without_prefix(lines: list[str], prefix: str) -> list[str]:
    return [line[len(prefix) :] for line in lines if line.startswith(prefix)] if prefix else lines


def _read(lines: list[str]) -> RaisedException | None:
    """Read the indented frames and source lines up to the first line without indent, which names the exception."""
    frames = []
    for number, line in enumerate(lines):
        if frame := _FRAME.match(line[:MAX_LINE]):
            path, line_number, function = frame.groups()
            frames.append(f"{path}:{line_number} in {function}" if function else f"{path}:{line_number}")
        elif line and not line[0].isspace():
            raised = _RAISED.match(line[:MAX_LINE].rstrip())
            if raised is None:
                return None
            message = [line[raised.end() : MAX_LINE].rstrip(), *_indented(lines[number + 1 : number + 1 + MAX_MESSAGE_LINES])]
            return RaisedException(raised[1], "\n".join(message), tuple(frames))
    return None


def _indented(lines: list[str]) -> list[str]:
    found = []
    for line in lines:
        if line[:1] not in (" ", "\t"):
            break
        found.append(line[:MAX_LINE].rstrip())
    return found


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
    """Return the shape of a message: its first line, with placeholders for what varies."""
    line = _QUOTED.sub("<quoted>", message.strip().partition("\n")[0][:MAX_MESSAGE])
    return " ".join("<varies>" if _VARIES.search(word) else word for word in line.split())
