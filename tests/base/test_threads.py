"""A thread that cannot start; and signals that are held back, and what they do before and after."""

from __future__ import annotations

import logging
import signal
import threading

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from elastic_ext.base import threads
from elastic_ext.base.threads import SIGNALS, held, raise_again
from elastic_ext.base.torch_private import received, taken_for_sigterm
from tests.interrupted import signal_at_line


def test_one_that_cannot_start_is_logged(caplog):
    before = threading.stack_size(1 << 50)  # more than any address space has room for
    try:
        log = logging.getLogger("here").warning
        assert threads.started(lambda: None, "one", log, "%s is not done: %s", "it") is None
    finally:
        threading.stack_size(before)
    assert caplog.messages == ["it is not done: can't start new thread"]


def test_a_thread_is_a_daemon_of_its_kind(caplog):
    done = threading.Event()
    thread = threads.started(done.wait, "one", logging.warning, "%s", kind=threads.StoreCall)
    assert isinstance(thread, threads.StoreCall)
    assert thread.daemon
    done.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not caplog.messages


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


def test_held_back_signals_wait_until_raised_again(handlers):
    with held() as told:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert told == [signal.SIGTERM, signal.SIGINT]
    with pytest.raises(Told, match="15"):
        raise_again(told)


def test_slurms_notice_before_a_limit_counts_too(handlers):
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


def test_a_signal_while_they_return_takes_no_other(handlers):
    """At any line of the context's own code, a signal is held or does what it did before, and so does each one after it."""

    def interrupted(line: int) -> bool:
        told, raised = [], []
        with signal_at_line(line, {threads.__file__}, signal.SIGTERM) as came:
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
