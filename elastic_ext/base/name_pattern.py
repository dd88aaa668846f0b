"""The user's pattern of checkpoint names, `checkpoint_pattern`, as a regular expression. Standard library only."""

from __future__ import annotations

import functools
import re

from elastic_ext.base.errors import UsageError

STEP, EPOCH = "{step}", "{epoch}"
_WILD = {"*": ".*", "?": ".", STEP: "(?P<step>[0-9]{1,18})", EPOCH: "(?P<epoch>[0-9]{1,18})"}
_PARTS = re.compile(r"(\*+|\?|\{step\}|\{epoch\})")


@functools.lru_cache(maxsize=16)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a `checkpoint_pattern` as a regular expression. Raises UsageError if it is invalid."""
    if not pattern or "/" in pattern or any(pattern.count(field) > 1 for field in (STEP, EPOCH)) or pattern.count("*") > 4:
        raise UsageError(
            f"checkpoint_pattern {pattern!r}: expected a name, with * (4 at most) and ? as wildcards, and {STEP} and {EPOCH} for "
            "numbers, e.g. model_{step}.pt"
        )
    parts = (part[0] if part.startswith("*") else part for part in _PARTS.split(pattern) if part)
    return re.compile("".join(_WILD.get(part, re.escape(part)) for part in parts), re.DOTALL)
