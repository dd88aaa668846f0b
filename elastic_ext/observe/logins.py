"""Checks passwords against bcrypt hashes on a thread of its own: each check takes 50 to 1,000 ms of CPU time.

Strangers may send wrong passwords as fast as they like: the checks take a bounded share of a core, few wait, and the address
that has sent the fewest wrong ones comes first. Who has been verified once never waits again.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastic_ext.observe.cpu_budget import CpuBudget

logger = logging.getLogger(__name__)

CPU_SHARE = 0.1  # of a core, for all checks together
CPU_BURST_S = 1.0  # so that the first scrapes after a start need not wait
MAX_WAITING = 4  # logins; with the slowest hashes the last of them still gets its answer in time, mostly
MAX_ADDRESSES = 1024  # whose wrong passwords are counted


@dataclass(eq=False, frozen=True)
class Login:
    """A user and password to be checked.

    Attributes:
        client: whose login it is.
        hashed: of this user; of another one if this user does not exist, so that nobody can tell by the time that a check takes.
        exists: whether the user does.
    """

    client: object
    address: str
    user: str
    password: bytes
    hashed: bytes
    exists: bool


def first(waiting: Sequence[Login], wrong: Mapping[str, int]) -> Login:
    """Return which login to check next: of the address with the fewest wrong passwords, the oldest. waiting: oldest first."""
    return min(waiting, key=lambda login: wrong.get(login.address, 0))


def superfluous(waiting: Sequence[Login], wrong: Mapping[str, int]) -> Login | None:
    """Return the login that must go since too many wait: of the address with the most, the newest."""
    if len(waiting) <= MAX_WAITING:
        return None

    def blame(at: int) -> tuple[int, int]:
        address = waiting[at].address
        return wrong.get(address, 0) + sum(login.address == address for login in waiting), at

    return waiting[max(range(len(waiting)), key=blame)]


class Verified:
    """The passwords that were right, as keyed digests; one per user. Comparing takes the same time whatever differs."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._digests: dict[str, bytes] = {}

    def add(self, user: str, hashed: bytes, password: bytes) -> None:
        self._digests[user] = self._digest(hashed, password)

    def knows(self, user: str, hashed: bytes, password: bytes) -> bool:
        return hmac.compare_digest(self._digests.get(user, b""), self._digest(hashed, password))

    def _digest(self, hashed: bytes, password: bytes) -> bytes:
        return hmac.digest(self._key, hashed + password, "sha256")  # all hashes have one length


class Checks:
    """The thread and its queue. Its results wake whoever polls `fileno()`. The thread starts with the first login.

    Args:
        check: whether a password has a hash: bcrypt.checkpw, which does not hold the GIL meanwhile.
    """

    def __init__(self, check: Callable[[bytes, bytes], bool]) -> None:
        self._check = check
        self._budget = CpuBudget(CPU_SHARE, CPU_BURST_S)
        self._changed = threading.Condition()
        self._closing = False
        self._waiting: list[Login] = []
        self._wrong: OrderedDict[str, int] = OrderedDict()
        self._results: deque[tuple[Login, bool | None]] = deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        return self._wakeup

    def ask(self, login: Login) -> None:
        """Queue a login; its result, or that of another one which had to go, comes from `results`.

        Raises:
            RuntimeError: there can be no more threads.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="elastic_ext-metrics-logins", daemon=True)
            thread.start()
            self._thread = thread
        with self._changed:
            self._waiting.append(login)
            gone = superfluous(self._waiting, self._wrong)
            if gone is not None:
                self._waiting.remove(gone)
                self._tell(gone, None)
            self._changed.notify()

    def forget(self, client: object) -> None:
        """Check nothing more for this client, who is gone."""
        with self._changed:
            self._waiting = [login for login in self._waiting if login.client is not client]

    def results(self) -> list[tuple[Login, bool | None]]:
        """Return what is decided since the last call: whether the password was right; None: too many were waiting."""
        try:
            os.eventfd_read(self._wakeup)
        except BlockingIOError:
            return []
        with self._changed:
            found = list(self._results)
            self._results.clear()
        return found

    def close(self) -> None:
        """End the thread, after the check that is under way."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        os.close(self._wakeup)

    def _run(self) -> None:
        while (login := self._next()) is not None:
            began = time.thread_time()
            right = self._is_right(login)
            with self._changed:
                self._budget.spend(time.thread_time() - began, time.monotonic())
                self._count(login.address, right)
                self._tell(login, right)

    def _next(self) -> Login | None:
        """Wait until a check may begin; return None at the end."""
        with self._changed:
            while not self._closing:
                wait_s = self._budget.wait_s(time.monotonic())
                if self._waiting and wait_s == 0:
                    login = first(self._waiting, self._wrong)
                    self._waiting.remove(login)
                    return login
                self._changed.wait(wait_s if self._waiting else None)
        return None

    def _is_right(self, login: Login) -> bool:
        try:
            right = self._check(login.password, login.hashed)
        except ValueError as error:  # bcrypt takes no password of more than 72 bytes
            logger.debug("metrics: a password of %s cannot be checked: %s", login.address, error)
            return False
        return right and login.exists

    def _count(self, address: str, right: bool) -> None:
        if right:
            self._wrong.pop(address, None)
            return
        self._wrong[address] = self._wrong.pop(address, 0) + 1
        while len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)

    def _tell(self, login: Login, right: bool | None) -> None:
        self._results.append((login, right))
        os.eventfd_write(self._wakeup, 1)
