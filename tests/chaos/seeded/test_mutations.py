"""Each check fails on a real run: of a copy of elastic_ext in which one thing is wrong, as mutations/NAME.patch has it.

Where a second guard would hide the mistake, the patch takes both away:

    checksums_not_compared    agents compare them before they choose a checkpoint, workers before they load it; what is pickled
                              then cannot be read, which costs a restart more
    run_dir_stays             the agent and the reaper remove it
    orphans_stay              the reaper ends the workers of an agent that was killed; the others find their successor's marker

After a change of a patched line: make the change by hand, `git diff -U1 elastic_ext`, and take it back.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from tests import lossy_network
from tests.chaos.seeded import checks, schedule
from tests.chaos.seeded.__main__ import ALONE_STEPS, undisturbed
from tests.chaos.seeded.run import PATIENT, Limits
from tests.chaos.seeded.schedule import LEASE_S, RANK_0, Fault, Plan
from tests.jobs import ROOT, ended
from tests.programs import needs

PATCHES = Path(__file__).with_name("mutations")
STUCK_S = 60.0  # of what is stuck for good
TIMEOUT_S = 1200


def two_hosts(*faults: Fault, nnodes: str = "2", standby: bool = False, local: bool = False) -> Plan:
    return Plan(
        seed=0,
        trainers=2,
        etcd="own hosts",
        nnodes=nnodes,
        spare=False,
        standby=standby,
        local=local,
        store="folder",
        faults=faults,
    )


def fault(kind: str, target: str = "b", step: int = 22, seconds: float = 0.0) -> Fault:
    return Fault(kind, target, step, 0.0, seconds)


KILLED = two_hosts(fault("kill worker"))
# A node may look only after the one of rank 0 has chosen, and all is well.
KILLED_AGAIN = two_hosts(*(fault("kill worker", step=step) for step in (12, 24, 36, 48)), standby=True)
AGENT_KILLED = two_hosts(fault("kill agent"))
# Another host is ready to go on, and does so while what is left of the first one still trains.
ORPHAN = replace(two_hosts(fault("kill agent", RANK_0, step=8), nnodes="1", standby=True), steps=600)
# What is left of the first one goes on when the other host has made all its steps, and has most of its own to make at the end.
PAUSED_ORPHAN = replace(ORPHAN, faults=(fault("pause worker", RANK_0, step=8, seconds=50.0), *ORPHAN.faults))
ETCD_KILLED = two_hosts(fault("kill etcd", "", step=5, seconds=2 * LEASE_S))
KEEPER_KILLED = replace(two_hosts(fault("kill keeper"), nnodes="3"), trainers=3, etcd="job:")
HOST_LOST = two_hosts(fault("lose host"), nnodes="1:2", standby=True)


@dataclass(frozen=True)
class Mutation:
    """reports: each check that must find it, with a part of its message. patch: a file in mutations/, without its suffix.

    limits: for a run that would not end. tries: of a mistake that shows itself by chance only.
    """

    patch: str
    reports: dict[str, str]
    plan: Plan
    limits: Limits = PATIENT
    tries: int = 1

    def unseen(self, problems: Sequence[str]) -> dict[str, str]:
        """What of `reports` these do not tell."""
        found = [problem.partition(": ") for problem in problems]
        return {
            check: part for check, part in self.reports.items() if not any(check == by and part in told for by, _, told in found)
        }


MUTATIONS = [
    Mutation("local_ranks", {"one world each round": "more than one worker has the same rank"}, two_hosts(), Limits(restarts=0)),
    Mutation(
        "restart_count_of_charges",
        {"one world each round": "two groups trained as restart 0", "restarts count up": "[(1, 0), (1, 0)]"},
        AGENT_KILLED,
    ),
    Mutation("choice_outlives_round", {"one start": "chose different checkpoints"}, KILLED_AGAIN, Limits(STUCK_S), tries=3),
    Mutation("state_not_copied", {"same to the bit": "loaded: not the state of step"}, KILLED),
    Mutation(
        "checksums_not_compared",
        {"budget and verdict": "restarts were charged, 1 expected at most"},
        two_hosts(fault("checkpoint corrupted", "")),
    ),
    Mutation("oldest_first", {"not behind": "was whole"}, KILLED),
    Mutation("orphans_stay", {"one group at a time": "had begun", "no late commit": "after generation"}, ORPHAN, tries=2),
    Mutation("orphans_stay", {"nothing left": "left behind"}, PAUSED_ORPHAN, Limits(gone_s=0.0)),
    Mutation("lost_node_charged", {"budget and verdict": "1 restarts were charged, 0 expected at most"}, AGENT_KILLED),
    Mutation("charge_forgotten", {"budget and verdict": "no restart was charged after kill worker"}, KILLED),
    Mutation("kill_rule_forgotten", {"alone": "no verdict by the rule killed"}, KILLED),
    Mutation("lease_not_kept", {"leaders": "the leader changed too often"}, two_hosts(), Limits(STUCK_S, restarts=1)),
    Mutation("fence_closes_in_outage", {"alone": "a further round began"}, ETCD_KILLED, Limits(restarts=1)),
    Mutation("spare_fails", {"leavings": "left with 1"}, two_hosts(nnodes="1")),
    Mutation(
        "requeue_code_forgotten",
        {"ends": "at the end the agent of host b left with"},
        two_hosts(fault("terminate agent"), nnodes="1:2"),
    ),
    Mutation("waits_for_all_nodes", {"ends": "stuck: nothing for"}, HOST_LOST, Limits(STUCK_S)),
    Mutation(
        "never_grows",
        {"ends": "long after all was healed ['a'] trained"},
        two_hosts(fault("kill agent"), nnodes="1:2"),
        Limits(again_s=STUCK_S),
    ),
    Mutation("keeper_not_waited_for", {"nothing left": "nobody waited for"}, KEEPER_KILLED),
    Mutation("run_dir_stays", {"nothing left": "left in shared memory"}, two_hosts()),
]


def test_each_check_has_a_mutation_that_it_reports_and_each_patch_a_row() -> None:
    assert {check for each in MUTATIONS for check in each.reports} == checks.CHECKS.keys()
    assert {each.patch for each in MUTATIONS} == {path.stem for path in PATCHES.glob("*.patch")}


def test_a_report_counts_only_by_the_right_check_and_with_the_right_words() -> None:
    mutation = Mutation("", {"ends": "long after"}, KILLED)
    assert not mutation.unseen(["leavings: left with 1", "ends: long after all was healed"])
    assert mutation.unseen(["ends: stuck: nothing for 20 s", "leavings: long after"]) == mutation.reports


@pytest.mark.seam
@pytest.mark.parametrize("name", sorted({each.patch for each in MUTATIONS}))
def test_a_patch_applies_to_what_is_here(name: str) -> None:
    apply(name, ROOT, "--check")


def apply(name: str, root: Path, *options: str) -> None:
    needs("git")
    path = PATCHES / f"{name}.patch"
    done = subprocess.run(["git", "apply", "-p1", *options, str(path)], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{path.name} does not apply any more; make it anew, see {__file__}:\n{done.stderr}"
    names = {line[6:] for line in path.read_text().splitlines() if line.startswith("+++ b/")}
    assert all(each.startswith("elastic_ext/") for each in names), names


@pytest.mark.full
@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: f"{each.patch}-{'-'.join(each.reports)}".replace(" ", "_"))
def test_a_mutation_is_reported(mutation: Mutation, folder: Path) -> None:
    copy = copied(folder, mutation.patch)
    for _ in range(mutation.tries):
        problems = run(mutation.plan, copy, folder, mutation.limits)
        if not mutation.unseen(problems):
            return
    pytest.fail(f"the last of {mutation.tries} runs reported {problems}, expected too: {mutation.unseen(problems)}")


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("plan", [HOST_LOST, ORPHAN], ids=["host_lost", "orphan"])
def test_a_copy_without_a_mutation_passes(plan: Plan, folder: Path) -> None:
    assert run(plan, copied(folder), folder) == []


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the end of `undisturbed`: one for all runs."""
    folder = tmp_path_factory.mktemp("alone")
    undisturbed(folder, ALONE_STEPS)
    return folder


@pytest.fixture
def folder(tmp_path: Path, alone: Path) -> Path:
    return shutil.copytree(alone, tmp_path, dirs_exist_ok=True)


def copied(folder: Path, patch: str | None = None) -> Path:
    """A directory with a copy of elastic_ext, without anything compiled."""
    copy = folder / "copy"
    shutil.copytree(ROOT / "elastic_ext", copy / "elastic_ext", ignore=shutil.ignore_patterns("__pycache__"))
    if patch is not None:
        apply(patch, copy)
    return copy


def run(plan: Plan, copy: Path, folder: Path, limits: Limits = PATIENT) -> list[str]:
    """What does not hold in a run of the copy; the suite itself uses what is here."""
    lossy_network.required()
    (folder / "plan.json").write_text(json.dumps(schedule.encode(plan)))
    command = [sys.executable, "-m", "tests.chaos.seeded", f"--plan={folder / 'plan.json'}", f"--folder={folder}"]
    env = {**{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}, "PYTHONPATH": str(copy)}
    command += [f"--{name.replace('_', '-')}={value}" for name, value in asdict(limits).items()]
    done = ended(command, TIMEOUT_S, env)
    problems = folder / "plan" / "problems.json"
    assert problems.exists(), f"the suite left with {done.returncode}: {done.err}"
    for imported in ("agent/__pycache__/supervisor.*", "checkpoints/writing/__pycache__/checkpointer.*"):
        assert list((copy / "elastic_ext").glob(imported)), f"nothing of {imported}: agents and workers did not use the copy"
    return list(json.loads(problems.read_text()))
