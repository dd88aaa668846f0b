"""entrypoints/slurm/train.sbatch, unchanged, with stubs in the place of Slurm's commands: they fail at a given call."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from tests.networks import SERVER, network
from tests.slurm.jobs import SBATCH

UNREACHABLE = "bash: connect: Network is unreachable"
REFUSED = "bash: connect: Connection refused"
LIMIT_S = 60
pytestmark = pytest.mark.seam
END = "2030-01-02T03:04:05"

QUEUE, END_TIME = "squeue --noheader --states=all", "squeue --noheader --jobs"
HOSTNAMES, SHOW, REQUEUE = "scontrol show hostnames", "scontrol --oneliner show job", "scontrol requeue"

# Each is told by the start of its command line. One command of bash for each call; the last one is for all others.
ANSWERS = {
    QUEUE: ["echo 'RUNNING n[2-3]'"],
    END_TIME: [f"echo {END}"],
    HOSTNAMES: ["printf 'n2\\nn3\\n'"],
    SHOW: ["echo 'JobId=7 JobState=RUNNING Reason=None Requeue=1 ExcNodeList=(null) '"],
    REQUEUE: ["true"],
}

# The agent's node is n2, the script's n1. "lost": n1 ends, with the script, when all that n2 does is done. "waits": for so many
# seconds srun still runs then.
SRUN = """
while [ "$1" != bash ]; do shift; done
SLURMD_NODENAME=n2 "$@"
if [ -n "$lost" ]; then kill -KILL $PPID; fi
if [ -n "$waits" ]; then exec /bin/sleep "$waits"; fi
"""


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    calls: list[str]
    state: Path


class Alone:
    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.state.mkdir()
        (self.state / "code.0.n3").write_text("0\n")  # the agent of n3 has ended before

    def in_task(self, task: str) -> None:
        """Of an array: its state is below that of the array."""
        own = self.state / task
        own.mkdir()
        self.state = (self.state / "code.0.n3").rename(own / "code.0.n3").parent

    def run(
        self, agent: str, lost: bool, probe: str = UNREACHABLE, answers: dict[str, list[str]] | None = None, **variables: str
    ) -> Ran:
        """agent: what torchrun does. lost: the node of the script is. probe: what is said of nodes that are asked for life."""
        self._stubs(agent, probe, {**ANSWERS, **(answers or {})})
        out = self.folder / "out"
        environ = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURMD_NODENAME": "n1",
            "STATE": str(self.folder / "state"),
            "PATIENCE": str(LIMIT_S),
            "lost": "yes" if lost else "",
            **variables,
        }
        with out.open("a") as file:
            done = subprocess.run(
                ["bash", SBATCH, "train.py"], env=environ, stdout=file, stderr=file, timeout=LIMIT_S, check=False
            )
        return Ran(done.returncode, out.read_text(), (self.folder / "calls").read_text().splitlines(), self.state)

    def _stubs(self, agent: str, probe: str, answers: dict[str, list[str]]) -> None:
        calls = self.folder / "calls"
        words = {start: " ".join(f'"{each}"' for each in each_call) for start, each_call in answers.items()}
        cases = "\n".join(f'"{start}"*) start="{start}" answers=({each}) ;;' for start, each in words.items())
        slurm = f"""
echo "${{0##*/}} $*" >>{calls}
answers=(true)
case "${{0##*/}} $*" in
{cases}
esac
made=$(grep -c "^$start" {calls})
eval "${{answers[made - 1]:-${{answers[-1]}}}}"
"""
        stubs = {
            **dict.fromkeys(("squeue", "scontrol", "scancel"), slurm),
            "srun": SRUN,
            "torchrun": agent,
            # n2 lives, whose agent this is.
            "timeout": f"""case "$*" in */n2/*) echo '{REFUSED}' ;; *) echo '{probe}' ;; esac; exit 1""",
            "sleep": "exec /bin/sleep 0.02",
        }
        (self.folder / "bin").mkdir()
        for name, text in stubs.items():
            stub = self.folder / "bin" / name
            stub.write_text(f"#!/bin/bash\n{text}\n")
            stub.chmod(0o755)


@pytest.fixture
def alone(tmp_path: Path) -> Alone:
    return Alone(tmp_path)


@pytest.mark.parametrize("start", [QUEUE, HOSTNAMES, SHOW, REQUEUE])
@pytest.mark.parametrize("once", ["echo 'error: Unable to contact slurm controller' >&2; false", "true"], ids=["fails", "empty"])
def test_the_last_agent_asks_again(alone: Alone, start: str, once: str) -> None:
    """The script's node is lost, so nobody else would end the job: it would stay RUNNING."""
    ran = alone.run("exit 0", lost=True, answers={start: [once, *ANSWERS[start]]})
    assert "the node of the script, n1, is lost; n2 acts in its place" in ran.out
    assert "scontrol requeue 7" in ran.calls
    assert (ran.state / "over").read_text() == "0\n"
    assert (ran.state / "unreported").exists()
    assert "gave up" not in ran.out


@pytest.mark.parametrize(
    ("said", "code"),
    [(UNREACHABLE, 0), ("bash: connect: No route to host", 0), ("bash: connect: Connection timed out", 0), (UNREACHABLE, 69)],
)
def test_the_last_agent_waits_for_slurm_to_notice(alone: Alone, said: str, code: int) -> None:
    """Of the script's node, and of another one that was lost with it: with any exit code, as it may be cut off from both."""
    (alone.state / "code.0.n3").unlink()
    listed = {QUEUE: ["echo 'RUNNING n[1-3]'", "echo 'RUNNING n[2-3]'", "echo 'RUNNING n2'"]}
    names = {HOSTNAMES: ["printf 'n1\\nn2\\nn3\\n'", "printf 'n2\\nn3\\n'", "echo n2"]}
    ran = alone.run(f"exit {code}", lost=True, probe=said, answers={**listed, **names})
    assert "n2 acts in its place" in ran.out
    assert len([each for each in ran.calls if each.startswith(HOSTNAMES)]) == 3


def test_a_requeue_does_not_wait_for_slurm(alone: Alone) -> None:
    """Slurm waits by itself, and frees the nodes that are left; n1 answered none of three looks. (With 75 the script of n1, which
    lives on here, would act as well.)
    """
    (alone.state / "code.0.n3").write_text("69\n")
    ran = alone.run("exit 69", lost=True, answers={HOSTNAMES: ["printf 'n1\\nn2\\nn3\\n'"]})
    assert "n2 acts in its place" in ran.out
    assert "train.sbatch: requeued (run 1)" in ran.out
    assert len([each for each in ran.calls if each.startswith(QUEUE)]) == 3


@pytest.mark.parametrize("names", ["n1 n2", "n2 n3"], ids=["script", "agent"])
def test_another_node_that_lives_ends_the_job(alone: Alone, names: str) -> None:
    """That of the script, or one whose agent has not ended."""
    (alone.state / "code.0.n3").unlink()
    ran = alone.run("exit 0", lost=True, probe=REFUSED, answers={HOSTNAMES: [f"printf '%s\\n' {names}"]})
    assert len([each for each in ran.calls if each.startswith(QUEUE)]) == 1
    assert ran.out == ""


def test_the_last_agent_says_that_it_gave_up(alone: Alone) -> None:
    ran = alone.run("exit 0", lost=True, answers={QUEUE: ["false"]}, PATIENCE="0")
    assert re.fullmatch(r"[\d-]+ [\d:]+ n2 train.sbatch: gave up after 0 s: Slurm does not answer\n", ran.out)


def test_the_last_agent_reports_what_slurm_misses(alone: Alone) -> None:
    ran = alone.run("exit 0", lost=True, answers={HOSTNAMES: ["printf 'n1\\nn2\\n'"]}, PATIENCE="0")
    assert ran.out.endswith(" n2 train.sbatch: gave up after 0 s: n1 does not answer, but Slurm has it in the job\n")


@pytest.mark.parametrize("code", [0, 75])
def test_the_last_agent_cancels_a_job_without_requeue(alone: Alone, code: int) -> None:
    """The exit code is lost, but not the time of all nodes until the limit."""
    (alone.state / "code.0.n3").write_text(f"{code}\n")
    shown = ANSWERS[SHOW][0].replace("Requeue=1", "Requeue=0")
    ran = alone.run(f"exit {code}", lost=True, answers={SHOW: [shown]})
    assert "nothing is left to end the job: it is cancelled" in ran.out
    assert ran.calls[-1] == "scancel 7"
    assert "scontrol requeue 7" not in ran.calls


def test_an_unnoticed_lost_node_delays_no_requeue(alone: Alone) -> None:
    """srun waits for its task until SlurmdTimeout is over; nobody trains meanwhile."""
    (alone.state / "code.0.n3").unlink()
    ran = alone.run("exit 75", lost=False, answers={QUEUE: ["echo 'COMPLETING n[2-3]'"]}, waits=str(2 * LIMIT_S))
    assert ran.code == 75
    lines = [line.partition("train.sbatch: ")[2] for line in ran.out.splitlines()]
    assert lines == ["all agents have ended but that of n3, which does not answer", "requeued (run 1)"]


@pytest.mark.parametrize(
    ("agent", "n3", "probe"),
    [("exit 75", "", REFUSED), ("exit 69", "", UNREACHABLE), ("exit 75", "75\n", UNREACHABLE)],
    ids=["it-lives", "only-left", "has-ended"],
)
def test_else_srun_ends_by_itself(alone: Alone, agent: str, n3: str, probe: str) -> None:
    """While the agent of another node may train, or where all have ended."""
    (alone.state / "code.0.n3").write_text(n3) if n3 else (alone.state / "code.0.n3").unlink()
    ran = alone.run(agent, lost=False, probe=probe, answers={QUEUE: ["echo 'COMPLETING n[2-3]'"]}, waits="2")
    assert "all agents have ended" not in ran.out
    assert "requeued (run 1)" in ran.out


@pytest.mark.parametrize("start", [END_TIME, SHOW, REQUEUE])
def test_the_script_asks_again(alone: Alone, start: str) -> None:
    (alone.state / "code.0.n3").write_text("69\n")
    names = {HOSTNAMES: ["printf 'n1\\nn2\\nn3\\n'"]}
    ends = "echo ends $SLURM_JOB_END_TIME; exit 75"
    ran = alone.run(ends, lost=False, probe=REFUSED, answers={**names, start: ["false", *ANSWERS[start]]})
    assert ran.code == 75
    assert "train.sbatch: requeued (run 1)" in ran.out
    assert f"ends {int(datetime.fromisoformat(END).timestamp())}\n" in ran.out


def test_the_script_says_why_it_gave_up(alone: Alone) -> None:
    (alone.state / "code.0.n3").write_text("69\n")
    refused = {HOSTNAMES: ["echo n1"], REQUEUE: ["echo 'Access denied' >&2; false"]}
    ran = alone.run("exit 75", lost=False, probe=REFUSED, answers=refused, PATIENCE="0")
    assert ran.code == 75
    assert "train.sbatch: gave up after 0 s: scontrol requeue 7: Access denied\n" in ran.out
    assert "Slurm refuses to requeue the job" in ran.out


EXPEDITED = ANSWERS[SHOW][0].replace("Requeue=1 ", "Requeue=1 SpreadJob=Yes ExpeditedRequeue=Yes ")
NO_REQUEUE = "scontrol update JobId=7 Requeue=0"


@pytest.mark.parametrize(
    ("shown", "code", "update"),
    [
        (EXPEDITED, 65, True),
        (EXPEDITED, 1, True),
        (EXPEDITED, 0, False),
        (EXPEDITED, 75, False),
        (EXPEDITED.replace("RUNNING", "CANCELLED"), 130, False),  # Slurm would refuse it, again and again
        (ANSWERS[SHOW][0], 65, False),
    ],
    ids=["bug", "budget", "done", "requeue", "scancel", "another-slurm"],
)
def test_an_expedited_job_that_is_over_ends(alone: Alone, shown: str, code: int, update: bool) -> None:
    """Slurm holds a job of --requeue=expedite in its queue where its script fails and no Epilog does."""
    (alone.state / "code.0.n3").write_text(f"{code}\n")
    ran = alone.run(f"exit {code}", lost=False, probe=REFUSED, answers={QUEUE: ["echo COMPLETING"], SHOW: [shown]})
    assert ran.code == code
    assert (NO_REQUEUE in ran.calls) == update
    assert ("scontrol requeue 7" in ran.calls) == (code == 75)


def test_a_verdict_left_over_ends_the_job(alone: Alone) -> None:
    """The run that only reports it, after the loss of the script's node."""
    (alone.state / "over").write_text("65\n")
    (alone.state / "unreported").touch()
    ran = alone.run("exit 0", lost=False, answers={SHOW: [EXPEDITED]})
    assert (ran.code, ran.calls[-1]) == (65, NO_REQUEUE)


OLD, NEW = "[--requeue] [--no-requeue]", "[--requeue[=expedite]] [--no-requeue]"
OFF, ON = "(null)", "enable_configless,enable_expedited_requeue"


@pytest.mark.parametrize(
    ("usage", "parameters", "printed"),
    [(NEW, ON, "--requeue=expedite"), (NEW, OFF, "--requeue"), (OLD, ON, "--requeue"), (OLD, OFF, "--requeue")],
)
def test_it_expedites_where_slurm_allows_it(tmp_path: Path, usage: str, parameters: str, printed: str) -> None:
    """Both the sbatch here and the controller, which may be of another version. In a job's environment, too."""
    said = {"sbatch": f"Usage: sbatch {usage}", "scontrol": f"SlurmctldParameters     = {parameters}"}
    for name, text in said.items():
        stub = tmp_path / name
        stub.write_text(f"#!/bin/sh\necho '{text}'\n")
        stub.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", SBATCH, "--requeue"], env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert (done.stdout, done.stderr) == (f"{printed}\n", "")


def test_a_task_of_an_array_names_itself(alone: Alone) -> None:
    """SLURM_JOB_ID of the last task is the array's: a requeue of that would be one of all tasks."""
    alone.in_task("3")
    (alone.state / "code.0.n3").write_text("69\n")
    ran = alone.run("exit 75", lost=True, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    assert "scontrol requeue 7_3" in ran.calls
    assert not [each for each in ran.calls if re.search(r"\b7(?!_3)", each)]


@pytest.mark.parametrize(("chain", "places"), [("no", "saves/3 state/3"), ("yes", "saves state/3")])
def test_tasks_of_an_array_share_no_checkpoints(alone: Alone, chain: str, places: str) -> None:
    """Unless they are one training, in a row. CHECKPOINT_DIR is for scripts, ELASTIC_EXT_CHECKPOINT_DIR for the agents."""
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "CHECKPOINT_DIR": "saves", "CHAIN": chain}
    alone.in_task("3")
    ran = alone.run('echo "in $CHECKPOINT_DIR $ELASTIC_EXT_CHECKPOINT_DIR $STATE"', lost=False, **task)
    saves, state = places.split()
    assert f"in {saves} {saves} {alone.folder}/{state}\n" in ran.out
    assert (alone.folder / state / "over").exists()


def test_a_heterogeneous_job_is_refused(alone: Alone) -> None:
    (alone.folder / "calls").touch()
    ran = alone.run("true", lost=False, SLURM_HET_SIZE="2")
    assert (ran.code, ran.calls) == (78, [])
    assert "heterogeneous" in ran.out


def test_a_host_without_a_route_is_lost() -> None:
    """Where its link has gone the router says so, or nothing: it may not answer everybody."""
    found = re.search(r"^is_lost\(\) \{.*?^\}", SBATCH.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    with network(1) as net:
        codes = {}
        for address in ("10.213.9.2", SERVER):
            command = [*net.hosts[0].inside, "bash", "-c", f"{found[0]}\nis_lost {address}"]
            codes[address] = subprocess.run(command, env=dict(os.environ), timeout=LIMIT_S, check=False).returncode
    assert codes == {"10.213.9.2": 0, SERVER: 1}
