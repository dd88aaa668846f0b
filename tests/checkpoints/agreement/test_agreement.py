"""Which checkpoint a round resumes from: one answer for all nodes, what resume_from means later, what is quarantined."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elastic_ext.agent.verdicts import Verdicts
from elastic_ext.base.contracts import Resumption
from elastic_ext.base.errors import BadCheckpoints, StorageAway, UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.agreement import messages, nodes
from elastic_ext.checkpoints.agreement.nodes import NodeInRound
from elastic_ext.checkpoints.agreement.quarantine import quarantine, quarantine_newer
from elastic_ext.checkpoints.choice import listing
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.directory.own_files import MANIFEST, Manifest, StoredFile, encode
from elastic_ext.checkpoints.directory.tiers import memory_file
from elastic_ext.checkpoints.formats.candidates import directory_name
from elastic_ext.checkpoints.storage import Entry, Storage, open_storage
from elastic_ext.checkpoints.verifying import Mode, Verification
from elastic_ext.features.resume.watch import ResumePoint
from elastic_ext.rendezvous.contract import NodeIdentity
from tests.checkpoints.choice.scenes import TRAINING, flip, resumed, saved
from tests.checkpoints.copying.test_replicate import save as save_part
from tests.checkpoints.formats.test_formats import save_own
from tests.jobs import AGENT, run


def save(directory: Path, step: int, age_s: float = 0.0) -> Path:
    """A checkpoint of torch.save, written `age_s` seconds ago."""
    path = directory / f"step_{step}.pt"
    torch.save({"step": step, "weights": torch.arange(1000)}, path)
    if age_s:
        then = time.time() - age_s
        os.utime(path, (then, then))
    return path


def damage(path: Path) -> None:
    """Flip a bit before its weights: the directory at the end is intact, and torch cannot load it."""
    data = path.read_bytes()
    flip(path, data.rindex(b"PK\x03\x04", 0, data.index(torch.arange(1000).numpy().tobytes())))


def test_the_newest_and_what_workers_are_told(tmp_path):
    assert resumed(tmp_path) == Resumption(reason=f"no complete checkpoint in {tmp_path}")
    assert resumed(tmp_path).variables == {"ELASTIC_EXT_RESUME_FROM": ""}
    assert resumed(tmp_path).at == 0
    save(tmp_path, 5)
    path = save(tmp_path, 7)
    found = resumed(tmp_path)
    assert (found.path, found.step, found.at) == (str(path), 7, 7)
    assert found.variables == {"ELASTIC_EXT_RESUME_FROM": str(path), "ELASTIC_EXT_RESUME_STEP": "7"}


def test_the_step_is_unknown_where_only_scripts_know(tmp_path):
    (tmp_path / "state_10").mkdir()
    (tmp_path / "state_10" / "weights.of_ours").write_bytes(b"1")
    assert (resumed(tmp_path).path, resumed(tmp_path).at) == ("", None)
    assert ResumePoint(Settings(checkpoint_dir=str(tmp_path)), resumed(tmp_path)).step is None
    assert "1 passed over" in resumed(tmp_path).reason
    assert resumed(tmp_path, resume_from="none").at == 0
    sent = messages.read_agreement(messages.encode(messages.Agreement("", passed_over=True)))  # the other nodes hear of it
    assert sent.passed_over
    save(tmp_path, 7)
    assert resumed(tmp_path).at == 7


@pytest.mark.parametrize("told", ["5", "step_5.pt", "checkpoint_epoch_5.pt", "none"])
def test_resume_from_is_only_where_a_run_begins(tmp_path, told):
    five = save(tmp_path, 5, age_s=20)
    if told.endswith(".pt"):
        five.rename(tmp_path / told)
    save(tmp_path, 7, age_s=10)
    begin = None if told == "none" else 5
    for _ in range(2):
        assert resumed(tmp_path, resume_from=told).step == begin
    (marker,) = (tmp_path / ".elastic_ext" / "resume_from").iterdir()
    os.utime(marker, (time.time() - 5,) * 2)  # filesystems tell times in steps
    save(tmp_path, 6, age_s=1)  # the run's own
    assert resumed(tmp_path, resume_from=told).step == 6
    assert resumed(tmp_path, run_id="another/run", resume_from=told).step == begin
    assert resumed(tmp_path, resume_from="7").step == 7  # the user has changed it


def test_a_damaged_one_is_not_resumed(tmp_path):
    save(tmp_path, 5)
    damage(save(tmp_path, 7))
    assert resumed(tmp_path, verify="off").step == 7
    assert resumed(tmp_path).step == 5
    assert resumed(tmp_path, verify="full").step == 5
    (passed,) = listing.newest_complete(str(tmp_path), listing.Wanted(verify=Mode.FULL)).passed_over
    assert (passed.reason.partition(":")[0], passed.distrusted) == ("damaged", True)


def test_all_bad(tmp_path):
    """With the list; but begin from nothing where the user says so, and where nothing was ever finished."""
    (tmp_path / "step_9.pt").write_bytes(b"PK\x03\x04")
    assert resumed(tmp_path).path == ""
    damage(save(tmp_path, 7))
    own_files.quarantine(open_storage(str(tmp_path)), save(tmp_path, 5).name, "NaN")
    each = r"(?s)step_9\.pt: .*step_7\.pt: damaged.*step_5\.pt: quarantined: NaN.*resume_from=none"
    with pytest.raises(BadCheckpoints, match=each):
        resumed(tmp_path)
    assert resumed(tmp_path, resume_from="none").path == ""


def quarantined(directory: Path, resumed_from: str, newest: bool = False) -> str | None:
    return quarantine(Settings(checkpoint_dir=str(directory)), resumed_from, newest, "it failed")


def test_what_is_quarantined(tmp_path):
    """A later checkpoint of the same name counts."""
    save(tmp_path, 5)
    assert quarantined(tmp_path, str(tmp_path / "step_5.pt")) is None  # the only one may not be to blame
    for step in (3, 7):
        save(tmp_path, step, age_s=10)
    assert quarantined(tmp_path, str(tmp_path / "step_5.pt")) == "step_5.pt"
    assert quarantined(tmp_path, "", newest=True) == "step_7.pt"
    assert resumed(tmp_path).step == 3
    assert (tmp_path / "step_7.pt").exists()
    assert quarantined(tmp_path, "") is None
    assert quarantined(tmp_path, str(tmp_path / "gone.pt")) is None
    save(tmp_path, 7)
    assert resumed(tmp_path).step == 7


@pytest.mark.parametrize(
    ("remote", "local", "marked", "resume_from", "expected"),
    [
        ((5, 7), (), (), "", 7),
        ((7,), (), (), "", None),  # the only one: the cause may be newer
        ((), (), (), "", None),
        ((5, 7), (), (5,), "", None),
        ((7,), (), (), "/elsewhere/step_3", 7),  # that is the one before it
        ((5,), (7,), (), "", 7),  # on its way to the remote tier
        ((), (7,), (), "", None),
        ((), (5, 7), (), "", 7),
        ((5,), (5,), (), "", None),
        ((7,), (5,), (5,), "", None),
    ],
)
def test_the_newest_is_quarantined_if_another_is_left(tmp_path, remote, local, marked, resume_from, expected):
    tiers = {"remote": remote, "local": local}
    for tier, steps in tiers.items():
        (tmp_path / tier).mkdir()
        for step in steps:
            save_part([tmp_path / tier], step)
    storage = open_storage(str(tmp_path / "remote"))
    for step in marked:
        own_files.quarantine(storage, directory_name(step, 1), "bad")
    settings = Settings(checkpoint_dir=str(tmp_path / "remote"), local_dir=str(tmp_path / "local"), resume_from=resume_from)
    name = None if expected is None else directory_name(expected, 1)
    assert quarantine(settings, "", True, "NaN") == name
    assert own_files.quarantined_names(storage) == {name, *(directory_name(step, 1) for step in marked)} - {None}


def test_what_is_newer_than_the_limit_is_quarantined(tmp_path):
    """In both tiers; what has no step, too, but for what the round resumed from. Nothing is removed. What a script was saving as
    it was stopped may be saved again."""
    remote, local = tmp_path / "remote", tmp_path / "local"
    remote.mkdir()
    for step in (3, 5, 7, 8):
        save(remote, step)
    os.truncate(remote / "step_8.pt", 1000)
    for name in ("latest.pt", "first.pt"):
        torch.save({"weights": torch.arange(1000)}, remote / name)
    save_part([local], 5)
    save_part([local], 9)
    settings = Settings(checkpoint_dir=str(remote), local_dir=str(local))
    found = quarantine_newer(settings, 5, str(remote / "first.pt"), "replicas differ")
    assert set(found) == {"step_7.pt", "latest.pt", directory_name(9, 1)}
    assert own_files.quarantined_names(open_storage(str(remote))) == set(found)
    assert (remote / "step_7.pt").exists()
    save(remote, 8)
    assert resumed(remote).step == 8
    assert quarantine_newer(Settings(), 5, "", "no checkpoints") == []


def test_our_refused_stay_refused_while_copying_goes_on(tmp_path):
    for step in (5, 7):
        save_own(tmp_path, step)
    name = directory_name(7, 1)
    assert quarantine_newer(Settings(checkpoint_dir=str(tmp_path)), 5, "", "replicas differ") == [name]
    for file in (tmp_path / name).iterdir():
        os.utime(file, (time.time() + 5,) * 2)  # filesystems tell times in steps
    assert resumed(tmp_path).step == 5


def test_with_all_refused_only_fresh_runs_begin_again(tmp_path):
    settings = Settings(checkpoint_dir=str(tmp_path))
    save(tmp_path, 7)
    assert quarantine_newer(settings, 5, "/elsewhere/step_5.pt", "replicas differ") == ["step_7.pt"]
    with pytest.raises(BadCheckpoints, match="quarantined: replicas differ"):
        resumed(tmp_path)
    own_files.lift_quarantine(open_storage(str(tmp_path)), "step_7.pt")
    assert quarantine_newer(settings, 5, "", "replicas differ") == ["step_7.pt"]
    assert resumed(tmp_path).path == ""
    save(tmp_path, 4)
    assert resumed(tmp_path).step == 4


@pytest.mark.parametrize("resume_from", ["", "5"])
def test_each_directory_is_opened_once(tmp_path, monkeypatch, resume_from):
    remote, local = tmp_path / "remote", tmp_path / "local"
    remote.mkdir()
    save_own(remote, 5)
    name = save_part([local], 3)
    opened: Counter[str] = Counter()
    inner = Storage.__init__

    def counted(self: Storage, address: str) -> None:
        opened[address] += 1
        inner(self, address)

    monkeypatch.setattr(Storage, "__init__", counted)
    settings = {"local_dir": str(local), "resume_from": resume_from}
    assert resumed(remote, **settings).step == 5
    assert opened == {str(remote): 1, str(local): 1}
    shutil.rmtree(remote / directory_name(5, 1))
    if not resume_from:
        assert resumed(remote, **settings).path == str(local / name)


@pytest.mark.parametrize(
    ("own", "others", "step", "local"),
    [
        (None, [], 7, True),
        (None, [3], 7, True),
        (None, [3, 9], 9, False),  # a script's own save, by its step
        (5, [9], 9, False),
        (5, [3], 7, True),
    ],
)
def test_what_a_script_saved_counts_by_its_step(tmp_path, own, others, step, local):
    remote = tmp_path / "remote"
    if own is not None or others:
        remote.mkdir()
    if own is not None:
        save_own(remote, own)
    for number, each in enumerate(others):
        save(remote, each, age_s=-10 - number)  # in the family that was written last
    save_part([tmp_path / "local"], 7)
    found = resumed(remote, local_dir=str(tmp_path / "local"))
    assert (found.step, found.local) == (step, local)


def test_only_what_is_newer_than_copies_is_verified(tmp_path, monkeypatch):
    """To verify takes seconds for a gigabyte, at each restart. What is no checkpoint gives no reason for it."""
    remote, verified = tmp_path / "remote", []
    monkeypatch.setattr(
        listing.verifying, "verify", lambda storage, entry, mode: verified.append((entry.name, mode)) or Verification((), 0, 0)
    )
    save_own(remote, 5)
    for name in ("logs", "runs"):
        (remote / name).mkdir()
        (remote / name / "events").touch()
    (remote / "config.yaml").touch()
    save(remote, 6, age_s=-10)
    place = NodeInRound(memory=copies(tmp_path / "memory", [7], [0], nodes=1))
    assert resumed(remote, place=place).path == str(tmp_path / "memory" / directory_name(7, 1))
    assert {mode for _, mode in verified} <= {Mode.OFF}
    save(remote, 8, age_s=-20)
    assert resumed(remote, place=place).step == 8
    assert verified[-1] == ("step_8.pt", Mode(Settings().verify))


@dataclass(frozen=True)
class Told:
    """One node's end of an exchange within this process; see `base.contracts`. The real ones: rendezvous/test_strangers.py."""

    rank: int
    offered: tuple[Future[str], ...]
    chosen: Future[str]

    def offer(self, text: str) -> None:
        self.offered[self.rank].set_result(text)

    def offers(self, timeout_s: float) -> list[str] | None:
        return [each.result(timeout_s) for each in self.offered]

    def publish(self, text: str) -> None:
        self.chosen.set_result(text)

    def choice(self, timeout_s: float) -> str:
        return self.chosen.result(timeout_s)


def exchanges_of(nodes: int) -> list[Told]:
    """Their ends of one exchange, by rank."""
    offered, chosen = tuple(Future[str]() for _ in range(nodes)), Future[str]()
    return [Told(rank, offered, chosen) for rank in range(nodes)]


@pytest.fixture
def exchanges() -> list[Told]:
    return exchanges_of(2)


def test_all_nodes_get_the_same_answer(tmp_path, exchanges):
    save(tmp_path, 7)
    settings = Settings(checkpoint_dir=str(tmp_path))
    said = nodes.agree(settings, "run", exchanges[0], NodeInRound(0, 2))
    save(tmp_path, 9)
    assert nodes.agree(settings, "run", exchanges[1], NodeInRound(1, 2)) == said
    assert said.step == 7


def copies(folder: Path, steps: Sequence[int], ranks: Sequence[int], nodes: int = 2) -> str:
    """A node's memory with parts of copies that nodes with a rank each have made; return the directory."""
    for step in steps:
        directory = folder / directory_name(step, 1)
        directory.mkdir(parents=True)
        for rank in ranks:
            (directory / memory_file(rank)).write_bytes(b"part")
        files = tuple(StoredFile(memory_file(rank), 4, "") for rank in range(nodes))
        (directory / MANIFEST).write_bytes(encode(Manifest(step, 1, files, world_size=nodes, nodes=(1,) * nodes)))
    return str(folder)


def agreed(settings: Settings, exchanges: Sequence[Told], places: Sequence[NodeInRound]) -> list[Resumption]:
    """What each node resumes from."""
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(nodes.agree, settings, "run", *each) for each in zip(exchanges, places, strict=True)]
        return [each.result() for each in asked]


def test_two_nodes_with_copies_in_memory(tmp_path, exchanges):
    """The newest, whoever has its parts; what one node refuses, none uses."""
    (tmp_path / "checkpoints").mkdir()
    settings = Settings(checkpoint_dir=str(tmp_path / "checkpoints"))
    places = [
        NodeInRound(0, 2, memory=copies(tmp_path / "a", [5, 6, 7], [0, 1])),
        NodeInRound(1, 2, memory=copies(tmp_path / "b", [], []), refused=(directory_name(7, 1),)),
    ]
    (tmp_path / "b").mkdir()
    found = agreed(settings, exchanges, places)
    assert [each.path for each in found] == [str(tmp_path / node / directory_name(6, 1)) for node in "ab"]


def test_a_node_without_memory_shares_the_lower_tier(tmp_path, exchanges):
    """Its host may lack a tmpfs at /dev/shm, or room in it. Another such host would do no better, so it must not end for that."""
    save_own(tmp_path / "checkpoints", 5)
    places = [NodeInRound(0, 2, memory=copies(tmp_path / "a", [7], [0, 1])), NodeInRound(1, 2)]
    found = agreed(Settings(checkpoint_dir=str(tmp_path / "checkpoints")), exchanges, places)
    assert {each.path for each in found} == {str(tmp_path / "checkpoints" / directory_name(5, 1))}
    assert found[0].lost.startswith("node 1 has no memory for copies")


@pytest.mark.parametrize(
    ("prepare", "kind"), [(lambda path: damage(save(path, 7)), BadCheckpoints), (lambda path: save(path, 7), UsageError)]
)
def test_all_nodes_get_the_same_error(tmp_path, exchanges, prepare, kind):
    prepare(tmp_path)
    settings = Settings(checkpoint_dir=str(tmp_path), resume_from="" if kind is BadCheckpoints else "8", verify="full")
    for node, exchange in enumerate(exchanges):
        with pytest.raises(kind):
            nodes.agree(settings, "run", exchange, NodeInRound(node, 2))


@pytest.mark.seam
def test_a_node_waits_for_what_others_resume_from(tmp_path):
    whole, late = save(tmp_path, 7).read_bytes(), tmp_path / "late"
    late.mkdir()
    (late / "step_7.pt").write_bytes(whole[:100])
    storage, looks = open_storage(str(late)), []
    genuine = storage.stat

    def stat(name: str) -> Entry | None:
        looks.append(name)
        if len(looks) == 3:
            (late / name).write_bytes(whole)
        return genuine(name)

    storage.stat = stat
    nodes.await_visible(storage, "step_7.pt", time.monotonic() + 60)
    assert looks == ["step_7.pt"] * 3
    with pytest.raises(UsageError, match="storage that every node mounts"):
        nodes.await_visible(open_storage(str(tmp_path)), "step_8.pt", time.monotonic())


SCRIPT = """
import os, torch
path, step = os.environ["ELASTIC_EXT_RESUME_FROM"], os.environ.get("ELASTIC_EXT_RESUME_STEP")
print("begin", step, flush=True)
torch.load(path)
if step == "5":
    os.abort()
later = os.path.join(os.path.dirname(path), "step_9.pt")
if not os.path.exists(later):
    torch.save({"step": 9, "weights": torch.arange(1000)}, later)
    raise FloatingPointError("loss is nan at step 9")
"""


@pytest.fixture
def directory(tmp_path):
    """Of the checkpoints of a job whose script is job.py."""
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@pytest.mark.full
def test_a_job_goes_back_to_one_that_works(tmp_path, directory):
    """7 cannot be loaded; twice there is the same crash after 5 was; past 3 the loss is nan, which was saved as 9."""
    for step in (3, 5, 7):
        save(directory, step, age_s=30 - step)
    damage(directory / "step_7.pt")
    conf = f"checkpoint_dir={directory},verify=off,backoff=0"
    done = run([*AGENT, "--max-restarts=5", f"--rdzv-conf={conf}", "job.py"], tmp_path)
    assert done.returncode == 0, done.err
    assert re.findall(r"begin (.*)", done.out) == ["7", "5", "5", "3", "3"]
    assert own_files.quarantined_names(open_storage(str(directory))) == {"step_7.pt", "step_5.pt", "step_9.pt"}


@pytest.mark.seam
def test_without_a_good_checkpoint_a_job_stops(tmp_path, directory):
    damage(save(directory, 7))
    where = ["--rdzv-backend=ext_c10d", "--rdzv-endpoint=localhost:0"]
    conf = f"--rdzv-conf=checkpoint_dir={directory},verdict_file={tmp_path}/verdict"
    done = run([*AGENT, *where, conf, "job.py"], tmp_path)
    assert done.returncode == 65, done.err
    assert "step_7.pt: damaged" in done.err
    assert "no-checkpoint-left" in (tmp_path / "verdict").read_text()
    assert "begin" not in done.out


def test_lost_storage_makes_all_nodes_try_again():
    text = messages.encode(messages.failure(StorageAway("no answer for 600 s")))
    with pytest.raises(StorageAway, match="no answer for 600 s") as raised:
        messages.read_agreement(text)
    node = SimpleNamespace(part=SimpleNamespace(round=3), node=NodeIdentity("a", "host-a", ""))
    decision = Verdicts(Settings(), node).of_checkpoints(raised.value).decision
    assert (decision.kind, decision.rule, decision.exit_code) == ("storage", "storage-away", 75)


@pytest.mark.parametrize(
    ("restarts", "resumes", "wanted"),
    [(False, False, ""), (False, True, ""), (True, False, "logged"), (True, True, "raised")],
)
def test_a_question_ends_a_restart(tmp_path: Path, caplog, restarts: bool, resumes: bool, wanted: str) -> None:
    """But no script that resumes on its own, and no first start."""
    for name in ("G_100.pt", "D_100.pt"):
        saved(tmp_path / name, TRAINING)
    place = NodeInRound(restarts=restarts, resumes=resumes)
    question = "only you can say from which checkpoint to go on: D_100.pt, G_100.pt belong together"
    with pytest.raises(UsageError, match=question) if wanted == "raised" else contextlib.nullcontext():
        assert resumed(tmp_path, place=place).path == ""
    assert (question in caplog.text) == (wanted == "logged")
