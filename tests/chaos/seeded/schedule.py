"""From a seed to a plan: how the job is set up, and which faults come when. Pure, standard library only."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

STEPS = 45  # of the training at least; it goes on until all faults are healed, and all train that have room
LAST_STEP = 40  # at which a fault comes
HOSTS = ("a", "b", "c")
SPARE = "d"
LEASE_S = 3
TRY_AGAIN = (69, 75)  # exit codes that ask a scheduler to start the node again
BETWEEN = "-"  # of two hosts that are one target
RANK_0 = "rank 0"  # as a target: the host that has it when the fault comes


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        seconds: the shortest and the longest time until it is healed; None: there is nothing to heal.
        scope: what a target is: "host", "two hosts", or what is no host's: "etcd" (members are chosen by the kind), "store" (what
            all hosts share), "job".
        charges: restarts that it may cost the budget.
        may_leave: the agent of its target may leave with a code by which a scheduler starts it again.
        needs: settings of the plan that it needs, "standby", "local", "spare", "folder", "s3" or one of ETCD_NEEDS.
        harmless: where it is alone, no further round may begin.
        rule: where it is alone, the verdict on it is by this rule of the table.
    """

    seconds: tuple[float, float] | None = None
    scope: str = "host"
    charges: int = 0
    may_leave: bool = False
    needs: tuple[str, ...] = ()
    harmless: bool = False
    rule: str = ""


_PAUSE = (0.5, 6.0)  # some outlast the lease
_AWAY = (0.5, 5.0)
_ROLES_NEED = {
    "worker": (),
    "agent": (),
    "relay": (),
    "reaper": (),
    "copier": ("local",),
    "standby server": ("standby",),
    "standby": ("standby",),
    "keeper": ("brought",),
}

_HELPERS = _ROLES_NEED.keys() - {"worker", "agent"}

KINDS: dict[str, Kind] = {
    **{
        f"kill {role}": Kind(
            charges=role == "worker",
            may_leave=role in ("worker", "agent"),
            needs=needs,
            harmless=role in _HELPERS,
            rule="killed" if role == "worker" else "",
        )
        for role, needs in _ROLES_NEED.items()
    },
    # A pause that outlasts the lease, of a worker or an agent, ends the round as a cut does.
    **{
        f"pause {role}": Kind(_PAUSE, charges=role == "worker", may_leave=True, needs=needs, harmless=role in _HELPERS)
        for role, needs in _ROLES_NEED.items()
    },
    "terminate worker": Kind(charges=1, may_leave=True, rule="killed"),
    "terminate agent": Kind(may_leave=True),
    "kill host": Kind(_AWAY, may_leave=True),
    "lose host": Kind(may_leave=True, needs=("spare",)),
    "kill container": Kind(_AWAY, may_leave=True),
    "pause host": Kind(_PAUSE, may_leave=True),
    "cut": Kind((0.5, 8.0), may_leave=True),
    "cut out": Kind((0.5, 8.0), may_leave=True),
    "cut in": Kind((0.5, 8.0), may_leave=True),
    "delay": Kind((1.0, 5.0), harmless=True),
    "loss": Kind((1.0, 5.0), may_leave=True),
    "reorder": Kind((1.0, 5.0), harmless=True),
    "kill etcd leader": Kind((0.2, 4.0), "etcd", needs=("members",), harmless=True),
    "kill etcd member": Kind((0.2, 6.0), "etcd", needs=("members",), harmless=True),
    "kill etcd": Kind((0.2, 6.0), "etcd", needs=("members",), harmless=True),
    # As it goes on, a leader that stood still revokes leases that were renewed meanwhile (etcd's issue 15247, until 3.5.12 and
    # 3.4.30). Then a node is lost, and back at once: it costs a round.
    "pause etcd leader": Kind((0.5, 6.0), "etcd", needs=("members",)),
    "pause etcd member": Kind((0.5, 6.0), "etcd", needs=("members",)),
    "pause etcd": Kind((0.5, 6.0), "etcd", needs=("members",), harmless=True),
    "cut etcd leader": Kind((0.5, 6.0), "etcd", needs=("apart",), harmless=True),
    "cut etcd member": Kind((0.5, 6.0), "etcd", needs=("apart",), harmless=True),
    "cut etcd": Kind((0.5, 6.0), "etcd", needs=("apart",), harmless=True),
    "kill store": Kind(None, "etcd", needs=("embedded",), harmless=True),  # its agent starts it again, empty
    "pause store": Kind((0.5, 6.0), "etcd", needs=("embedded",), harmless=True),
    "cut two hosts": Kind((0.5, 8.0), "two hosts", may_leave=True),
    "too few nodes": Kind((2.0, 8.0), "job", may_leave=True),
    "spare comes": Kind(None, "job", needs=("spare",)),  # it is not there before
    "disk full": Kind((0.5, 3.0), needs=("local",), harmless=True),
    "disk read-only": Kind((0.5, 3.0), needs=("local",), harmless=True),
    "disk slow": Kind((1.0, 5.0), needs=("local",), harmless=True),
    "clock step": Kind((1.0, 5.0), harmless=True),
    "memory pressure": Kind((0.5, 3.0), charges=1, may_leave=True, rule="oom-killed"),
    "store slow": Kind((1.0, 5.0), "store", needs=("folder",), harmless=True),
    "store full": Kind((0.5, 3.0), "store", needs=("folder",), harmless=True),
    "store read-only": Kind((0.5, 3.0), "store", needs=("folder",), harmless=True),
    # What happens meanwhile may cost a restart more: a worker cannot load.
    "store errors": Kind((1.0, 5.0), "store", charges=1, may_leave=True, needs=("s3",), harmless=True),
    "store throttling": Kind((1.0, 5.0), "store", charges=1, may_leave=True, needs=("s3",), harmless=True),
    "store away": Kind((1.0, 5.0), "store", charges=1, may_leave=True, needs=("s3",), harmless=True),
    "checkpoint corrupted": Kind(None, "store", charges=1, may_leave=True, needs=("folder",)),
}
STORES = ("folder", "s3")
ETCD_ON = ("own hosts", "agents' hosts", "job:")  # the job brings the last one
EMBEDDED = "embedded"  # nowhere: the first host has the job's store
ETCD_NEEDS = {"apart": ETCD_ON[:1], "brought": ETCD_ON[2:], "members": ETCD_ON, "embedded": (EMBEDDED,)}
ONE_OF = ("lose host", "spare comes")  # without its spare, what is left after a loss may wait for ever
Setup = tuple[int, str, str]  # how many hosts begin, where etcd is, --nnodes
# Three hosts take half as long again as two, and are needed for etcd on them.
SETUPS: tuple[Setup, ...] = (
    *((2, ETCD_ON[0], nnodes) for nnodes in ("2", "2", "1:2", "2:3")),
    *((3, where, nnodes) for where in ETCD_ON for nnodes in ("3", "2:3")),
)
EMBEDDED_SETUPS = tuple((trainers, EMBEDDED, nnodes) for trainers, where, nnodes in SETUPS if where == ETCD_ON[0])


@dataclass(frozen=True)
class Fault:
    """kind: of KINDS. target: a host or RANK_0; "" where the kind says who. It comes after_s after `step` is reached."""

    kind: str
    target: str
    step: int
    after_s: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """trainers: how many hosts begin. etcd: one of ETCD_ON, or EMBEDDED. nnodes: as for torchrun. local: whether each host has a
    local_dir. store: one of STORES, where checkpoint_dir is. steps: of the training, at least."""

    seed: int
    trainers: int
    etcd: str
    nnodes: str
    spare: bool
    standby: bool
    local: bool
    store: str
    faults: tuple[Fault, ...]
    steps: int = STEPS

    @property
    def apart(self) -> bool:
        """Whether members of etcd are on hosts of their own."""
        return self.etcd in ETCD_NEEDS["apart"]

    @property
    def brought(self) -> bool:
        """Whether the job brings its etcd: each host has a keeper."""
        return self.etcd in ETCD_NEEDS["brought"]

    @property
    def members(self) -> bool:
        return self.etcd in ETCD_NEEDS["members"]

    @property
    def embedded(self) -> bool:
        return self.etcd in ETCD_NEEDS["embedded"]

    @property
    def secret(self) -> bool:
        """Whether the traffic of the job's own store is encrypted; that of an etcd that the job brings always is."""
        return self.embedded and self.seed % 2 == 1

    @property
    def folder(self) -> bool:
        return self.store == "folder"

    @property
    def s3(self) -> bool:
        return self.store == "s3"

    @property
    def most_nodes(self) -> int:
        return int(self.nnodes.rpartition(":")[2])

    @property
    def hosts(self) -> tuple[str, ...]:
        return (*HOSTS[: self.trainers], *((SPARE,) if self.spare else ()))


def plan(seed: int, embedded: bool = False) -> Plan:
    """As many seeds in a row as there are kinds have each of them at least once. embedded: without etcd, see EMBEDDED."""
    rng = random.Random(seed)
    setups = EMBEDDED_SETUPS if embedded else SETUPS
    kinds = kinds_of(setups)
    count = rng.choices((1, 2, 3), (6, 3, 1))[0]
    chosen = _possible([kinds[seed % len(kinds)], *(rng.choice(kinds) for _ in range(count - 1))], setups)
    store = next((each for kind in chosen for each in KINDS[kind].needs if each in STORES), "") or rng.choice(STORES)
    trainers, etcd, nnodes = rng.choice([each for each in setups if _suits(each, chosen)])
    faults = sorted((_fault(kind, HOSTS[:trainers], rng, embedded) for kind in chosen), key=lambda each: each.step)
    needs = {each for kind in chosen for each in KINDS[kind].needs}
    return Plan(
        seed=seed,
        trainers=trainers,
        etcd=etcd,
        nnodes=nnodes,
        spare="spare" in needs or rng.random() < 0.15,
        standby="standby" in needs or rng.random() < 0.4,
        local="local" in needs or rng.random() < 0.4,
        store=store,
        faults=tuple(faults),
    )


def kinds_of(setups: Sequence[Setup]) -> list[str]:
    return sorted(kind for kind in KINDS if any(_suits(setup, [kind]) for setup in setups))


def _fault(kind: str, hosts: Sequence[str], rng: random.Random, embedded: bool) -> Fault:
    scope, seconds = KINDS[kind].scope, KINDS[kind].seconds
    target = ""
    if scope == "host":
        target = rng.choice(hosts[1:] if embedded and kind == "lose host" else (*hosts, RANK_0))  # the first has the store
    elif scope == "two hosts":
        target = BETWEEN.join(sorted(rng.sample(hosts, 2)))
    return Fault(kind, target, rng.randint(4, LAST_STEP), _short(rng), round(rng.uniform(*seconds), 2) if seconds else 0.0)


def _suits(setup: Setup, kinds: Sequence[str]) -> bool:
    trainers, etcd, nnodes = setup
    if "spare comes" in kinds and trainers == int(nnodes.rpartition(":")[2]):
        return False  # there would be no room for it
    return all(etcd in ETCD_NEEDS.get(need, (etcd,)) for kind in kinds for need in KINDS[kind].needs)


def _short(rng: random.Random) -> float:
    return round(rng.uniform(0, 0.4), 2)


def _possible(kinds: Sequence[str], setups: Sequence[Setup]) -> list[str]:
    """Of kinds that cannot come in one run, the first."""
    kept: list[str] = []
    for kind in kinds:
        if _together([*kept, kind], setups):
            kept.append(kind)
    return kept


def _together(kinds: Sequence[str], setups: Sequence[Setup]) -> bool:
    """One host at most is lost for good, and then the spare is there, to take its place; and the setup can have all of them."""
    stores = {need for kind in kinds for need in KINDS[kind].needs if need in STORES}
    one_of = [kind for kind in kinds if kind in ONE_OF]
    return len(one_of) <= 1 and len(stores) <= 1 and any(_suits(setup, kinds) for setup in setups)


def only(whole: Plan, positions: set[int]) -> Plan:
    """The same with fewer faults."""
    return replace(whole, faults=tuple(each for number, each in enumerate(whole.faults) if number in positions))


def fewest(count: int, fails: Callable[[set[int]], bool]) -> set[int]:
    """Positions of faults, none of which can be left out any more.

    fails: whether a run with these faults alone breaks something; it is asked once for each set.
    """
    kept = set(range(count))
    for position in range(count):
        without = kept - {position}
        if without and fails(without):
            kept = without
    return kept


def encode(value: Plan) -> dict[str, Any]:
    return asdict(value)


def decode(value: dict[str, Any]) -> Plan:
    return Plan(**{**value, "faults": tuple(Fault(**each) for each in value["faults"])})
