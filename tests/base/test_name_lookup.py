"""Look-ups of the names of addresses, at a name server that answers or does not, in a network namespace."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic_ext.base import name_lookup
from elastic_ext.rendezvous.round_records import Header
from elastic_ext.rendezvous.round_store import NodeStates, RoundStore, StoreConnector, serve
from tests.jobs import ROOT, run
from tests.programs import needs, required

HERE, SERVER = "10.9.9.1", "10.9.9.53"
INSIDE = f"""
set -e
ip link set lo up
ip addr add {HERE}/32 dev lo
ip addr add {SERVER}/32 dev lo
echo "nameserver {SERVER}" > resolv.conf
mount --bind resolv.conf /etc/resolv.conf
echo "{HERE} here" > hosts
mount --bind hosts /etc/hosts
exec {{command}}
"""
NO_SUCH_NAME = 0x8183  # a response: flags of a DNS header, RFC 1035


class NameServer:
    """Counts the questions; answers that there is no such name, or not at all."""

    def __init__(self, answers: bool) -> None:
        self.questions = 0
        self._answers = answers
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((SERVER, 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            question, asker = self._socket.recvfrom(512)
            self.questions += 1
            if self._answers:
                self._socket.sendto(question[:2] + NO_SUCH_NAME.to_bytes(2, "big") + question[4:], asker)


def connect(answers: bool) -> None:
    """In the namespace: what an agent does in a round. Print how often the name server was asked, and what workers get."""
    server = NameServer(answers)
    name_lookup.ask(HERE)
    assert name_lookup._asked.thread is not None
    store = serve(HERE)
    header = Header(1, address=HERE, port=store.port, nodes=1)
    connected = StoreConnector(threading.Condition(), "here").connect(header, lambda: None, lambda reason: None)
    NodeStates(60.0).swap(RoundStore(HERE, store.port, 0, 1), "0", 60.0)
    name_lookup._asked.thread.join()
    assert connected is not None
    print(json.dumps([server.questions, name_lookup.variables({}), name_lookup.variables({name_lookup.OPTIONS: "timeout:3"})]))


def in_namespace(answers: bool, folder: Path) -> tuple[int, dict[str, str], dict[str, str], str]:
    needs("unshare", "ip")
    required(os.geteuid() == 0, "needs root for a network namespace")
    program = f"from tests.base.test_name_lookup import connect; connect({answers})"
    script = INSIDE.format(command=shlex.join([sys.executable, "-c", program]))
    done = run(["unshare", "-m", "-n", "sh", "-c", script], folder, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.err
    return (*json.loads(done.out), done.err)


@pytest.mark.full
def test_no_connection_waits_for_a_silent_name_server(tmp_path: Path) -> None:
    questions, worker, of_user, log = in_namespace(False, tmp_path)
    assert questions == 1  # that of `ask`, beside the connections
    assert worker == {"RES_OPTIONS": "timeout:1 attempts:2"}
    assert of_user == {}
    assert f"no name server answers for the name of {HERE}" in log
    assert "cannot be retrieved" not in log


@pytest.mark.full
def test_workers_keep_a_name_server_that_answers(tmp_path: Path) -> None:
    questions, worker, _, log = in_namespace(True, tmp_path)
    assert questions == 1
    assert worker == {}
    assert not re.search("no name server answers|cannot be retrieved", log), log


class _Together(name_lookup._Asked):
    """Two threads see no look-up before either begins one, and each has begun its own before either goes on."""

    def __init__(self) -> None:
        self._step, self._seen = threading.Barrier(2, timeout=60), threading.local()
        super().__init__()

    @property
    def thread(self) -> threading.Thread | None:
        found = self._thread
        if not hasattr(self._seen, "once"):
            self._seen.once = True
            self._step.wait()
        return found

    @thread.setter
    def thread(self, thread: threading.Thread | None) -> None:
        self._thread = thread
        if thread is not None:
            self._step.wait()


def test_two_threads_may_ask_at_once(monkeypatch):
    monkeypatch.setattr(name_lookup, "_asked", _Together())
    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(name_lookup.ask, "127.0.0.1") for _ in range(2)]:
            each.result()
