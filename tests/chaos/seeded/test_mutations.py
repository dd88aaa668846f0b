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
from dataclasses import dataclass, replace
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
STUCK_S = 20.0  # of what is stuck for good
TIMEOUT_S = 240


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
ETCD_KILLED = two_hosts(fault("kill etcd", "", step=5, seconds=2 * LEASE_S))
HOST_LOST = two_hosts(fault("lose host"), nnodes="1:2", standby=True)


@dataclass(frozen=True)
class Mutation:
    """checks: that must report it. patch: a file in mutations/, without its suffix. limits: for a run that would not end.

    tries: of a mistake that shows itself by chance only.
    """

    patch: str
    checks: tuple[str, ...]
    plan: Plan
    limits: Limits = PATIENT
    tries: int = 1


MUTATIONS = [
    Mutation("local_ranks", ("one world each round",), two_hosts(), Limits(restarts=0)),
    Mutation("restart_count_of_charges", ("one world each round", "restarts count up"), AGENT_KILLED),
    Mutation("choice_outlives_round", ("one start",), KILLED_AGAIN, Limits(STUCK_S), tries=3),
    Mutation("state_not_copied", ("same to the bit",), KILLED),
    Mutation("checksums_not_compared", ("budget and verdict",), two_hosts(fault("checkpoint corrupted", ""))),
    Mutation("oldest_first", ("not behind",), KILLED),
    Mutation("orphans_stay", ("one group at a time", "no late commit"), ORPHAN, tries=2),
    Mutation("lost_node_charged", ("budget and verdict",), AGENT_KILLED),
    Mutation("charge_forgotten", ("budget and verdict",), KILLED),
    Mutation("lease_not_kept", ("leaders",), two_hosts(), Limits(STUCK_S, restarts=1)),
    Mutation("fence_closes_in_outage", ("alone",), ETCD_KILLED, Limits(restarts=1)),
    Mutation("spare_fails", ("leavings",), two_hosts(nnodes="1")),
    Mutation("requeue_code_forgotten", ("ends",), two_hosts(fault("terminate agent"), nnodes="1:2")),
    Mutation("waits_for_all_nodes", ("ends",), HOST_LOST, Limits(STUCK_S)),
    Mutation("run_dir_stays", ("nothing left",), two_hosts()),
]


def test_each_check_has_a_mutation_that_it_reports_and_each_patch_a_row() -> None:
    assert {check for each in MUTATIONS for check in each.checks} == checks.CHECKS.keys()
    assert {each.patch for each in MUTATIONS} == {path.stem for path in PATCHES.glob("*.patch")}


@pytest.mark.parametrize("name", [each.patch for each in MUTATIONS])
def test_a_patch_applies_to_what_is_here(name: str) -> None:
    apply(name, ROOT, "--check")


def apply(name: str, root: Path, *options: str) -> None:
    needs("git")
    path = PATCHES / f"{name}.patch"
    done = subprocess.run(["git", "apply", "-p1", *options, str(path)], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{path.name} does not apply any more; make it anew, see {__file__}:\n{done.stderr}"
    names = {line[6:] for line in path.read_text().splitlines() if line.startswith("+++ b/")}
    assert all(each.startswith("elastic_ext/") for each in names), names


@pytest.mark.long
@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.patch)
def test_a_mutation_is_reported(mutation: Mutation, folder: Path) -> None:
    copy = copied(folder, mutation.patch)
    for _ in range(mutation.tries):
        problems = run(mutation.plan, copy, folder, mutation.limits)
        if {*mutation.checks} <= {each.partition(":")[0] for each in problems}:
            return
    pytest.fail(f"the last of {mutation.tries} runs: {problems}")


@pytest.mark.long
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
    command += [f"--stuck-s={limits.stuck_s}", f"--restarts={limits.restarts}"]
    done = ended(command, TIMEOUT_S, env)
    problems = folder / "plan" / "problems.json"
    assert problems.exists(), f"the suite left with {done.returncode}: {done.err}"
    for imported in ("agent/__pycache__/supervisor.*", "checkpoints/writing/__pycache__/checkpointer.*"):
        assert list((copy / "elastic_ext").glob(imported)), f"nothing of {imported}: agents and workers did not use the copy"
    return list(json.loads(problems.read_text()))
