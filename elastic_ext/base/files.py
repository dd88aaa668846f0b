"""Safe writing of files in directories to which others may write, e.g. /tmp or a shared directory."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace a file with one that holds this text; see `write_whole_bytes`."""
    write_whole_bytes(path, text.encode())


def write_whole_bytes(path: Path, data: bytes) -> None:
    """Replace a file with one that holds this; the umask sets its mode. Raises OSError, and then leaves no part file.

    Invariants: readers see the whole old file or the whole new one. No link is followed, neither in place of the file nor of the
    temporary file, whose name nobody can guess and which only this call creates.
    """
    part = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
