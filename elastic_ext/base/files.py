"""Files that others read, and that lie where others may write: in /tmp, say, or in a directory that users share."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace a file by one with this text; the umask gives its mode. Raises OSError, and leaves nothing behind then.

    Invariants: who reads sees the old file or the new one. No link is followed, neither one in the place of the file nor one that
    waits for the temporary name, which nobody can guess and which only this call makes.
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
