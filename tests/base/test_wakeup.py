"""A process wakes at its own signals only; and signals that are held back, and what they do before and after."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from elastic_ext.base import wakeup
from elastic_ext.base.torch_private import received, taken_for_sigterm
from elastic_ext.base.wakeup import SIGNALS, held, raise_again
from tests.interrupted import told_at_line

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
def test_a_signal_to_a_worker_that_was_just_forked_is_not_its_agents(handles, code):
    """The worker ends, also by a handler of the agent that raises."""
    script = _AT_ONCE.replace("HANDLES", handles)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.stdout == f"ended with {code} []\nthe same mask: True\n", ran.stdout + ran.stderr


@pytest.mark.seam
def test_an_agent_that_gets_a_signal_as_it_forks_blocks_none_afterwards():
    ran = subprocess.run([sys.executable, "-c", _OWN], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "the child blocks 0 [15]\nthe same mask: True\n", ran.stdout + ran.stderr


@pytest.mark.seam
def test_a_signal_to_a_forked_worker_is_not_its_agents():
    ran = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "after the child's: [] []\nafter its own: True False\n", ran.stdout + ran.stderr


class Told(Exception):
    """What a handler raises, as torch's do."""


@pytest.fixture
def handlers():
    def handle(number, frame):
        raise Told(number)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


def test_held_back_they_do_nothing_until_they_are_raised_again(handlers):
    with held() as told:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert told == [signal.SIGTERM, signal.SIGINT]
    with pytest.raises(Told, match="15"):
        raise_again(told)


def test_so_is_what_slurm_sends_before_a_time_limit(handlers):
    with taken_for_sigterm([signal.SIGUSR1]):
        with held() as told:
            signal.raise_signal(signal.SIGUSR1)
        assert told == [signal.SIGUSR1]
        with pytest.raises(SignalException) as raised:
            raise_again(told)
    assert (raised.value.sigval, received(raised.value)) == (signal.SIGTERM, signal.SIGUSR1)  # workers get the first


def test_what_is_ignored_stays_so(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    with held() as told:
        signal.raise_signal(signal.SIGHUP)
    assert told == []


def test_one_that_comes_while_they_are_put_back_takes_no_other_with_it(handlers):
    """At any line of the context's own code, a signal is held or does what it did before, and so does each one after it."""

    def interrupted(line: int) -> bool:
        told, raised = [], []
        with told_at_line(line, {wakeup.__file__}, signal.SIGTERM) as came:
            try:
                with held() as told:
                    pass
            except Told as error:
                raised = [*error.args]
        assert [*told, *raised] == ([signal.SIGTERM] if came() else [])
        assert all(signal.getsignal(number) is handlers for number in SIGNALS)
        for number in SIGNALS:
            with pytest.raises(Told, match=str(int(number))):
                signal.raise_signal(number)
        return came()

    lines = 0
    while interrupted(lines + 1):
        lines += 1
    assert lines > 10
