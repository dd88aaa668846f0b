"""Finds, reads and compiles the user's script as `python [-m] SCRIPT` does (CPython 3.10 to 3.13: Modules/main.c,
Python/pythonrun.c). Nothing here runs the script.

This file is loaded by path in every worker before the script; see `bootstrap.py` for what it may import.
"""

import marshal
import os
import sys
from _frozen_importlib import BuiltinImporter
from _frozen_importlib_external import MAGIC_NUMBER, SourceFileLoader, SourcelessFileLoader

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, ModuleType
    from typing import Any

_SAFE_PATH = getattr(sys.flags, "safe_path", sys.flags.isolated)  # Python 3.10 has only -I
_PY_FILE_INPUT = 257  # Py_file_input


def fresh_main() -> "dict[str, Any]":
    """Put a new `__main__` into sys.modules and return its namespace as the interpreter would initialize it."""
    main: ModuleType = type(sys)("__main__")
    main.__dict__.update(__loader__=BuiltinImporter, __annotations__={}, __builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = main
    return main.__dict__


def forget_file(namespace: "dict[str, Any]") -> None:
    """Remove the names that atexit handlers and remaining threads do not see after the script ends (PyRun_SimpleFile)."""
    namespace.pop("__file__", None)
    namespace.pop("__cached__", None)


def resolve(argv: "list[str]", namespace: "dict[str, Any]") -> "tuple[Callable[..., object], tuple[Any, ...]]":
    """Set sys.path[0] and return the function that runs the script, with its arguments (pymain_run_python).

    argv: [SCRIPT, *ARGS] or ["-m", MODULE, *ARGS]. namespace: that of `__main__`.
    """
    if not argv or argv == ["-m"]:
        say("usage: bootstrap.py [-m] SCRIPT ARGS...")
        raise SystemExit(2)
    if argv[0] == "-m":
        if not _SAFE_PATH:
            sys.path.insert(0, os.getcwd())
        import runpy

        return runpy._run_module_as_main, (argv[1], True)  # type: ignore[attr-defined]
    filename = argv[0]
    if not os.path.isabs(filename):  # _Py_abspath, which normalises nothing
        filename = os.getcwd() if filename == "." and sys.version_info >= (3, 11) else f"{os.getcwd()}/{filename}"
    if _has_importer(filename):  # a directory or a zip file
        sys.path.insert(0, filename)
        import runpy

        return runpy._run_module_as_main, ("__main__", False)  # type: ignore[attr-defined]
    if not _SAFE_PATH:
        sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
    return exec, (_load(filename, namespace), namespace)


def _has_importer(path: str) -> bool:
    """Return whether PyImport_GetImporter would find an importer for the path."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def _load(filename: str, namespace: "dict[str, Any]") -> "CodeType":
    """Return the script's code and set `__file__`, `__cached__` and `__loader__` (pymain_run_file, PyRun_SimpleFile)."""
    try:
        with open(filename, "rb") as file:
            data = file.read()
    except OSError as error:
        say(f"{sys.orig_argv[0]}: can't open file {filename!r}: [Errno {error.errno}] {error.strerror}")
        raise SystemExit(2) from None
    compiled = filename.endswith(".pyc") or data[:2] == MAGIC_NUMBER[:2]
    loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", filename)
    namespace.update(__file__=filename, __cached__=None, __loader__=loader)
    if not compiled:
        return _compile(data, filename, namespace)
    if data[:4] != MAGIC_NUMBER:
        raise RuntimeError("Bad magic number in .pyc file")
    code: CodeType = marshal.loads(data[16:])  # skips the magic number, the flags and two words about the source
    return code


def _compile(data: bytes, filename: str, namespace: "dict[str, Any]") -> "CodeType":
    """Compile with the errors of CPython's file parser. They differ for encodings, null bytes and an unexpected end."""
    try:
        return compile(data, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        pass  # handled outside this block, or it would become the context of the same error
    try:
        import ctypes

        fopen, run_file = ctypes.CDLL(None).fopen, ctypes.pythonapi.PyRun_FileExFlags
    except (ImportError, OSError, AttributeError):
        return compile(data, filename, "exec", dont_inherit=True)
    fopen.restype, fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
    run_file.restype = ctypes.py_object
    run_file.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, *[ctypes.py_object] * 2, ctypes.c_int, ctypes.c_void_p]
    path = os.fsencode(filename)
    run_file(fopen(path, b"rb"), path, _PY_FILE_INPUT, namespace, namespace, 1, None)
    return compile("", filename, "exec")  # a valid file has just replaced this one, and run_file has run it


def say(text: str) -> None:
    """Print what the interpreter itself would print."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)
