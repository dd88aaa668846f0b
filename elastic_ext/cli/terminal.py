"""Terminal output of the commands: lines, errors, and a progress bar."""

from __future__ import annotations

import os
import sys
import time

from elastic_ext.base.printable import shown

MAX_CHARACTERS = 300  # of an error
WIDTH = 30  # characters of the bar
SHOW_EVERY_S = 0.1  # seconds between two updates of the bar


def print_line(line: str) -> None:
    """Print a line. It may hold names and content of files that anyone may have written."""
    print(shown(line), flush=True)


def print_error(text: str) -> None:
    """Print an error as one line on stderr."""
    print(f"elastic-ext: {shown(' '.join(text.split()))[:MAX_CHARACTERS]}", file=sys.stderr)


def format_size(count: float) -> str:
    """Return a number of bytes for people to read: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


class ProgressBar:
    """A progress bar on stderr, shown only on a terminal. Leaving the context removes it."""

    def __init__(self, title: str) -> None:
        self._title, self._on, self._shown_at, self._began = shown(title), os.isatty(2), 0.0, time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown_at:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def counts(self, done: int, total: int) -> None:
        """Show how many of `total` items are done."""
        self._draw(done, total, f"{done}/{total}")

    def bytes(self, done: int, total: int) -> None:
        """Show how many of `total` bytes are done, and the rate."""
        seconds = max(time.monotonic() - self._began, 1e-3)
        self._draw(done, total, f"{format_size(done)}/{format_size(total)} {format_size(done / seconds)}/s")

    def _draw(self, done: int, total: int, figures: str) -> None:
        now = time.monotonic()
        if not self._on or now - self._shown_at < SHOW_EVERY_S:
            return
        self._shown_at = now
        filled = WIDTH * done // total if total else WIDTH
        sys.stderr.write(f"\r\033[K{self._title} [{'#' * filled}{'.' * (WIDTH - filled)}] {figures}")
        sys.stderr.flush()
