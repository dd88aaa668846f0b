"""The copier of the local tier as a process of its own, over plain files: no training, no agent."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from xxhash import xxh3_64_hexdigest

from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.copying.copier import claim_local_dir
from elastic_ext.checkpoints.copying.replicate import TARGET, LocalCheckpoint, Replicator, next_target
from elastic_ext.checkpoints.directory import tiers, upkeep
from elastic_ext.checkpoints.directory.own_files import MANIFEST, Manifest, StoredFile, encode
from elastic_ext.checkpoints.directory.tiers import Offer, Pin, missing_ranks, newest_loadable, rank_of, ranks_of, unless_pinned
from elastic_ext.checkpoints.directory.upkeep import TokenBucket, plan_local_prune
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.candidates import directory_name
from elastic_ext.checkpoints.ranks import merge_ranges
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.checkpoints.verifying import Mode, verify
from tests.checkpoints.choice.scenes import flip
from tests.jobs import environment
from tests.until import LIMIT_S, until


def save(locals_: list[Path], step: int, generation: int = 1, size: int = 1000, seed: int = 0) -> str:
    """A checkpoint of one rank on each node, as `Checkpointer` leaves it; return its name."""
    source = random.Random(f"{step} {generation} {seed}")
    name = directory_name(step, generation)
    own = [{f"__{rank}_0.distcp": source.randbytes(size), f"rank_{rank:05d}.pt": b"own"} for rank in range(len(locals_))]
    common = {"shared.pt": b"shared", ".metadata": b"metadata"}
    files = {file: data for each in (*own, common) for file, data in each.items()}
    stored = tuple(StoredFile(file, len(data), xxh3_64_hexdigest(data)) for file, data in files.items())
    manifest = Manifest(step, generation, stored, world_size=len(locals_), nodes=(1,) * len(locals_))
    for local, mine in reversed(list(zip(locals_, own, strict=True))):
        (local / name).mkdir(parents=True)
        for file, data in {**mine, **common, MANIFEST: encode(manifest)}.items():
            (local / name / file).write_bytes(data)
    return name


class Process:
    """The copier, as the agent starts it."""

    def __init__(self, local: Path, remote: Path | str, mb_s: float = 0.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elastic_ext.checkpoints.copying.replicate", f"--mb-s={mb_s}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(ELASTIC_EXT_LOCAL_DIR=str(local), ELASTIC_EXT_CHECKPOINT_DIR=str(remote)),
        )
        self.told: list[dict] = []

    def say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _reports(self) -> Iterator[dict]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "pulse" not in (message := json.loads(line)):  # while a file takes long
                self.told.append(message)
                yield message

    def until(self, wanted) -> dict:
        """The first thing told from now on that is wanted."""
        for told in self._reports():
            if wanted(told):
                return told
        raise AssertionError(f"the copier ended with {self.process.wait()}: {self.told}")

    def finish(self) -> int:
        self.say("finish")
        list(self._reports())
        return self.process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def complete(remote: Path | str, name: str) -> bool:
    storage = open_storage(str(remote))
    entry = storage.stat(name)
    if entry is None or not detect.check(storage, entry).complete:
        return False
    assert not verify(storage, entry, Mode.FULL).faults, "complete, and damaged"
    return True


def copier_of(local: Path, remote: Path | str) -> Replicator:
    """In this process, `turn` by `turn`."""
    return Replicator(open_storage(str(local)), open_storage(str(remote)), TokenBucket(0.0))


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


@pytest.fixture
def copiers(tmp_path: Path, nodes: list[Path]) -> list[Replicator]:
    return [copier_of(node, tmp_path / "remote") for node in nodes]


def test_whose_file():
    assert [rank_of(name) for name in ("__12_0.distcp", "rank_00003.pt", ".metadata", "shared.pt")] == [12, 3, None, None]
    assert [list(ranks_of((2, 1, 3), node)) for node in range(3)] == [[0, 1], [2], [3, 4, 5]]


def test_the_newest_whose_parts_all_nodes_have():
    def offer(step: int, *ranks: int, generation: int = 2, digest: str = "d", nodes: tuple[int, ...] = (1, 1)) -> Offer:
        return Offer(directory_name(step, generation), digest, step, len(nodes), sum(nodes), ranks)

    def newest(*told: list[Offer], barred: tuple[str, ...] = ()) -> int | None:
        found = newest_loadable(told, barred)
        return found.step if found is not None else None

    assert newest([offer(2, 0), offer(4, 0), offer(6, 0)], [offer(2, 1), offer(4, 1)]) == 4
    assert newest([offer(4, 0), offer(3, 0, generation=3)], [offer(4, 1), offer(3, 1, generation=3)]) == 3  # of a newer group
    assert newest([offer(2, 0), offer(4, 0)], [offer(2, 1), offer(4, 1)], barred=(offer(4).name,)) == 2
    assert newest([offer(2, 0), offer(4, 0)], []) is None  # a replaced node
    assert newest([offer(4, 0)], [offer(4, 1, digest="another")]) is None
    assert newest() is None
    # Whoever has which: in another order, with one node more, all on one disk.
    assert newest([offer(4, 1)], [offer(4, 0)]) == 4
    assert newest([offer(4, 0)], [], [offer(4, 1)]) == 4
    assert newest([offer(4, 0, 1)]) == 4
    three = [offer(4, rank, nodes=(1, 1, 1)) for rank in range(3)]
    assert newest(three[:1], three[2:]) is None
    assert missing_ranks([three[:1], three[2:]]) == {offer(4, nodes=(1, 1, 1)): (1,)}
    assert newest(three[2:], three[:1], three[1:2]) == 4


def test_pruning_keeps_the_last_copy():
    names = [directory_name(step, 1) for step in (8, 6, 4, 2)]

    def removed(newest_remote: int | None, torn: tuple[int, ...] = ()) -> list[int]:
        whole = {name for name, step in zip(names, (8, 6, 4, 2), strict=True) if step not in torn}
        order = (1, newest_remote) if newest_remote is not None else None
        return [int(name[5:13]) for name in plan_local_prune(names, whole, (), order)]

    assert removed(None) == []
    assert removed(4) == [2]  # 4 itself is told to be there by `remote`
    assert removed(8) == [6, 4, 2]
    assert removed(9, torn=(8, 6, 4, 2)) == []  # nothing whole: in work
    assert removed(None, torn=(8, 4)) == [4]
    assert plan_local_prune(names[:1], names[:1], names[:1], (1, 8)) == []


def test_joined_ranges_cover_the_same_bytes():
    source = random.Random(7)
    for _ in range(200):
        ranges = [(source.choice("xy"), begin := source.randrange(100), begin + source.randrange(1, 9)) for _ in range(9)]
        wanted = {(file, byte) for file, begin, end in ranges for byte in range(begin, end)}
        found = merge_ranges(ranges, near=0)
        assert [(file, byte) for file, begin, end in found for byte in range(begin, end)] == sorted(wanted)
        wide = merge_ranges(ranges, near=20)
        assert wanted <= {(file, byte) for file, begin, end in wide for byte in range(begin, end)}
        assert all(one[0] != two[0] or two[1] - one[2] > 20 for one, two in itertools.pairwise(wide))


def test_what_the_leader_copies_next():
    def here(step: int, generation: int = 1, leads: bool = True) -> LocalCheckpoint:
        return LocalCheckpoint(directory_name(step, generation), Manifest(step, generation, ()), b"", leads)

    two, four, later = here(2), here(4), here(3, 2)
    assert next_target([], "", (), False) is None
    assert next_target([two, four], "", (), False) == four
    assert next_target([two, four], two.name, (), False) == two  # it is on its way: finish it
    assert next_target([two, four], two.name, (), True) == two  # a large file, perhaps
    assert next_target([two, later], two.name, (), False) == two
    assert next_target([two, later], two.name, (), True) == later
    assert next_target([two, four], two.name, {two.name}, False) == four
    assert next_target([two, four], four.name, {four.name}, False) == two
    assert next_target([here(2, leads=False), four], two.name, (), False) == four


def test_bandwidth_over_any_window():
    """Over each time t no more than rate x t bytes and one block: counted, by a clock of our own."""
    source = random.Random(3)
    bucket, now, sent = TokenBucket(1000.0), 0.0, []
    for _ in range(500):
        now += source.choice((0.0, 0.0, source.random()))
        size = source.randrange(1, 400)
        now += bucket.take(size, now)
        sent.append((now, size))
    for first in range(0, 500, 7):
        for last in range(first, 500, 11):
            window = sent[last][0] - sent[first][0]
            assert sum(size for _, size in sent[first : last + 1]) <= 1000.0 * window + 400 + 1e-6
    bucket = TokenBucket(1000.0)
    waits = [bucket.take(500, now) for now in (0.0, 0.0, 0.2, 5.0, 5.0)]
    assert waits == pytest.approx([0.0, 0.5, 0.8, 0.0, 0.5])  # no longer than it must
    assert TokenBucket(0.0).take(10**12, 0.0) == 0.0


def test_a_local_directory_belongs_to_one_remote_one(tmp_path):
    local = open_storage(str(tmp_path / "local"))
    tiers.claim(local, open_storage("memory://one"))
    tiers.claim(local, open_storage("memory://one/"))
    with pytest.raises(UsageError, match="belong to memory://one"):
        tiers.claim(local, open_storage("memory://two"))
    with pytest.raises(UsageError, match="local_dir is set but checkpoint_dir is not"):
        claim_local_dir(Settings(local_dir=str(tmp_path / "local")))


@pytest.mark.seam
def test_rank_0s_node_writes_the_manifest_last(nodes, where):
    name = save(nodes, 2)
    with Process(nodes[0], where) as first, Process(nodes[1], where) as second:
        first.until(lambda told: told["sent"])
        assert second.until(lambda told: told["complete"])["complete"] == name
        assert first.finish() == second.finish() == 0
    assert complete(where, name)
    assert sum(told["sent"] for each in (first, second) for told in each.told) == 2 * (1000 + len("own")) + len("sharedmetadata")


@pytest.mark.seam
def test_killed_in_mid_copy_another_one_finishes(nodes, where):
    name = save(nodes[:1], 2, size=300_000)
    storage = open_storage(where)
    with Process(nodes[0], where, mb_s=1e-6) as first:  # one file at once, then days' wait
        until(lambda: storage.stat(f"{name}/__0_0.distcp"))
        first.process.kill()
        first.process.wait()
    assert not complete(where, name)
    with Process(nodes[0], where) as second:
        assert second.finish() == 0
    assert complete(where, name)
    assert 0 < sum(told["sent"] for told in second.told) < 300_000  # not the large file again


@pytest.mark.seam
def test_it_ends_with_the_agent(tmp_path, nodes):
    save(nodes[:1], 2, size=300_000)
    with Process(nodes[0], tmp_path / "remote", mb_s=0.001) as copier:
        copier.process.stdin.close()
        copier.process.stdin = None
        assert copier.process.wait(LIMIT_S) == 0


@pytest.mark.seam
def test_saves_that_come_faster_than_copies(tmp_path, nodes):
    """Both nodes copy the same one though they see others; what is older than a complete one is left out and pruned."""
    remote = tmp_path / "remote"
    with ExitStack() as stack:
        processes = [stack.enter_context(Process(node, remote)) for node in nodes]
        names = []
        for step in range(2, 40, 2):
            names.append(save(nodes, step))
            for each in processes:
                each.say("look")
        with ThreadPoolExecutor() as pool:
            assert list(pool.map(Process.finish, processes)) == [0, 0]
    assert complete(remote, names[-1])
    for node in nodes:
        assert [path.name for path in sorted(node.glob("step_*"))] == names[-1:]


# Turn by turn, in this process.


def test_a_damaged_part_holds_up_nothing_else(tmp_path, nodes, copiers):
    bad = save(nodes, 2)
    flip(nodes[1] / bad / "__1_0.distcp")
    copiers[0].turn()
    told = copiers[1].turn()
    assert (told.failures, "damaged" in told.reason) == (1, True)
    good = save(nodes, 4)
    told = [each.turn().complete for _ in range(3) for each in copiers]
    assert told[-2:] == [good, good]
    assert complete(tmp_path / "remote", good)
    assert not complete(tmp_path / "remote", bad)


def test_it_prunes_only_what_is_superfluous(tmp_path, nodes, copiers):
    save(nodes, 2)
    save(nodes, 4)

    def left(node: int) -> list[int]:
        return sorted(int(path.name[5:13]) for path in nodes[node].glob("step_*"))

    for _ in range(3):  # without the other node nothing is complete there
        assert directory_name(4, 1) in copiers[0].turn().waiting
    assert not list((tmp_path / "remote").rglob(MANIFEST))
    assert left(0) == left(1) == [2, 4]
    copiers[1].turn()
    assert left(1) == [2, 4]
    copiers[0].turn()
    assert complete(tmp_path / "remote", directory_name(4, 1))
    assert left(0) == [4]  # the newest stays, to be loaded from
    copiers[1].turn()
    assert left(1) == [4]
    assert (tmp_path / "remote" / TARGET).read_text() == directory_name(4, 1)


@pytest.fixture
def superfluous(tmp_path) -> tuple[Replicator, Path, str, str]:
    """A copier that has an older checkpoint to prune, which a round may have chosen: on another node the newer one is lost."""
    local, copier = tmp_path / "local", copier_of(tmp_path / "local", tmp_path / "remote")
    older = save([local], 2)
    assert copier.turn().complete == older
    return copier, local, older, save([local], 4)


@pytest.mark.parametrize("chosen", ["older", "newer"])
def test_only_what_is_chosen_stays_until_loaded(superfluous, chosen):
    copier, local, older, newer = superfluous
    pin = Pin(open_storage(str(local)))
    assert copier.turn().complete == newer
    assert (local / older).exists()  # all may be chosen
    pin.keep_only(older if chosen == "older" else newer)
    copier.turn()
    assert ((local / older).exists(), (local / newer).exists()) == (chosen == "older", True)
    pin.release()
    copier.turn()
    assert not (local / older).exists()
    assert chosen == "newer" or list((local / ".elastic_ext" / "loading").iterdir()) == []


HOLDER = """
import sys
from elastic_ext.checkpoints.directory.tiers import Pin
from elastic_ext.checkpoints.storage import open_storage
pin = Pin(open_storage(sys.argv[1]))
if len(sys.argv) > 2:
    pin.keep_only(sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.seam
@pytest.mark.parametrize("while_", ["choosing", "loading"])
def test_a_pin_dies_with_its_agent(superfluous, while_):
    copier, local, older, _ = superfluous
    command = [sys.executable, "-c", HOLDER, str(local), *([older] if while_ == "loading" else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()) as agent:
        assert agent.stdout.readline() == "held\n"
        copier.turn()
        assert (local / older).exists()
        agent.kill()
    copier.turn()
    assert not (local / older).exists()


def test_without_file_locks_the_agent_goes_on(superfluous, monkeypatch, caplog):
    def refused(number: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    copier, local, older, newer = superfluous
    monkeypatch.setattr("fcntl.flock", refused)
    before = os.listdir("/proc/self/fd")
    pin = Pin(open_storage(str(local)))
    pin.keep_only(older)
    pin.release()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert "from being pruned" in caplog.text
    told = copier.turn()
    assert (told.complete, told.failures) == (newer, 0)
    assert not (local / older).exists()


@pytest.mark.seam
def test_who_chooses_waits_for_a_removal_under_way(superfluous, monkeypatch):
    _, local, older, _ = superfluous
    storage = open_storage(str(local))
    tried, genuine = threading.Event(), tiers._try_lock

    def choose() -> list[str]:
        pin = Pin(storage)
        found = [offer.name for offer in tiers.offers(storage)]
        pin.release()
        return found

    monkeypatch.setattr(tiers, "REMOVAL_S", 600.0)
    with ThreadPoolExecutor(1) as pool:
        with unless_pinned(storage, older) as free:
            assert free
            monkeypatch.setattr(tiers, "_try_lock", lambda *args: (genuine(*args), tried.set())[0])
            seen = pool.submit(choose)
            assert tried.wait(LIMIT_S)
            upkeep.delete(storage, older)
            assert not seen.done()
        assert seen.result() == [directory_name(4, 1)]


def test_a_silent_remote_directory_is_tried_again(tmp_path, nodes):
    remote, away = tmp_path / "remote", tmp_path / "away"
    remote.mkdir()
    copier = copier_of(nodes[0], remote)
    name = save(nodes[:1], 2)
    remote.rename(away)
    remote.write_text("a file is where the directory was")
    told = [copier.turn() for _ in range(3)]
    assert [each.failures for each in told] == [1, 2, 3]
    assert told[0].reason
    assert told[0].waiting == (name,)
    remote.unlink()
    away.rename(remote)
    told = copier.turn()
    assert (told.failures, told.complete, told.waiting) == (0, name, ())


def test_removed_under_its_hands(tmp_path, nodes, copiers):
    """A file of it goes before the manifest comes: it is seen, and sent again."""
    name = save(nodes, 2)
    copiers[0].turn()
    copiers[1].turn()
    upkeep.delete(open_storage(str(tmp_path / "remote")), name)
    for _ in range(2):
        copiers[0].turn()
    assert not os.path.exists(tmp_path / "remote" / name / MANIFEST)
