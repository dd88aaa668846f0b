"""For all tests."""

from __future__ import annotations

import faulthandler
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.etcd_server import EtcdServer

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
