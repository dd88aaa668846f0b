"""Where the log says that torch's flight records are, and which hosts a worker has missed by NCCL's words."""

from __future__ import annotations

import os
import pickle
import shlex
import sys
import threading
from pathlib import Path

import pytest

from elastic_ext.agent.verdicts import reach_by
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence, RaisedException
from elastic_ext.features.hangs.flight_recorder import DUMP_FILES, PIPE_FILE, FlightRecorder, reader
from tests.jobs import TIMEOUT_S, ended


def test_no_record_is_named_where_nobody_is_asked(tmp_path: Path) -> None:
    """As with nccl of torch 2.15.0, which makes no pipe."""
    recorder = FlightRecorder(str(tmp_path), {DUMP_FILES[0]: str(tmp_path / "rank_")})
    (tmp_path / "rank_0").write_text("of a collective that failed")
    assert recorder.dump([0, 1]) == ""


def test_a_record_that_was_asked_for_is_named(tmp_path: Path) -> None:
    recorder = FlightRecorder(str(tmp_path), {})
    pipe = f"{recorder.variables[PIPE_FILE]}1.pipe"
    dump = f"{recorder.variables[DUMP_FILES[0]]}1"
    os.mkfifo(pipe)
    asked = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(asked, True)

    def write_when_asked() -> None:
        if os.read(asked, 1):
            Path(dump).write_text("collectives")

    keeper = os.open(pipe, os.O_WRONLY)  # else a read before the request would find the end of the pipe
    rank = threading.Thread(target=write_when_asked)
    rank.start()
    try:
        said = recorder.dump([0, 1])
    finally:
        os.close(keeper)
        rank.join()
        os.close(asked)
    assert said.startswith(f"NCCL's flight records are in {dump}; `torchfrtrace --prefix=rank_ {Path(dump).parent}` reads them")
    Path(dump).unlink()
    recorder.close()


def test_records_that_torch_wrote_unasked_are_named(tmp_path: Path, caplog) -> None:
    recorder = FlightRecorder(str(tmp_path), {})
    dumps = Path(recorder.variables[DUMP_FILES[0]]).parent
    (dumps / "rank_0").touch()
    recorder.close()
    assert f"NCCL's flight records are in {dumps}; `torchfrtrace --prefix=rank_ {dumps}` reads them" in caplog.text
    caplog.clear()
    (dumps / "rank_0").unlink()
    recorder.close()
    assert not caplog.text
    assert not dumps.exists()


@pytest.mark.seam
@pytest.mark.parametrize("dumps", ["rank_", "", "of a job/nccl_trace_rank_"])
def test_the_named_command_reads_records(tmp_path: Path, dumps: str) -> None:
    """Torch's own, in the directory of the dumps; without NCCL a rank's record has no entries."""
    path = os.path.join(tmp_path, dumps)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}
    for rank in (0, 1):
        Path(f"{path}{rank}").write_bytes(pickle.dumps({"entries": [], "version": "2.10", "pg_config": {"0": group}}))
    command = shlex.split(reader(path).split("`")[1])
    done = ended([Path(sys.executable).with_name(command[0]), *command[1:], "-v"], TIMEOUT_S)
    assert done.returncode == 0, done.all
    assert "loaded 2 files" in done.all


MISSED = "NET/IB: Got completion from peer 10.0.0.2<40554> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=129 reqSize=8"
REMOTE = "remote process exited or there was a network error"
ABORTED = f"[TC][rank=1][name=0] Aborting process on rank 1 due to error - nccl hit async error: {REMOTE}\n"


@pytest.mark.parametrize(
    ("evidence", "missed"),
    [
        (
            Evidence(
                1, 1, exception=RaisedException("RuntimeError", f"NCCL AllReduce failed: {REMOTE} \nNCCL Last Error: {MISSED}")
            ),
            True,
        ),
        (Evidence(1, signal="SIGABRT", stderr_tail=f"h1:9:99 [0] transport.cc:9 NCCL WARN {MISSED}\n{ABORTED}"), True),
        (Evidence(1, signal="SIGABRT", stderr_tail=ABORTED), False),
        (Evidence(1, 1, exception=RaisedException("KeyError", "'x'"), stderr_tail=MISSED), False),  # its own failure
    ],
)
def test_a_peer_is_missed_under_nccl2(evidence: Evidence, missed: bool) -> None:
    """As under the older backend, in whose place it is; see test_joint_evidence.py for what follows."""
    assert [each.address for each in reach_by(classify(evidence)).silent] == ["10.0.0.2"] * missed
