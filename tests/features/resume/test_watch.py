"""The agent's directory for copies in memory: its room, what it refuses, and its end."""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_ext.base import contracts, diagnosis, settings
from elastic_ext.base.contracts import MemoryRoom, Resumption, SingleNode, memory_room, resume_variables
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.agreement.messages import NewestSaved, read_offers
from elastic_ext.checkpoints.agreement.nodes import NodeInRound
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.directory.tiers import memory_file
from elastic_ext.checkpoints.formats.candidates import directory_name
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.failures.policy import Action, Decision
from elastic_ext.features.resume.watch import MemoryCopies, ResumePoint, Resuming, agree
from elastic_ext.workers.progress import Progress
from elastic_ext.workers.standby.import_checks import PER_WORKER
from tests.checkpoints.choice.scenes import resumed
from tests.checkpoints.copying.test_replicate import save as save_part
from tests.checkpoints.formats.test_formats import save_own


@pytest.fixture
def run_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="elastic_ext_test_") as folder:
        yield folder


def told(kind: str, back: int, refuse_copies: bool = False, node: str = "a") -> JobVerdict:
    decision = Decision(Action.RESTART, kind, "it failed", rule="rule", checkpoints_back=back)
    return JobVerdict(decision, 3, node, refuse_copies=refuse_copies)


def test_the_room_and_its_limit(tmp_path, run_dir):
    copies = MemoryCopies(Settings(checkpoint_dir=str(tmp_path), memory_limit=1000), run_dir)
    assert copies.open(1) == MemoryRoom(f"{run_dir}/memory", 1000)
    assert copies.open(2) == MemoryRoom(f"{run_dir}/memory", 500), "the rest is for another node's"
    assert MemoryCopies(Settings(checkpoint_dir=str(tmp_path), memory_every=0), run_dir).open(1) is None
    assert MemoryCopies(Settings(), run_dir).open(1) is None
    assert MemoryCopies(Settings(checkpoint_dir=str(tmp_path)), str(tmp_path)).open(1) is None, "not in memory"


def test_a_part_lost_during_measuring_costs_no_copies(tmp_path, run_dir):
    """Parts of another node arrive at any moment, and replace older ones."""
    folder = Path(run_dir, "memory", directory_name(8, 1))
    folder.mkdir(parents=True)
    (folder / memory_file(0)).write_bytes(b"part")
    (folder / memory_file(1)).symlink_to("gone")  # its size cannot be told either
    copies = MemoryCopies(Settings(checkpoint_dir=str(tmp_path)), run_dir)
    assert copies.open(1) is not None


def worker(pid: int = 1, saved: int | None = None) -> Progress:
    return Progress(pid, 0, 0, 0, False, saved_step=saved)


@pytest.mark.parametrize(
    ("workers", "known"),
    [
        ([worker(), worker()], NewestSaved(3, 5)),  # what the round resumed from
        ([worker(saved=6), worker(saved=8)], NewestSaved(3, 8)),
        ([worker(pid=0), worker(pid=0)], None),  # they do not run through the bootstrap
        ([], None),
    ],
)
def test_the_newest_checkpoint_that_the_agent_knows_of(tmp_path, run_dir, workers, known):
    """It goes with the offers of the next round; see `needs_no_storage`."""
    save_own(tmp_path, 5)
    settings = Settings(checkpoint_dir=str(tmp_path))
    copies = MemoryCopies(settings, run_dir)
    for number in (3, 4):
        exchange = SingleNode()
        job = SimpleNamespace(part=SimpleNamespace(round=number, exchange=exchange), get_run_id=lambda: "run")
        point = agree(settings, job, NodeInRound(), copies)
        (offers,) = map(read_offers, exchange.offers(0))
        assert offers.has_memory
        assert offers.saved == (NewestSaved() if number == 3 else known)
        assert copies.saved == NewestSaved(number, 5)
        point.workers_ended(SimpleNamespace(read_progress=lambda: workers))


def test_worker_variables_suit_standbys_and_nested_agents(tmp_path):
    names = {value for name, value in vars(contracts).items() if name.isupper()}
    assert names <= PER_WORKER
    of_worker = MemoryRoom("/dev/shm/x/memory", 100, None, "rack", 4e6).variables(2)
    assert memory_room(of_worker) == MemoryRoom("/dev/shm/x/memory", 50, None, "rack", 2e6)
    given = {**of_worker, **resume_variables("/checkpoints/one", 1)}
    found = settings.read({}, {**given, "ELASTIC_EXT_WORKER": "{}"})
    assert (found.memory_limit, found.memory_every) == (50, None)


@pytest.mark.parametrize(
    ("verdict", "in_memory", "refused", "quarantined"),
    [
        (told(diagnosis.NUMERIC, back=0, refuse_copies=True), True, True, None),
        (told(diagnosis.NUMERIC, back=0, refuse_copies=True, node="b"), True, True, None),
        (told(diagnosis.NUMERIC, back=1, refuse_copies=True), False, True, 5),
        (told(diagnosis.NUMERIC, back=1, refuse_copies=True, node="b"), False, True, None),  # the node with the cause does
        (told(diagnosis.UNKNOWN, back=1), True, True, None),
        (told(diagnosis.UNKNOWN, back=1), False, False, 5),
        (told(diagnosis.UNKNOWN, back=0), True, False, None),
    ],
)
def test_what_is_blamed_is_refused_everywhere(tmp_path, run_dir, verdict, in_memory, refused, quarantined):
    settings = Settings(checkpoint_dir=str(tmp_path))
    save_own(tmp_path, 3)
    save_own(tmp_path, 5)
    copies = MemoryCopies(settings, run_dir)
    room = copies.open(1)
    assert room is not None
    name = directory_name(8, 1)
    part = Path(room.directory, name, memory_file(0))
    part.parent.mkdir()
    part.write_bytes(b"part")
    path = f"{room.directory}/{name}" if in_memory else f"{tmp_path}/{directory_name(5, 1)}"
    ResumePoint(settings, Resumption(path, 8), None, copies).go_back(verdict, "a")
    assert copies.refused == ((name,) if refused else ())
    assert part.exists() != refused
    expected = set() if quarantined is None else {directory_name(quarantined, 1)}
    assert own_files.quarantined_names(open_storage(str(tmp_path))) == expected
    for each in expected:
        mark = own_files.quarantine_of(open_storage(str(tmp_path)), each)
        assert mark.reason == f"the failure of round 3 (kind {verdict.decision.kind}, rule rule) is blamed on it"


@pytest.mark.parametrize(("node", "quarantined"), [("a", {directory_name(5, 1)}), ("b", set())])
def test_since_replicas_were_equal_nothing_may_be_used(tmp_path, run_dir, node, quarantined):
    """Each node refuses its newer copies; one of them marks the checkpoints, whatever it does itself then."""
    settings = Settings(checkpoint_dir=str(tmp_path))
    save_own(tmp_path, 3)
    save_own(tmp_path, 5)
    verdict = dataclasses.replace(told(diagnosis.HARDWARE, back=0), refuse_newer=4, refused_by="a")
    copies = MemoryCopies(settings, run_dir)
    room = copies.open(1)
    assert room is not None
    for step in (4, 6):
        save_part([Path(room.directory)], step)
    ResumePoint(settings, Resumption(f"{tmp_path}/{directory_name(3, 1)}", 3), None, copies).go_back(verdict, node)
    assert copies.refused == (directory_name(6, 1),)
    assert copies.newest_step() == 4
    assert own_files.quarantined_names(open_storage(str(tmp_path))) == quarantined


def test_what_one_node_has_is_unusable_once_equal(tmp_path):
    """In its `local_dir`: the node that marks what all share knows nothing of it, and what is marked is not marked again."""
    remote, newest = tmp_path / "remote", directory_name(6, 1)
    remote.mkdir()
    save_own(remote, 3)
    nodes = {id_: Settings(checkpoint_dir=str(remote), local_dir=str(tmp_path / id_)) for id_ in "abc"}
    for step in (4, 6):
        save_part([tmp_path / "b"], step)
    assert resumed(remote, local_dir=str(tmp_path / "b")).step == 6
    verdict = dataclasses.replace(told(diagnosis.HARDWARE, back=0), refuse_newer=4, refused_by="a")
    for id_, expected in (("a", set()), ("c", set()), ("b", {newest})):
        ResumePoint(nodes[id_], Resumption(str(remote / directory_name(3, 1)), 3)).go_back(verdict, id_)
        assert own_files.quarantined_names(open_storage(str(remote))) == expected
    mark = own_files.quarantine_of(open_storage(str(remote)), newest)
    for id_ in "ab":
        ResumePoint(nodes[id_], Resumption(str(remote / directory_name(3, 1)), 3)).go_back(verdict, id_)
    assert own_files.quarantine_of(open_storage(str(remote)), newest) == mark
    assert resumed(remote, local_dir=str(tmp_path / "b")).step == 4


def test_the_newest_steps_of_both_tiers(tmp_path, run_dir):
    """A checkpoint in memory is none on disk, and what workers have saved since the round began counts."""
    settings = Settings(checkpoint_dir=str(tmp_path))
    copies = MemoryCopies(settings, run_dir)
    room = copies.open(1)
    assert room is not None
    resumed = ResumePoint(settings, Resumption(f"{room.directory}/{directory_name(8, 1)}", 8), None, copies)
    assert resumed.newest_steps([]) == (None, None)
    for step in (7, 8):
        save_part([Path(room.directory)], step)
    copies.checkpoint_step = 5
    assert resumed.newest_steps([worker(1, None)]) == (8, 5)
    assert resumed.newest_steps([worker(1, 12), worker(2, 9)]) == (8, 12)
    copies.refuse()
    assert resumed.newest_steps([]) == (None, 5)


def test_the_job_makes_its_checkpoint_dir(tmp_path):
    """torch.save makes none. What is above it may be a file system that is not mounted."""
    Resuming.check(Settings(checkpoint_dir=str(tmp_path / "saves")))
    Resuming.check(Settings(checkpoint_dir=str(tmp_path / "saves")))
    Resuming.check(Settings(checkpoint_dir=str(tmp_path / "mount" / "saves")))
    assert [each.name for each in tmp_path.iterdir()] == ["saves"]
