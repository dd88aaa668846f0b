"""For all tests: fixtures, and the three tiers.

check   no mark: starts no process, opens no socket, does not sleep. `make check`, in two minutes.
seam    starts real parts, and is the one test of its seam and backend: `make test` runs it after those of `check`.
full    any other real part, grids, long waits: `make test-all`. Randomised tests of `check` run there once more, at length.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.etcd_server import Certificates, EtcdServer
from tests.s3 import S3Server

TEARDOWN_TIMEOUT_S = 180
CHECK, SEAM, FULL = TIERS = ("check", "seam", "full")
QUARTERS = 4
FORBIDDEN = {  # in `check`: events of sys.addaudithook, and what they are
    "subprocess.Popen": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.system": "starts a process",
    "os.fork": "starts a process",
    "socket.bind": "opens a socket",
    "socket.connect": "opens a socket",
    "time.sleep": "sleeps",  # since Python 3.13
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the test's own, which it may kill."""
    with EtcdServer(tmp_path / "etcd") as started:
        yield started


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """For tests that change none of the files; they may add others."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One for all tests of this process; ask for `s3` to use it."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket of the test's own; this process and what it starts finds the server by the environment."""
    import s3fs

    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # each fsspec filesystem keeps the endpoint that it was made with
    return s3_server.bucket()


@pytest.fixture(params=["local", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory that is not there yet."""
    return f"{request.getfixturevalue('s3') if request.param == 's3' else tmp_path}/run"


# Which tests run.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tiers", default=",".join(TIERS), help="of check, seam and full; all without it")
    parser.addoption("--quarter", type=int, help=f"of the tests of `full`, this one of {QUARTERS} parts only")
    parser.addoption("--failures", type=Path, help="file for the failures, as JSON lines; see tests/run.py")


def pytest_configure(config: pytest.Config) -> None:
    for name in (SEAM, FULL):
        config.addinivalue_line("markers", f"{name}(*parts): of this tier; parts: of the ids of those parameters that are")
    sys.addaudithook(GUARD.on_event)
    os.fsync = no_sync
    config.pluginmanager.register(GUARD)
    path = config.getoption("--failures", None)
    if path is not None and not hasattr(config, "workerinput"):  # xdist's controller sees the reports of all
        config.pluginmanager.register(Failures(path))
    at_length = config.getoption("--tiers") == FULL
    any_speed = {"deadline": None, "suppress_health_check": list(HealthCheck)}  # of making examples: that is the machine's
    settings.register_profile(CHECK, derandomize=True, max_examples=20, stateful_step_count=20, database=None, **any_speed)
    settings.register_profile(FULL, max_examples=300, print_blob=True, **any_speed)
    settings.load_profile(FULL if at_length else CHECK)


def no_sync(file: object) -> None:
    """No test cuts the power, and those that write many files here would mostly wait for the disk. Real jobs do sync."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unknown = unmatched(items)
    if unknown and not any("::" in each for each in config.args):
        raise pytest.UsageError(f"marked, but no parameters of the test have such an id: {', '.join(unknown)}")
    tiers, quarter = config.getoption("--tiers").split(","), config.getoption("--quarter")
    if set(tiers) - set(TIERS):
        raise pytest.UsageError(f"--tiers={','.join(tiers)}: expected some of {', '.join(TIERS)}")
    ours = {item: wanted(item, tiers, quarter) for item in items}
    config.hook.pytest_deselected(items=[item for item, runs in ours.items() if not runs])
    items[:] = [item for item, runs in ours.items() if runs]


def wanted(item: pytest.Item, tiers: list[str], quarter: int | None) -> bool:
    own = tier(item)
    if own == CHECK and tiers == [FULL]:
        return hasattr(getattr(item, "obj", None), "hypothesis") and quarter in (None, part(item))
    return own in tiers and (own != FULL or quarter in (None, part(item)))


def tier(item: pytest.Item) -> str:
    """Of a test, by the nearest mark: its own, or that of its class or module. One with parts of ids comes before one without."""
    for node in reversed(item.listchain()):
        marks = [mark for mark in node.own_markers if mark.name in (SEAM, FULL)]
        for mark in sorted(marks, key=lambda mark: not mark.args):
            if not mark.args or any(each in ids(item) for each in mark.args):
                return mark.name
    return CHECK


def part(item: pytest.Item) -> int:
    """Which quarter it is in; tests of one group share what they make."""
    group = item.get_closest_marker("xdist_group")
    return zlib.crc32((str(group.args[0]) if group else item.nodeid).encode()) % QUARTERS


def ids(item: pytest.Item) -> str:
    """Of its parameters, in their brackets; "" where it has none."""
    return item.name.removeprefix(item.name.partition("[")[0])


def unmatched(items: list[pytest.Item]) -> list[str]:
    """The parts of ids in marks that no item of their test has."""
    marked = [(item, each) for item in items for mark in item.own_markers if mark.name in (SEAM, FULL) for each in mark.args]
    named = {(item.nodeid.partition("[")[0], each) for item, each in marked}
    there = {(item.nodeid.partition("[")[0], each) for item, each in marked if each in ids(item)}
    return sorted(f"{each!r} of {test}" for test, each in named - there)


# How they run.


class Guard:
    """Sees what a test of `check` does that it may not: such a test belongs to another tier.

    What one fixture starts for several tests counts for each of them: which one asks first is chance. What a thread of an earlier
    test does counts for none.
    """

    def __init__(self) -> None:
        self._on = False
        self._seen: set[str] = set()
        self._fixtures: dict[str, set[str]] = {}  # by name, what each does
        self._others: set[int] = set()  # threads
        self._sleep = time.sleep
        time.sleep = self._sleeps

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event in FORBIDDEN and threading.get_ident() not in self._others:
            self._seen.add(f"{FORBIDDEN[event]} ({event})")

    def _sleeps(self, seconds: float) -> None:
        self.on_event("time.sleep", (seconds,))
        self._sleep(seconds)

    def begin(self, item: pytest.Item) -> None:
        self._on, self._seen = tier(item) == CHECK, set()
        self._others = {thread.ident for thread in threading.enumerate() if thread.ident is not None} - {threading.get_ident()}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Called as a plugin: pytest asks no conftest of a folder about fixtures of the whole session."""
        before, self._seen = self._seen, set()
        try:
            return (yield)
        finally:
            self._fixtures[fixturedef.argname] = {f"{each}, in the fixture {fixturedef.argname}" for each in self._seen}
            self._seen |= before

    def end(self, item: pytest.Item) -> None:
        on, self._on = self._on, False
        seen = self._seen.union(*(self._fixtures.get(name, ()) for name in getattr(item, "fixturenames", ())))
        if on and seen:
            pytest.fail(f"a test without a mark {', '.join(sorted(seen))}: mark it seam or full", pytrace=False)


GUARD = Guard()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    GUARD.begin(item)
    yield


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    GUARD.end(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """A clean-up that hangs ends this process, which xdist reports: pytest-timeout no longer looks on once a test has failed."""
    faulthandler.dump_traceback_later(TEARDOWN_TIMEOUT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Failures:
    """Keeps the reports of failures, for tests/run.py."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            texts = [report.longreprtext, *(f"{title}\n{text}" for title, text in report.sections)]
            with self._path.open("a") as file:
                file.write(json.dumps({"test": report.nodeid, "log": "\n".join(texts)}) + "\n")
