"""For all tests."""

from __future__ import annotations

import faulthandler
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.etcd_server import EtcdServer
from tests.s3 import S3Server

TEARDOWN_TIMEOUT_S = 180


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """A clean-up that hangs ends this process, which xdist reports: pytest-timeout no longer looks on once a test has failed."""
    faulthandler.dump_traceback_later(TEARDOWN_TIMEOUT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the test's own, which it may kill."""
    with EtcdServer(tmp_path / "etcd") as started:
        yield started


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked `long`, and no others (`make test-long`)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "long(*parts): half a minute and more, and there is a shorter test of its kind: only `make test-long` runs it. "
        "parts: of the ids of those parameters that are meant; without any, all are",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that is named by its id always runs."""
    unknown = unmatched(items)
    if unknown:
        raise pytest.UsageError(f"marked long, but no parameters of the test have such an id: {', '.join(unknown)}")
    if any("::" in each for each in config.args):
        return
    wanted = config.getoption("--long")
    others = [item for item in items if is_long(item) != wanted]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def is_long(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("long")
    return marker is not None and (not marker.args or any(part in ids(item) for part in marker.args))


def ids(item: pytest.Item) -> str:
    """Of its parameters, in their brackets; "" where it has none."""
    return item.name.removeprefix(item.name.partition("[")[0])


def unmatched(items: list[pytest.Item]) -> list[str]:
    """The parts of ids in `long` markers that no item of their test has."""
    marked = [(item, part) for item in items if (marker := item.get_closest_marker("long")) for part in marker.args]
    named = {(item.nodeid.partition("[")[0], part) for item, part in marked}
    there = {(item.nodeid.partition("[")[0], part) for item, part in marked if part in ids(item)}
    return sorted(f"{part!r} of {test}" for test, part in named - there)
