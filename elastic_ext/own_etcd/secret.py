"""The secret of a job: who has it is in, on every host."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import printable
from elastic_ext.own_etcd import folder

LEAST_BYTES = 16  # 128 bits, if they are random
MAX_BYTES = 1 << 16


def job_secret(variable: str | None, path: str | None, loopback: bool, own_folder: Path) -> bytes:
    """Return the job's secret.

    Args:
        variable: the setting `job_secret`.
        path: the setting `job_secret_file`: made if it does not exist. All hosts end with the same content.
        loopback: the job is on this machine: then a file in own_folder, which only this user can read, will do.

    Raises:
        UsageError: there is none and the job needs one, or the file cannot be used.
    """
    if variable is not None:
        return _long_enough(variable.encode(), "job_secret")
    if path is not None:
        return _long_enough(_read_or_make(Path(path)), f"job_secret_file={printable(path)}")
    check_unneeded(loopback)
    folder.make(own_folder)  # not before: a wrong command leaves nothing behind
    return _read_or_make(own_folder / "secret")


def check_unneeded(loopback: bool) -> None:
    """Raise UsageError for a job that has no secret, unless it is on this machine."""
    if loopback:
        return
    raise UsageError(
        "--rdzv-endpoint=job: with hosts of a network needs a secret, or anybody could read and write the job's etcd: give all "
        "hosts the same job_secret_file=PATH (it is created, if PATH is on a disk that they share) or ELASTIC_EXT_JOB_SECRET"
    )


def _long_enough(secret: bytes, what: str) -> bytes:
    if len(secret) < LEAST_BYTES:
        raise UsageError(f"{what}: {len(secret)} bytes; expected {LEAST_BYTES} or more, e.g. of `openssl rand -hex 32`")
    return secret


def _read_or_make(path: Path) -> bytes:
    try:
        while (found := _read(path)) is None:
            _make(path)
    except OSError as error:
        raise UsageError(f"job_secret_file={printable(str(path))} cannot be used: {error.strerror}") from error
    return found


def _read(path: Path) -> bytes | None:
    """Return the content; None if there is no such file. Raises UsageError if others may read it."""
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()), file.read(MAX_BYTES).strip()
    except FileNotFoundError:
        return None
    if mode.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(mode.st_mode) & 0o077:
        raise UsageError(
            f"job_secret_file={printable(str(path))}: others may read or own it; expected a file of this user with mode 0600: "
            "`chmod 600`, and a new secret if somebody has seen it"
        )
    return content


def _make(path: Path) -> None:
    """Make the file whole or not at all. A link is atomic on NFS, too: of several hosts one wins, and all read its file."""
    part = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        part.unlink(missing_ok=True)
