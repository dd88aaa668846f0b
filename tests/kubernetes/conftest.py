"""What the tests of the status of a TrainJob start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_server import Certificates
from tests.kubernetes.trainer_server import TrainerServer


@pytest.fixture
def trainer(tmp_path: Path, certificates: Certificates) -> Iterator[TrainerServer]:
    (tmp_path / "token").write_text("token")
    server = TrainerServer(certificates)
    yield server
    server.close()
