"""Writes the exception that ends the script into the worker's error file, which torchrun and the agent read.

The file is one JSON object. "message" holds what torch's @record writes, "elastic_ext" holds our account:

    type, message     type and message of the exception, truncated
    frames            ["file.py:line in function", ...], outermost first, truncated; ".../site-packages/a/b.py" if installed
    bases             ["type", ...] of its base classes below Exception, nearest first, truncated
    errno             of an OSError; null for any other
    causes            ["type: message", ...] of the exceptions that Python shows above it, nearest first, truncated
    wrapped           [{"type", "message", "bases", "errno"}, ...] of what it was raised from, and of the members of a group,
                      nearest first, truncated
    monotonic_ns      time.monotonic_ns() when the exception left the script
    first_step_done   whether an optimizer step was done; null if steps are not counted

This file is loaded by path in every worker before the script; see `bootstrap.py` for what it may import.
"""

import os
import sys
import time

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from types import TracebackType

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"

# Limits, because the agent and others read the whole file.
MESSAGE_CHARACTERS = 16 * 1024
CALLSTACK_CHARACTERS = 128 * 1024
PRESENT_BYTES = 1 << 20
FIRST_FRAMES, LAST_FRAMES = 8, 56
CAUSES, CAUSE_CHARACTERS = 8, 2 * 1024
BASES = 16


def runpy_refusal(error: BaseException) -> "tuple[str, str] | None":
    """Return a type and message if `error` is the SystemExit that runpy raises when it cannot find or load the module."""
    runpy, reason = sys.modules.get("runpy"), error.__context__
    if not isinstance(error, SystemExit) or runpy is None or not isinstance(reason, runpy._Error):
        return None
    absent = isinstance(reason.__cause__, ModuleNotFoundError) or str(reason).startswith("No module named")
    return "ModuleNotFoundError" if absent else "ImportError", str(reason)


def write(path: str, error: BaseException, trace: "TracebackType | None", first_step_done: "bool | None", raised_ns: int) -> bool:
    """Write the error file, or add our account to what @record has written.

    trace: the traceback of `error`, starting at the script's first frame. raised_ns: time.monotonic_ns() when it left the script.
    Returns False and leaves the file unchanged if it holds something else. Raises OSError, and any error that the exception's own
    code raises.
    """
    import json
    import traceback

    refusal = runpy_refusal(error)
    kind, message = refusal or (_type_name(type(error)), text_of(error))
    steps = traceback.walk_tb(None if refusal else trace)
    frames = [f"{_file_name(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}" for frame, line in steps]
    account = {
        **_account(error, kind, message, MESSAGE_CHARACTERS),
        "frames": frames if len(frames) <= FIRST_FRAMES + LAST_FRAMES else frames[:FIRST_FRAMES] + frames[-LAST_FRAMES:],
        "causes": [] if refusal else _causes(error),
        "wrapped": []
        if refusal
        else [_account(each, _type_name(type(each)), text_of(each), CAUSE_CHARACTERS) for each in _wrapped(error)],
        "monotonic_ns": raised_ns,
        "first_step_done": first_step_done,
    }
    present = _present(path)
    if present is None:
        return False
    if present:  # @record wrote it first
        try:
            data = json.loads(present)
        except ValueError:
            return False
        if not isinstance(data, dict):
            return False
    else:
        short = _clip(f"{kind if refusal else type(error).__name__}: {message}", MESSAGE_CHARACTERS)
        shown = short if refusal else "".join(traceback.format_exception(type(error), error, trace))
        extra = {"py_callstack": _clip(shown, CALLSTACK_CHARACTERS), "timestamp": str(int(time.time()))}
        data = {"message": {"message": short, "extraInfo": extra}}
    replace(path, json.dumps({**data, "elastic_ext": account}))
    return True


def _file_name(path: str) -> str:
    """Return the name of a script's file; of an installed one the path from site-packages on, which shows whose it is."""
    found = max(path.rfind("/site-packages/"), path.rfind("/dist-packages/"))
    return f"...{path[found:]}" if found >= 0 else os.path.basename(path)


def _present(path: str) -> "bytes | None":
    """Return the file's content: empty if the file does not exist, None if it exceeds PRESENT_BYTES. Raises OSError."""
    if not os.path.exists(path):
        return b""
    if not os.path.isfile(path):  # reading a pipe or a device could block or never end
        raise OSError(f"{path} is not a regular file")
    if os.path.getsize(path) > PRESENT_BYTES:
        return None
    with open(path, "rb") as file:
        return file.read()


def replace(path: str, text: str) -> None:
    """Write a file atomically. Raises OSError."""
    temporary = f"{path}.{os.urandom(8).hex()}.tmp"
    try:
        with open(temporary, "x") as file:  # "x" follows no link
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def _type_name(kind: "type[BaseException]") -> str:
    """Return the qualified name, without the module for builtins and the script's types; torch's documented one for OOM."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    if kind.__name__ == "OutOfMemoryError" and str(kind.__module__).partition(".")[0] == "torch":
        return "torch.OutOfMemoryError"
    return f"{kind.__module__}.{kind.__qualname__}"


def _account(error: BaseException, kind: str, message: str, characters: int) -> "dict[str, object]":
    bases = [_type_name(base) for base in type(error).__mro__[1:] if base not in (Exception, BaseException, object)]
    return {
        "type": kind,
        "message": _clip(message, characters),
        "bases": bases[:BASES],
        "errno": error.errno if isinstance(error, OSError) and isinstance(error.errno, int) else None,
    }


def _wrapped(error: BaseException) -> "list[BaseException]":
    """Return what `error` stands for: what it was raised from, and the members of groups."""
    found: list[BaseException] = []
    seen = {id(error)}
    waiting = [error]
    while waiting and len(found) < CAUSES:
        first = waiting.pop(0)
        members = getattr(first, "exceptions", ()) if type(first).__name__.endswith("ExceptionGroup") else ()
        above = _above(first) if isinstance(first, SystemExit) else first.__cause__  # sys.exit("failed") in an except clause
        for each in (above, *(members if isinstance(members, (list, tuple)) else ())):
            if isinstance(each, BaseException) and id(each) not in seen:
                seen.add(id(each))
                found.append(each)
                waiting.append(each)
    return found[:CAUSES]


def _causes(error: BaseException) -> "list[str]":
    """Return what Python shows above `error`: the exceptions that it was raised from, or while they were handled."""
    found: list[str] = []
    seen = {id(error)}
    above = _above(error)
    while above is not None and id(above) not in seen and len(found) < CAUSES:  # a script can make a ring of them
        seen.add(id(above))
        found.append(_clip(f"{_type_name(type(above))}: {text_of(above)}", CAUSE_CHARACTERS))
        above = _above(above)
    return found


def _above(error: BaseException) -> "BaseException | None":
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def text_of(error: BaseException) -> str:
    """Return str(error), or a placeholder if that raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the class's own code; the traceback module prints the same text
        return "<exception str() failed>"


def _clip(text: str, limit: int) -> str:
    """Shorten `text` to at most `limit` characters by keeping its head and tail."""
    if len(text) <= limit:
        return text
    half = limit // 2 - 32  # leaves room for the line in between
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
