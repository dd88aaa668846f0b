"""Two nodes agree over real servers: one is lost meanwhile, or has its secret with a newline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ext.base.contracts import Resumption
from elastic_ext.base.errors import ElasticExtError, RoundOver, UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.agreement import messages
from elastic_ext.checkpoints.agreement.nodes import NodeInRound, agree
from elastic_ext.checkpoints.agreement.shared_dir import SharedDir
from elastic_ext.checkpoints.storage import LocalStorage
from elastic_ext.features.resume.watch import shared_dir
from tests.checkpoints.choice.scenes import TRAINING, saved
from tests.checkpoints.sharing.several_nodes import SeveralNodes

pytestmark = pytest.mark.seam


class Exchange:
    """Between two nodes in one process."""

    def __init__(self) -> None:
        self._offers: dict[int, str] = {}
        self._choice = ""
        self._changed = threading.Condition()

    def of(self, node: int) -> OfNode:
        return OfNode(self, node)


class OfNode:
    def __init__(self, exchange: Exchange, node: int) -> None:
        self._of, self._node = exchange, node

    def offer(self, text: str) -> None:
        with self._of._changed:
            self._of._offers[self._node] = text
            self._of._changed.notify_all()

    def offers(self, limit_s: float) -> list[str] | None:
        with self._of._changed:
            self._of._changed.wait_for(lambda: len(self._of._offers) == 2, limit_s)
            return [text for _, text in sorted(self._of._offers.items())]

    def publish(self, text: str) -> None:
        with self._of._changed:
            self._of._choice = text
            self._of._changed.notify_all()

    def choice(self, limit_s: float) -> str:
        with self._of._changed:
            assert self._of._changed.wait_for(lambda: self._of._choice, limit_s)
            return self._of._choice


class Two:
    def __init__(self, folder: Path) -> None:
        self.nodes = SeveralNodes(folder)
        self.remote = folder / "remote"
        self.remote.mkdir()
        self.shared = [SharedDir(LocalStorage(str(each)), "127.0.0.1") for each in self.nodes.directories]
        self.exchange = Exchange()

    def agree(self, node: int, **options: object) -> Resumption:
        settings = Settings(checkpoint_dir=str(self.remote), local_dir=str(self.nodes[node]), **options)  # type: ignore[arg-type]
        place = NodeInRound(node, 2, 1, shared=self.shared[node], ranks=(node,))
        return agree(settings, "job", self.exchange.of(node), place)  # type: ignore[arg-type]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    for each in made.shared:
        each.close()


def both(two: Two, **options: object) -> list[Resumption | BaseException]:
    found: list[Resumption | BaseException] = [RuntimeError(), RuntimeError()]

    def run(node: int) -> None:
        try:
            found[node] = two.agree(node, **options)
        except (ElasticExtError, OSError) as error:
            found[node] = error

    threads = [threading.Thread(target=run, args=(node,)) for node in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return found


@pytest.mark.parametrize("verify", ["off", "full"])
def test_both_get_all(two: Two, verify: str) -> None:
    for node in (0, 1):
        saved(two.nodes[node] / "step_10" / f"optim_{node}.pt", TRAINING, 10)
    two.nodes.recorded("step_10", 10)
    for found in both(two, verify=verify):
        assert isinstance(found, Resumption), found
        assert sorted(each.name for each in Path(found.path).iterdir()) == ["optim_0.pt", "optim_1.pt"]


def test_the_serving_node_dies_during_the_fetch(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that has the file is lost. The others are no worse for it: their round is over, or they resume from a copy. They
    must not leave with a usage error (exit 78), which ends the job."""
    saved(two.nodes[0] / "step_10.pt", TRAINING, 10)
    two.nodes.recorded("step_10.pt", 10, ranks=(0,))
    read = messages.read_agreement

    def dies(text: str) -> messages.Agreement:
        two.shared[0].close()
        return read(text)

    monkeypatch.setattr(messages, "read_agreement", dies)
    found = both(two)
    assert not isinstance(found[1], UsageError), found[1]
    assert isinstance(found[1], (RoundOver, Resumption))


def test_a_secret_file_with_a_newline(tmp_path: Path) -> None:
    """The job's secret is read without white space elsewhere: hosts whose files differ in that form one job."""
    found = []
    for node, text in enumerate(("a secret of the job\n", "a secret of the job")):
        (tmp_path / f"local_{node}").mkdir()
        secret = tmp_path / f"secret_{node}"
        secret.write_text(text)
        secret.chmod(0o600)
        local = str(tmp_path / f"local_{node}")
        settings = Settings(checkpoint_dir=str(tmp_path), local_dir=local, local_saves="all", job_secret_file=str(secret))
        found.append(shared_dir(settings, "127.0.0.1"))
    one, other = found
    assert one is not None
    assert other is not None
    try:
        assert one.all_nodes(0, [one.place, other.place]).stat("x") is None
    finally:
        one.close()
        other.close()


def test_two_agents_with_one_directory(tmp_path: Path) -> None:
    """Each would record its part over that of the other: so the script saves in checkpoint_dir, and the log says why."""
    (tmp_path / "local").mkdir()
    settings = Settings(checkpoint_dir=str(tmp_path / "shared"), local_dir=str(tmp_path / "local"), local_saves="all")
    first = shared_dir(settings, "127.0.0.1")
    assert first is not None
    with pytest.raises(UsageError, match=r"another agent uses .*: give each agent a local_dir of its own") as refused:
        shared_dir(settings, "127.0.0.1")
    exchange, found = Exchange(), dict[int, Resumption]()
    places = NodeInRound(0, 2, shared=first), NodeInRound(1, 2, unshared=str(refused.value))

    def take_part(place: NodeInRound) -> None:
        found[place.node] = agree(settings, "job", exchange.of(place.node), place)

    threads = [threading.Thread(target=take_part, args=(each,)) for each in places]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    for node in (0, 1):
        assert not found[node].place.local
        assert "node 1: other nodes cannot read it: another agent uses" in found[node].place.reason
    first.close()
    again = shared_dir(settings, "127.0.0.1")
    assert again is not None, "the lock goes with its agent"
    again.close()
