"""The commands of `elastic-ext`, one module for each, and how they print."""

from __future__ import annotations

import sys

from elastic_ext.base.printable import shown

MAX_CHARACTERS = 300  # of an error


def print_line(line: str) -> None:
    """Print a line. It may hold names and content of files that anyone may have written."""
    print(shown(line), flush=True)


def print_error(text: str) -> None:
    """Print an error as one line on stderr."""
    print(f"elastic-ext: {shown(' '.join(text.split()))[:MAX_CHARACTERS]}", file=sys.stderr)
