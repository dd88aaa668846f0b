"""Writing files safely in directories where others may write, e.g. /tmp or a shared directory."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace a file by one with this text; the umask gives its mode. Raises OSError, and then leaves nothing behind.

    Invariants: readers see the old file or the new one, whole. No link is followed, neither in place of the file nor in place of
    the temporary one, whose name nobody can guess and only this call creates.
    """
    part = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
