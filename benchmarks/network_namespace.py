"""A node behind a link that can be cut, for node_loss.py."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_numbers = itertools.count()


@dataclass(frozen=True)
class Link:
    """A network namespace of one node, at the far end of a pair of interfaces."""

    name: str
    near: str = "10.213.77.1"
    far: str = "10.213.77.2"

    @property
    def inside(self) -> list[str]:
        """The start of a command line that runs in the namespace."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Take the far interface down."""
        _ip("-n", self.name, "link", "set", f"{self.name}f", "down")


@contextmanager
def link() -> Iterator[Link]:
    """Make a namespace whose name no other process uses. Needs root; exits with a message if it fails."""
    made = Link(f"nl{os.getpid()}.{next(_numbers)}")
    try:
        _ip("netns", "add", made.name)
        _ip("link", "add", f"{made.name}n", "type", "veth", "peer", "name", f"{made.name}f", "netns", made.name)
        _ip("address", "add", f"{made.near}/30", "dev", f"{made.name}n")
        _ip("link", "set", f"{made.name}n", "up")
        _ip("-n", made.name, "address", "add", f"{made.far}/30", "dev", f"{made.name}f")
        for device in ("lo", f"{made.name}f"):
            _ip("-n", made.name, "link", "set", device, "up")
        yield made
    finally:
        # The namespace would remove the interfaces, but only later, and the next try needs the address.
        for args in (("link", "del", f"{made.name}n"), ("netns", "del", made.name)):
            subprocess.run(["ip", *args], check=False, capture_output=True)


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"ip {' '.join(args)}: {done.stderr.strip()}; cannot create a network namespace: leave out the row link")
