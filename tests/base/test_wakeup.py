"""A process wakes at its own signals only."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FORKS = """
import os, signal
from elastic_ext.base.wakeup import Wakeup, readable

signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
signal.signal(signal.SIGUSR1, lambda *_: None)
with Wakeup() as outer, Wakeup() as wakeup:
    ready, waits = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(waits, b".")
        while True:
            signal.pause()
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    print("after the child's:", sorted(wakeup.clear()), sorted(outer.clear()))
    signal.raise_signal(signal.SIGUSR1)
    print("after its own:", wakeup.clear() == {signal.SIGUSR1}, readable(wakeup))
"""


# An agent stops the workers that it has just forked, as another one has ended at once: they get the signal before all else.
_AT_ONCE = """
import os, signal
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
from elastic_ext.base.wakeup import Wakeup

def handler(*_):
    HANDLES

signal.signal(signal.SIGTERM, handler)
with Wakeup() as wakeup:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child = os.fork()
    if child == 0:
        os._exit(4)
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sorted(wakeup.clear()))
    print("the same mask:", signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before)
"""


# Another thread catches the agent's own signal during the fork, and the handler raises in the first hook after it.
_OWN = """
import ctypes, os, select, signal, threading
from functools import partial

news = []  # what runs in a hook before those of the module is no bytecode
for hook in (partial(ctypes.CDLL(None).kill, os.getpid(), signal.SIGTERM), partial(select.select, news, [], [])):
    os.register_at_fork(after_in_parent=hook)
from elastic_ext.base.wakeup import Wakeup

def handler(*_):
    raise SystemExit("lost")

signal.signal(signal.SIGTERM, handler)
threading.Thread(target=threading.Event().wait, daemon=True).start()
with Wakeup() as wakeup:
    news.append(wakeup)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child = os.fork()
    if child == 0:
        os._exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    print("the child blocks", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sorted(wakeup.clear()))
    print("the same mask:", signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before)
"""


@pytest.mark.seam
@pytest.mark.parametrize(("handles", "code"), [("os._exit(3)", 3), ("raise SystemExit(3)", 1)])
def test_a_signal_to_a_just_forked_worker_stays(handles, code):
    """The worker ends, also by a handler of the agent that raises."""
    script = _AT_ONCE.replace("HANDLES", handles)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.stdout == f"ended with {code} []\nthe same mask: True\n", ran.stdout + ran.stderr


@pytest.mark.seam
def test_a_signal_during_a_fork_is_not_blocked():
    ran = subprocess.run([sys.executable, "-c", _OWN], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "the child blocks 0 [15]\nthe same mask: True\n", ran.stdout + ran.stderr


@pytest.mark.seam
def test_a_signal_to_forked_workers_spares_the_agent():
    ran = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "after the child's: [] []\nafter its own: True False\n", ran.stdout + ran.stderr
