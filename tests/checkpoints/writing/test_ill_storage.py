"""A storage that fails while a checkpoint is loaded: a failure is no damage, and no reason to go back to an older checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import s3fs
import torch
from torch.distributed.elastic.multiprocessing import SignalException

from elastic_ext import Checkpointer
from elastic_ext.base.contracts import MemoryRoom
from elastic_ext.base.errors import StorageAway
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.agreement import nodes
from elastic_ext.checkpoints.agreement.messages import NewestSaved
from elastic_ext.checkpoints.agreement.nodes import NodeInRound
from elastic_ext.checkpoints.choice.listing import newest_checkpoint
from elastic_ext.checkpoints.ranks import CheckpointError, StorageFailed
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.cli.main import main
from elastic_ext.rendezvous.judging import AgentPolicy
from tests.chaos.seeded.object_store import WELL, Ill, ObjectStore
from tests.checkpoints.agreement.test_agreement import copies
from tests.checkpoints.choice.scenes import flip, resumed
from tests.checkpoints.rank_groups import RankGroups, complete
from tests.until import until

NEWEST = "/step_00000002.g0001"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with ExitStack() as stack:
        made = ObjectStore([], "127.0.0.1", tmp_path / "store.log", lambda path: None, stack)
        for name, value in made.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the clients give up at once, so that the tests do not wait for them
        monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
        s3fs.S3FileSystem.clear_instance_cache()  # each keeps the endpoint that it was made with
        yield made


@pytest.mark.full
def test_the_newest_checkpoint_is_not_passed_over(store: ObjectStore) -> None:
    with Checkpointer(store.url, model=torch.nn.Linear(2, 2), verify=True) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, wait=True)
            assert checkpointer.last_error is None
    with Checkpointer(store.url, model=torch.nn.Linear(2, 2), verify=True) as checkpointer:
        for file in ("__0_0.distcp", "rank_00000.pt"):
            store.be(Ill(errors=1.0, path=f"/step_00000002.g0001/{file}"))
            with pytest.raises(StorageFailed, match="step_00000002"):
                checkpointer.load()
        store.be(Ill(errors=1.0))  # it cannot even be listed
        with pytest.raises(StorageFailed, match="does not answer"):
            checkpointer.load()
        store.be(WELL)
        assert checkpointer.load().step == 2


@pytest.mark.full
@pytest.mark.parametrize("path", [f"{NEWEST}/manifest.json", f"{NEWEST}/__0_0.distcp", "/manifest.json", ""])
def test_the_agents_choice_waits_for_the_storage(store: ObjectStore, monkeypatch, caplog, path: str) -> None:
    """It neither passes over the newest checkpoint nor begins from nothing, which would supersede all work so far."""
    _save(store, 1, 2)
    store.be(Ill(errors=1.0, path=path))
    with ThreadPoolExecutor(1) as pool:
        chosen = pool.submit(resumed, store.url, verify="full")
        until(lambda: "does not answer" in caplog.text)
        store.be(WELL)
        assert chosen.result().step == 2
    store.be(Ill(errors=1.0, path=path))
    monkeypatch.setattr(nodes, "AWAY_S", 0.1)
    with pytest.raises(StorageAway, match=r"has not answered for 0\.1 s"):
        resumed(store.url, verify="full")


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "saved", "expected"),
    [
        ("", NewestSaved(1, 2), 3),
        ("", NewestSaved(1, 4), None),  # saved later than the copy: it must not be passed over
        ("", None, None),  # nobody knows what was saved
        (f"{NEWEST}/manifest.json", NewestSaved(1, 2), 3),  # which is not even read
        ("/step_00000004.g0001/manifest.json", NewestSaved(1, 2), None),  # the storage has shown something newer
    ],
)
def test_the_newest_copy_in_memory_needs_no_storage(store, tmp_path, monkeypatch, caplog, path, saved, expected) -> None:
    _save(store, 2, *([4] if "4" in path else []))
    place = NodeInRound(memory=copies(tmp_path / "memory", [3], [0], nodes=1), saved=saved)
    store.be(Ill(errors=1.0, path=path))
    if expected is None:
        monkeypatch.setattr(nodes, "AWAY_S", 0.1)
        with pytest.raises(StorageAway):
            resumed(store.url, place=place)
        return
    monkeypatch.setattr(nodes, "poll", None)  # it does not wait
    assert resumed(store.url, place=place).step == expected
    assert len([each for each in caplog.records if "does not answer" in each.message]) == (not path)


@pytest.mark.full
def test_without_the_storage_the_older_copy_is_loaded(store: ObjectStore, tmp_path: Path, monkeypatch) -> None:
    """The checkpoint of step 2 is older than both. With no copy that is whole, the storage has failed."""
    _save(store, 2)
    for name, value in MemoryRoom(str(tmp_path / "memory"), 1 << 20, 1).variables(1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ELASTIC_EXT_CHECKPOINT_DIR", store.url)
    (tmp_path / "memory").mkdir()
    with Checkpointer(model=torch.nn.Linear(2, 2)) as checkpointer:
        assert checkpointer.load().step == 2
        for step in (3, 4, 5):  # the first makes the buffers
            checkpointer.snapshot(step)
            checkpointer._memory.wait()
    older, newer = sorted((tmp_path / "memory").glob("step_*"))
    store.be(Ill(errors=1.0))
    for damaged, step in ((newer, 4), (older, None)):
        flip(damaged / "rank_00000.mem", 70)
        monkeypatch.setenv("ELASTIC_EXT_RESUME_FROM", str(newer))
        with Checkpointer(model=torch.nn.Linear(2, 2)) as checkpointer:
            if step is None:
                with pytest.raises(StorageFailed):
                    checkpointer._loader.load_chosen(str(newer))
            else:
                assert checkpointer._loader.load_chosen(str(newer)).step == step


@pytest.mark.full
def test_throttled_storage_is_tried_again(store: ObjectStore, groups: RankGroups) -> None:
    """503 SlowDown for longer than s3fs tries by itself: the save comes back later, in the background."""
    store.be(Ill(a_second=1e-6, path=".distcp"))
    env = {**store.environ, "AWS_MAX_ATTEMPTS": "1"}
    groups.start("train", 2, {"directory": store.url, "steps": 1}, env=env)
    until(lambda: "retrying in" in groups.stderr.read_text())
    store.be(WELL)
    for result in groups.results():
        assert (result["error"], result["saved"], result["raised"]) == (None, 1, "")
    assert complete(store.url) == ["step_00000001.g0001"]


def test_a_signal_is_no_failure_of_the_storage() -> None:
    """Its handler raises in the midst of a read; if that counted as one, the agent would wait for the storage."""
    storage = open_storage("memory://signal")
    storage.put("name", b"content")
    with pytest.raises(SignalException), storage.open("name"):
        raise SignalException("told to end", signal.SIGTERM)


@pytest.mark.full
@pytest.mark.parametrize("path", [f"{NEWEST}/manifest.json", ""])
def test_waiting_nodes_join_later(store: ObjectStore, path: str) -> None:
    """The leader asks for the newest checkpoint on the thread that keeps it in the job."""
    _save(store, 1, 2)
    settings = Settings(checkpoint_dir=store.url, grow_at="checkpoint")
    policy = AgentPolicy(settings, lambda: newest_checkpoint(settings))
    assert not policy.may_grow(1)
    store.be(Ill(errors=1.0, path=path))
    assert not policy.may_grow(1)
    store.be(WELL)
    _save(store, 3)
    assert policy.may_grow(1)


@pytest.mark.full
def test_the_list_appears_although_one_is_unreadable(store: ObjectStore, capsys: pytest.CaptureFixture[str]) -> None:
    _save(store, 1, 2)
    store.be(Ill(errors=1.0, path=f"{NEWEST}/manifest.json"))
    assert main(["checkpoints", "ls", store.url]) == 0
    out, err = capsys.readouterr()
    assert "step_00000001" in out
    assert "it cannot be read" in out
    assert "is unknown" in err


class Refuses:
    """An object of the script that cannot open its own data when its state is loaded."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise PermissionError(13, "Permission denied", "/data/train.bin")


def test_an_unreadable_script_file_is_not_the_storage(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=torch.nn.Linear(2, 2), extra={"data": Refuses()}) as checkpointer:
        checkpointer.save(1, wait=True)
        with pytest.raises(CheckpointError, match=r"train\.bin") as raised:
            checkpointer.load()
    assert not isinstance(raised.value, StorageFailed)


@pytest.mark.parametrize("file", ["manifest.json", "__0_0.distcp"])
def test_what_a_file_system_calls_damaged_is_skipped(tmp_path: Path, file: str) -> None:
    """A directory (EISDIR) and a link to itself (ELOOP) stand for EUCLEAN and EBADMSG, which cannot be made here: all of them
    come again on each try."""
    with Checkpointer(tmp_path, model=torch.nn.Linear(2, 2)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, wait=True)
    broken = tmp_path / "step_00000002.g0001" / file
    broken.unlink()
    broken.mkdir() if file == "manifest.json" else broken.symlink_to(file)
    with Checkpointer(tmp_path, model=torch.nn.Linear(2, 2)) as checkpointer:
        assert checkpointer.load().step == 1


def _save(store: ObjectStore, *steps: int) -> None:
    with Checkpointer(store.url, model=torch.nn.Linear(2, 2)) as checkpointer:
        for step in steps:
            checkpointer.save(step, wait=True)
            assert checkpointer.last_error is None
