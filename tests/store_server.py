"""A TCPStore in a process of its own, which a test freezes and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache

# Forks the processes of the stores: to import torch for each takes longer than most of the tests. It reads requests from stdin,
# a word and a number a line, and answers each with a line. It waits for its children, as only it can: when it has answered, all
# threads of a store have stopped, or it is gone. It ends with the one who asks, and so do all stores, frozen ones too.
FORK = """
import os, signal, sys
from torch.distributed import TCPStore

def serve(port):
    try:
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        print(os.getpid(), store.port, flush=True)
        signal.pause()
    except Exception as error:
        print(repr(error), flush=True)
    finally:
        os._exit(1)

for line in sys.stdin:
    word, number = line.split()
    number = int(number)
    if word == "serve":
        if os.fork() == 0:
            serve(number)
    elif word == "pause":
        os.kill(number, signal.SIGSTOP)
        os.waitid(os.P_PID, number, os.WSTOPPED)
        print("paused", flush=True)
    elif word == "kill":
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        print("killed", flush=True)
os.killpg(0, signal.SIGKILL)
"""


class Forking:
    """The process that forks those of the stores."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def ask(self, word: str, number: int) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{word} {number}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "the process that forks those of the stores has ended"
        except BaseException:
            forking.cache_clear()  # the answer may come yet: it is not one to the next request
            raise
        return answer


@cache
def forking() -> Forking:
    """One for all tests."""
    return Forking()


class StoreServer:
    """port: 0: any free one."""

    def __init__(self, port: int = 0) -> None:
        self._forking = forking()
        answer = self._forking.ask("serve", port)
        assert answer[0].isdigit(), answer
        self._pid, self.port = map(int, answer.split())
        self._killed = False

    @property
    def endpoint(self) -> str:
        return f"localhost:{self.port}"

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def pause(self) -> None:
        """Freeze it: connections stay open, nothing answers. Returns when all its threads have stopped."""
        self._forking.ask("pause", self._pid)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._forking.ask("kill", self._pid)
