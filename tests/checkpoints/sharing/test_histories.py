"""Random histories of a script that saves on three nodes, each of which may be killed, lose its disk, or stay away for a while.

What is chosen always has every file of one save, on each node that fetches it. If the last save was proved and nothing has
happened since, that is chosen.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from elastic_ext.checkpoints.choice.listing import Wanted, newest_in
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.record.stored import known_saves, newest_attempt, read_save
from elastic_ext.checkpoints.sharing.fetching import fetch
from elastic_ext.checkpoints.sharing.mirrored import kept_in
from elastic_ext.checkpoints.storage import remove_if_there
from tests.checkpoints.choice.scenes import OPTIMIZER, T0, WEIGHTS, put, saved
from tests.checkpoints.sharing.several_nodes import SeveralNodes

HISTORIES = int(os.environ.get("ELASTIC_EXT_TEST_HISTORIES", "50"))
KINDS = ("directories", "in place", "files of ranks")


class History:
    def __init__(self, folder: Path, seed: int) -> None:
        self.random, self.nodes = random.Random(seed), SeveralNodes(folder, 3)
        self.kind = self.random.choice(KINDS)
        self.mirroring = random.Random(seed + 1_000_000)  # one of its own: without mirrors, the histories are the same
        self.nodes.mirrors = self.mirroring.random() < 0.5
        self.skew = [self.random.randrange(100_000) for _ in range(3)]  # of the clocks of the directories
        self.saves = self.clock = 0
        self.barred = ""
        self.last = ""  # what must be chosen; "": nothing is sure
        # by save: by path, what nodes have written there
        self.written: defaultdict[int, defaultdict[str, set[bytes]]] = defaultdict(lambda: defaultdict(set))
        self.name_of: dict[int, str] = {}

    def place(self) -> None:
        """The nodes get other ranks."""
        self.random.shuffle(order := list(range(3)))
        self.nodes.directories = [self.nodes.directories[each] for each in order]
        self.skew = [self.skew[each] for each in order]

    def save(self) -> None:
        """A round saves once. Some of its nodes, or their agents, may be killed on the way."""
        self.saves, self.clock = self.saves + 1, self.clock + 1
        in_place = self.kind == "in place"
        round_nodes = (
            sorted(self.random.sample(range(3), self.random.choice((1, 2, 3, 3, 3)))) if self.kind == KINDS[0] else [0, 1, 2]
        )
        attempts = [self.rounds(each) for each in range(3)]
        self.nodes.attempt = 1 + max(attempts[each] for each in round_nodes)
        self.nodes.order = 0 if self.random.random() < 0.8 else self.random.randrange(3)
        name = "last" if in_place else f"step_{10 * self.saves}" if self.kind == KINDS[0] else f"ckpt_{10 * self.saves}_rank_*.pt"
        self.name_of[self.saves] = name
        self.barred = "" if self.barred == name else self.barred
        plan = [(node, path) for node in round_nodes for path in self.paths(node, name, first=node == round_nodes[0])]
        whole = self.random.random() < 0.7
        for at, (node, path) in enumerate(plan):
            self.write(node, path, really=whole or at < (len(plan) if whole else self.random.randrange(len(plan))))
        killed = self.random.random() < 0.2  # an agent, before it has recorded the save
        if whole or (not in_place and self.random.random() < 0.5):
            self.record(name, round_nodes, whole, killed)
        is_newest = self.nodes.attempt > max(attempts)  # else nodes that were away have counted on their own
        self.last = name if whole and is_newest and not killed else ""

    def rounds(self, node: int) -> int:
        local = self.nodes.storage(node)
        mirrored = kept_in(local).rounds if self.nodes.mirrors else 0
        return max(mirrored, newest_attempt(known_saves(local).values()))

    def mirror(self) -> None:
        """Nodes come to it or not, and a part may change meanwhile. Then one of them may be lost with its disk."""
        for node in range(3) if self.nodes.mirrors else ():
            if self.mirroring.random() < 0.7:
                source = (node + 1) % 3
                changes = self.mirroring.random() < 0.1
                self.nodes.mirror(node, source, lambda source=source: self.damage_any(source) if changes else None)  # type: ignore[misc]  # noqa: B023
        if self.nodes.mirrors and self.mirroring.random() < 0.3:
            self.nodes.lose(self.mirroring.randrange(3))
            self.barred = self.last = ""

    def damage_any(self, node: int) -> None:
        names = [each for each in os.listdir(self.nodes[node]) if not each.startswith(".")]
        if names:
            self.damage(node, self.mirroring.choice(names))
            self.barred = self.last = ""

    def paths(self, node: int, name: str, first: bool) -> list[str]:
        if self.kind == KINDS[2]:
            return [name.replace("*", str(node))]
        own = [f"rng_{node}.pt", "both.json"]
        return [f"{name}/{each}" for each in (["model.pt", "optimizer.pt", *own] if first else own)]

    def write(self, node: int, path: str, really: bool) -> None:
        """really: else the script was killed before; what the save would have had is noted all the same."""
        file, at = self.nodes[node] / path, self.clock + self.skew[node]
        if not really:
            self.written[self.saves][path].add(b"never written")
            return
        if path.endswith(".json"):
            put(file, b"%06d of node %d" % (self.saves, node), at)
        else:
            state = (
                {**WEIGHTS, "optimizer": {"state": {}}} if self.kind == KINDS[2] else OPTIMIZER if "optim" in path else WEIGHTS
            )
            saved(file, {**state, "step": self.saves}, at)
        self.written[self.saves][path].add(file.read_bytes())

    def record(self, name: str, round_nodes: list[int], proved: bool, killed: bool) -> None:
        by = self.random.sample(round_nodes, self.random.randrange(len(round_nodes))) if killed else round_nodes
        for rank in round_nodes if "*" in name else [None]:
            one = name if rank is None else name.replace("*", str(rank))
            before = {node: known_saves(self.nodes.storage(node)).get(one) for node in round_nodes}
            ranks = () if rank is None else (rank,)
            known = self.nodes.recorded(one, self.saves, proved, ranks, round_nodes, len(round_nodes), self.kept(name))
            for node in round_nodes:
                if node not in by:
                    remove_if_there(self.nodes.storage(node), known.file)
                elif (old := before[node]) is not None and old != known:
                    remove_if_there(self.nodes.storage(node), old.file)

    def kept(self, name: str) -> list[tuple[int, str]]:
        """Files of earlier saves of this name."""
        there = [(node, each) for node in range(3) for each in (self.nodes[node] / name).rglob("*")]
        wrote = self.written[self.saves]
        return [
            (node, each.name)
            for node, each in there
            if each.is_file() and each.read_bytes() not in wrote.get(f"{name}/{each.name}", ())
        ]

    def disturb(self) -> None:
        """Something happens between two rounds."""
        node, what = self.random.randrange(3), self.random.random()
        names = [each for each in os.listdir(self.nodes[node]) if not each.startswith(".")]
        if what < 0.1:
            shutil.rmtree(self.nodes[node])  # another host has taken its place
            self.nodes[node].mkdir()
            self.barred = self.last = ""
        elif what < 0.25 and names:
            name = self.random.choice(names)
            remove_if_there(self.nodes.storage(node), name)
            self.last = ""
        elif what < 0.4 and names:
            self.damage(node, self.random.choice(names))
            self.barred = self.last = ""  # what was written after a mark is not what was marked
        elif what < 0.6:
            self.place()
        elif what < 0.65 and self.last:
            now = T0 + self.clock + self.skew[node]
            own_files.quarantine(self.nodes.storage(node), self.last, "it diverged", written_at=float(now))
            self.barred, self.last = self.last, ""

    def damage(self, node: int, name: str) -> None:
        """A save that nobody has seen was written over a file of this one, or one of its files has gone."""
        path = self.nodes[node] / name
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        if not files:
            return
        file = self.random.choice(files)
        if self.random.random() < 0.5:
            file.unlink()
        else:
            self.clock += 1
            put(file, file.read_bytes(), self.clock + self.skew[node])

    def check(self) -> bool:
        """Return whether something was chosen."""
        own = self.random.randrange(3)
        shared = self.nodes.seen_by(own)
        choice = newest_in(shared, Wanted(of_scripts=True))
        name = os.path.basename(choice.resume.path) if choice.resume is not None else ""
        assert not self.last or name == self.last, (choice, self.last)
        assert not name or name != self.barred
        if not name or not self.is_known():
            return False
        files = shared.files_of_save(name)
        for node in range(3):
            peers = {other: each for other, each in self.nodes.peers().items() if other != node}
            path = fetch(self.nodes.storage(node), name, self.saves, files, node, peers)
            self.compare(name, Path(path))
        return True

    def is_known(self) -> bool:
        """Whether any node still has the record of a proved save, and so knows what a save of this script has."""
        found = [read_save(local, each) for local in map(self.nodes.storage, range(3)) for each in known_saves(local).values()]
        return any(each is not None and each.proved for each in found)

    def compare(self, name: str, path: Path) -> None:
        """All files of one save are there, with what that save has written."""
        above = path.parent
        found = sorted(above.glob(name)) if "*" in name else [each for each in path.rglob("*") if each.is_file()]
        content = {str(each.relative_to(above)): each.read_bytes() for each in found}
        fits = [save for save, of in self.written.items() if self.name_of[save] == name and of.keys() <= content.keys()]
        whole = [save for save in fits if all(content[each] in self.written[save][each] for each in self.written[save])]
        assert whole, (name, sorted(content), self.kind)
        assert content.keys() == self.written[whole[-1]].keys()


@pytest.mark.parametrize("seeds", [range(start, min(start + 25, HISTORIES)) for start in range(0, HISTORIES, 25)])
def test_a_choice_is_always_one_whole_save(tmp_path: Path, seeds: range) -> None:
    chosen = 0
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        history = History(folder, seed)
        try:
            for _ in range(6):
                history.save()
                chosen += history.check()
                history.mirror()
                history.disturb()
                chosen += history.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        shutil.rmtree(folder)
    assert chosen > 5 * len(seeds)  # of 12 for each
