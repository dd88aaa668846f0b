"""The ranks of a job, forked, as nodes with a directory in memory each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from elastic_ext.checkpoints.agreement.messages import Offers, newest_whole
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.memory import part
from elastic_ext.checkpoints.storage import open_storage
from tests.checkpoints.rank_groups import RankGroups


class Hosts:
    """The ranks of a job, as nodes with a directory in memory each."""

    def __init__(self, tmp_path: Path, groups: RankGroups, nodes: list[int]) -> None:
        self.directory, self.memory = tmp_path / "checkpoints", tmp_path / "memory"
        self.nodes, self._groups = nodes, groups
        for node in range(len(nodes)):
            (self.memory / str(node)).mkdir(parents=True)

    def run(self, steps: int, resume: str = "", args: dict | None = None, **request: Any) -> list[Any]:
        return self.task("copy_to_memory", {"steps": steps, **(args or {})}, resume, **request)

    def task(self, name: str, args: dict, resume: str = "", **request: Any) -> list[Any]:
        return self._groups.run(
            name,
            sum(self.nodes),
            {"directory": str(self.directory), **args},
            env={"ELASTIC_EXT_CHECKPOINT_DIR": str(self.directory)},
            nodes=self.nodes,
            memory=str(self.memory),
            resume=resume,
            **request,
        )

    def load(self, resume: str = "") -> tuple[int, str]:
        """Exactly, on each rank; return the step, and the folder and the name of what was loaded."""
        results = self.run(0, resume)
        assert None not in results, self._groups.stderr.read_text()[-3000:]
        assert [result["wrong"] for result in results] == [[]] * sum(self.nodes)
        paths = {result["step"]: Path(result["path"] or "") for result in results}
        ((step, path),) = paths.items()
        return step, f"{'memory' if self.memory in path.parents else path.parent.name}/{path.name}"

    def newest(self) -> str:
        """The copy that the agents of the nodes choose; "" if there is none."""
        storages = [open_storage(str(self.memory / str(node))) for node in range(len(self.nodes))]
        offer = newest_whole([Offers(has_memory=True, memory=tuple(tiers.offers(each))) for each in storages]).offer
        return offer.name if offer is not None else ""

    def resize(self, nodes: list[int]) -> None:
        """Other nodes from now on. What a lost one had, one that is left has, too."""
        for lost in range(len(nodes), len(self.nodes)):
            shutil.rmtree(self.memory / str(lost))
        for new in range(len(self.nodes), len(nodes)):
            (self.memory / str(new)).mkdir()
        self.nodes = nodes

    def parts(self, name: str) -> list[list[str]]:
        """The parts of a copy on each node."""
        return [sorted(path.name for path in (self.memory / str(node) / name).glob("*.mem")) for node in range(len(self.nodes))]

    def part(self, name: str, rank: int, node: int | None = None) -> Path:
        """A part, by default on its own node."""
        return self.memory / str(tiers.node_of(self.nodes, rank) if node is None else node) / name / tiers.memory_file(rank)

    def damage(self, name: str, rank: int, node: int | None = None) -> None:
        with self.part(name, rank, node).open("r+b") as file:
            file.seek(part.ALIGNMENT + 5)
            (byte,) = file.read(1)
            file.seek(part.ALIGNMENT + 5)
            file.write(bytes([byte ^ 4]))
