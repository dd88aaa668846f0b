"""The limit on the files that this process may open."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

MAX_FILES = 1 << 20  # the kernel's default maximum (fs.nr_open); a hard limit may be 2 ** 63


def limit() -> tuple[int, int] | None:
    """Return the soft and the hard limit; None if the kernel refuses to say (a seccomp profile)."""
    try:
        return resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError as error:
        logger.info("cannot read the limit on open files: %s", error)
        return None


def raise_limit() -> tuple[int, int] | None:
    """Raise the soft limit to the hard one, at most to MAX_FILES. Return the previous one; None: it has not changed."""
    before = limit()
    if before is None:
        return None
    soft, hard = before
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        logger.info("cannot raise the limit on open files, it stays at %s: %s", soft, error)
        return None
    return before


def raised() -> int:
    """Raise the soft limit, as far as that is allowed, and return how many files this process may then open."""
    raise_limit()
    now = limit()
    return MAX_FILES if now is None or now[0] == resource.RLIM_INFINITY else min(now[0], MAX_FILES)
