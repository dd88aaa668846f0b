"""A helper's side of its agents' connections; what both helpers make of it is tested with them."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path

import pytest

from elastic_ext.base import helper_process
from elastic_ext.base.helper_process import (
    PAUSES_S,
    STEADY_S,
    Agents,
    Helper,
    HelperConnection,
    HelperFailed,
    listen_on_path,
    restart,
)


class Full(socket.socket):
    """A listening socket of a process that has no descriptor left."""

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.seam
def test_without_descriptors_the_listener_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays readable: polled at once again, the helper would spin."""
    with listen_on_path(tmp_path / "socket") as made, Full(fileno=os.dup(made.fileno())) as listener:
        agents = Agents(listener, "the helper")
        assert agents.descriptors == [listener.fileno()]
        agents.serve(listener.fileno())
        assert agents.resting
        assert agents.descriptors == []
        later = helper_process.time.monotonic() + helper_process.ACCEPT_AGAIN_S
        monkeypatch.setattr(helper_process.time, "monotonic", lambda: later)
        assert agents.descriptors == [listener.fileno()]


@pytest.mark.seam
def test_a_helper_that_never_listens_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose disk hangs; it is ended."""
    never = [sys.executable, "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(helper_process.isolated, "command", lambda module: never)
    monkeypatch.setattr(helper_process, "START_S", 0.1)
    with pytest.raises(HelperFailed, match=r"the helper cannot be started: it has said nothing for 0\.1 s"):
        HelperConnection(Helper("the helper", "", str(tmp_path / "socket")), lambda message: None)


def test_a_helper_is_started_again_for_ever():
    """The first time at once, then after pauses that grow up to a limit; one that ran for a while begins anew."""
    row, pauses = 0, []
    for end in range(100):
        again = restart(row, 4.0 * end, 4.0 * (end + 1))
        row = again.row
        pauses.append(again.pause_s)
    assert pauses == [*PAUSES_S, *[PAUSES_S[-1]] * (100 - len(PAUSES_S))]
    assert pauses == sorted(pauses)
    assert again.reason == f"starting another in 10 s: its end number 100, each within {STEADY_S:g} s of the start"
    assert restart(row, 0.0, STEADY_S - 0.1).row == 101
    again = restart(row, 0.0, STEADY_S)
    assert (again.row, again.pause_s, again.reason) == (1, 0.0, "starting another")
