"""Whatever others write, damage or mistype: one line of the package's own errors, no traceback, no hang, no "fine" for damage.

ELASTIC_EXT_TEST_FUZZ is the number of cases of all tests together, ELASTIC_EXT_TEST_SEED replays a run that failed.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import zipfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic_ext import Checkpointer
from elastic_ext.base import files, settings
from elastic_ext.base.errors import EX_CONFIG, ElasticExtError
from elastic_ext.checkpoints.directory import own_files as manifest
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.cli import main
from elastic_ext.failures import judgement, policy
from elastic_ext.failures import ledger as job
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence, RaisedException
from elastic_ext.rendezvous import job_status, rounds
from elastic_ext.rendezvous.round_records import Assignment, Header, Node, NodeHost, RoundReport, State, decode, encode
from elastic_ext.rendezvous.rounds import Limits, View
from tests.chaos.fuzzing import CASES, Broken, Fuzz
from tests.chaos.mutations import mutated, mutated_json, mutated_text, mutated_toml
from tests.checkpoints.choice.scenes import plant
from tests.checkpoints.formats.test_formats import save_trainer

pytestmark = pytest.mark.timeout(60 + CASES, method="thread")  # SIGALRM is the cases' own

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # of a terminal; but tab and newline


def share(part: float) -> int:
    return max(1, round(CASES * part))


def command(*args: str, codes: Sequence[int] = (0, EX_CONFIG)) -> tuple[int, str, str]:
    """Run `elastic-ext` in this process: its exit code, stdout and stderr. Raises Broken where it is not as promised."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main.main(list(args))
        except SystemExit as error:
            code = int(error.code or 0)
    if code not in codes:
        raise Broken(f"exit code {code}")
    if found := CONTROL.search(out.getvalue() + err.getvalue()):
        raise Broken(f"raw {found[0]!r} goes to the terminal")
    if code == EX_CONFIG and not err.getvalue().startswith("elastic-ext"):
        raise Broken("78 without a line that says why")
    if "Traceback" in err.getvalue():
        raise Broken("a traceback on stderr")
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    return Fuzz(request.node.name)


# Records of etcd.

NODE = Node(after=0, workers=2, role="default", address="10.0.0.1", port=4711, host=NodeHost("rack1"), report=RoundReport(1))
HEADER = Header(round=3, state=State.RUNNING, nodes=2, world=4, address="10.0.0.1", port=4711, reason="because", seal="ab")
PART = Assignment(round=3, rank=1, base_rank=2, base_role_rank=2, role_world=4, seal="ab")
EVIDENCE = Evidence(rank=3, exit_code=1, exception=RaisedException("builtins.KeyError", "'x'", ("train.py:7 step",)), step=12)
REPORT = job.Report("host1", classify(EVIDENCE), resumed_at=10, stacks="rank 1 was at train.py:7", resumed_from="/c/step_10")
LEDGER, VERDICT = judgement.judge({"n1": REPORT}, job.Ledger(), judgement.Circumstances(3), 2)
LIMITS = Limits(1, 4, 1.0)
RECORDS = {
    "round": encode(HEADER),
    "nodes/n1": encode(NODE),
    "assign/n1": encode(PART),
    "ledger": job.encode_ledger(LEDGER).encode(),
    "verdict": job.encode_verdict(VERDICT).encode(),
    "report": job.encode_report(REPORT).encode(),
}


def use_header(data: bytes) -> None:
    header = decode(Header, data, "round")
    view = View(header, {"n1": NODE}, {"n1": 1}, {"n1": 0}, frozenset(), 0.0)
    rounds.next_action(view, LIMITS, 1.0)
    shown(job_status.JobStatus("job", header, {"n1": NODE}, {"n1": PART}, LEDGER, {}))
    encode(header)


def use_node(data: bytes) -> None:
    node = decode(Node, data, "nodes/n1")
    view = View(
        HEADER,
        {"n1": node, "n2": NODE},
        {"n1": 1, "n2": 2},
        {"n1": 0, "n2": 1},
        rounds.done(3, ("n1", "n2"), {"n1": node, "n2": NODE}),
        0.0,
    )
    rounds.next_action(view, LIMITS, 1.0)
    shown(job_status.JobStatus("job", HEADER, {"n1": node}, {"n1": PART}, LEDGER, {}))


def use_part(data: bytes) -> None:
    part = decode(Assignment, data, "assign/n1")
    shown(job_status.JobStatus("job", HEADER, {"n1": NODE, "n2": NODE}, {"n1": part, "n2": PART}, LEDGER, {}))


def use_report(data: bytes) -> None:
    report = job.decode_report(data.decode(errors="replace"))
    judgement.judge({"n1": report, "n2": REPORT}, LEDGER, judgement.Circumstances(3), 3)


def use_verdict(data: bytes) -> None:
    verdict = job.decode_verdict(data.decode(errors="replace"))
    decision = verdict.for_node("n1", "design")
    if decision.action is policy.Action.STOP and decision.exit_code == 0:
        raise Broken("a verdict that stops the job with exit code 0")
    job.encode_verdict(verdict)


def use_ledger(data: bytes) -> None:
    ledger = job.decode_ledger(data.decode(errors="replace"))
    judgement.judge({"n1": REPORT}, ledger, judgement.Circumstances(3), 3)
    shown(job_status.JobStatus("job", HEADER, {"n1": NODE}, {"n1": PART}, ledger, {}))


def shown(found: job_status.JobStatus) -> None:
    text = "\n".join(job_status.lines(found))
    if control := CONTROL.search(text):
        raise Broken(f"raw {control[0]!r} goes to the terminal")


USES = {
    "round": use_header,
    "nodes/n1": use_node,
    "assign/n1": use_part,
    "report": use_report,
    "verdict": use_verdict,
    "ledger": use_ledger,
}


@pytest.mark.parametrize("key", USES)
def test_records(fuzz: Fuzz, key: str) -> None:
    """What cannot be read is refused by an error of ours, and what is read can be used."""

    def check(data: bytes) -> None:
        try:
            USES[key](data)
        except ElasticExtError:
            pass

    fuzz.run(check, [RECORDS[key], *RECORDS.values()], mutated_json, share(0.07))


def test_manifests(fuzz: Fuzz) -> None:
    """Only what says the same as the good one is good."""
    good = manifest.encode(manifest.Manifest(7, 1, (manifest.StoredFile("a.pt", 3, "00ff"),), nodes=(1, 1), extra={"a": [1]}))

    def check(data: bytes) -> None:
        try:
            manifest.decode(data)
        except ElasticExtError:
            return
        if json.loads(data) != json.loads(good):
            raise Broken("a damaged manifest is taken for whole")

    fuzz.run(check, [good], mutated_json, share(0.06))


# Settings, rules, evidence.

CONF = {
    **{"backoff": "1", "preload_exclude": "numpy a.b", "lease_ttl": "10", "metrics_port": "0"},
    **{"checkpoint_pattern": "model_{step}.pt", "exit_codes": "design", "verify": "full", "standby": "on", "node_name": "n1"},
}


def read_settings(conf: dict[str, str], environ: dict[str, str]) -> None:
    try:
        found = settings.read(conf, environ)
        settings.check_times(found, conf, 30.0)
    except ElasticExtError as error:
        if CONTROL.search(str(error)):
            raise Broken("a control character in the message") from error


def test_settings_by_option_and_variable(fuzz: Fuzz) -> None:
    def check(data: bytes) -> None:
        key, _, value = data.decode(errors="surrogateescape").partition("=")
        read_settings({key: value}, {})
        read_settings({}, {f"ELASTIC_EXT_{key.upper()}": value})

    def mutate(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
        key = rng.choice([field.name for field in fields(settings.Settings)])
        value = mutated_text(rng.choice(list(CONF.values())), rng)
        if rng.random() < 0.2:
            key = mutated_text(key, rng).partition("=")[0][:200]
        return f"{key}={value}".encode(errors="surrogateescape")

    fuzz.run(check, [b""], mutate, share(0.1))


def test_settings_by_file(fuzz: Fuzz, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    sample = "\n".join(f"{key} = {json.dumps(value)}" for key, value in CONF.items()).encode()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        read_settings({}, {"ELASTIC_EXT_CONFIG": str(path)})

    fuzz.run(check, [sample], mutated_toml, share(0.06))


CASE = {
    **{"id": "a", "rank": 1, "exit_code": 1, "signal": None, "stderr_tail": "CUDA error", "step": 3, "first_step_done": True},
    **{"exception": {"type": "builtins.KeyError", "message": "'x'", "frames": ["train.py:7 step"]}, "xids": [79], "hang": False},
    **{"oom_kills": 0, "platform": {"name": "slurm", "reason": "x"}, "history": [{"same_fingerprint": True, "progress": False}]},
}


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_evidence_files(fuzz: Fuzz, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"evidence{suffix}"
    case = json.dumps(CASE).encode()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        _, out, _ = command("explain", str(path))
        for line in out.splitlines():
            json.loads(line)

    fuzz.run(check, [case, case + b"\n" + case], mutated_json if suffix == ".json" else mutated, share(0.06))


RULES = b"""[[rule]]
name = "license server"
pattern = "license * not available"
kind = "network"
decision = "restart"

[[rule]]
name = "ours"
exit_code = 17
exception = "vendor.LicenseError"
signal = "SIGUSR1"
kind = "code"
decision = "stop"
"""


def test_rules(fuzz: Fuzz, tmp_path: Path) -> None:
    rules, case = tmp_path / "rules.toml", tmp_path / "case.json"
    case.write_text(json.dumps(CASE))

    def check(data: bytes) -> None:
        rules.write_bytes(data)
        command("explain", "--rules", str(rules), str(case))

    fuzz.run(check, [RULES], mutated_toml, share(0.06))


@pytest.mark.seam("socket-evidence", "socket-rules")
@pytest.mark.parametrize("option", [[], ["--rules"]], ids=["evidence", "rules"])
@pytest.mark.parametrize("kind", ["fifo", "socket", "directory", "endless", "loop", "NUL", "missing"])
def test_files_that_are_none(kind: str, option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WAIT_S", 0.1)
    path = tmp_path / kind
    if kind == "endless":
        path = Path("/dev/zero")
    elif kind == "NUL":
        path = tmp_path / "a\0b"
    else:
        plant(path, kind)
    case = tmp_path / "case.json"
    case.write_text(json.dumps(CASE))
    fuzz = Fuzz(kind)

    def check(_: bytes) -> None:
        command("explain", *option, str(path), *([str(case)] if option else []), codes=(EX_CONFIG,))

    fuzz.run(check, [b""], same, 1)
    if kind != "NUL":  # no variable can hold one
        fuzz.run(lambda _: read_settings({}, {"ELASTIC_EXT_CONFIG": str(path)}), [b""], same, 1)


def same(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    return data


# Directories of checkpoints.


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of each kind."""
    import torch.distributed.checkpoint as dcp

    folder = tmp_path_factory.mktemp("samples")
    torch.manual_seed(0)
    with Checkpointer(folder, model=nn.Linear(8, 8)) as checkpointer:
        checkpointer.load()
        checkpointer.save(7, wait=True)
    shutil.rmtree(folder / ".elastic_ext")
    dcp.save({"w": torch.randn(8, 8), "step": 3}, checkpoint_id=folder / "step_3", no_dist=True)
    torch.save({"model": {"w": torch.randn(8, 8)}, "step": 5}, folder / "model_5.pt")
    save_trainer(folder / "checkpoint-9", 9)
    return folder


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["step_00000007.g0001", "step_3", "model_5.pt", "checkpoint-9"])
def test_checkpoint_directories(fuzz: Fuzz, name: str, samples: Path, tmp_path: Path) -> None:
    """ls, verify and the choice, where one file of a checkpoint is damaged. Checksums find what they cover."""
    good = samples / name
    names = files_of(good) if good.is_dir() else [""]
    target = tmp_path / name

    def check(data: bytes) -> None:
        number, _, content = data.partition(b":")
        file = names[int(number or b"0") % len(names)]
        shutil.rmtree(tmp_path)
        if good.is_dir():
            shutil.copytree(good, target)
        else:
            tmp_path.mkdir()
        (target / file if file else target).write_bytes(content)
        command("checkpoints", "ls", str(tmp_path), codes=(0,))
        code, *_ = command("checkpoints", "verify", str(tmp_path), name, codes=(0, 1, EX_CONFIG))
        if code == 0 and certainly_damaged(name, file, (good / file if file else good).read_bytes(), content):
            raise Broken(f"{name}/{file} is damaged, and verify says it is sound")

    def mutate(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
        number = rng.randrange(len(names))
        content = (good / names[number] if names[number] else good).read_bytes()
        change = mutated_json if names[number].endswith(".json") else mutated
        return b"%d:%s" % (number, change(content, rng))

    fuzz.run(check, [b""], mutate, share(0.05))


def certainly_damaged(name: str, file: str, good: bytes, content: bytes) -> bool:
    """Whether a checksum covers what differs."""
    if content == good:
        return False
    if name.startswith("step_00000007"):
        try:
            return file != manifest.MANIFEST or json.loads(content) != json.loads(good)
        except (ValueError, RecursionError):
            return True
    if name.endswith(".pt"):
        return len(content) < len(good) or record_bytes(good) != record_bytes(content, like=good)
    return False


def record_bytes(data: bytes, like: bytes | None = None) -> list[bytes]:
    """Contents of a zip archive's records, at the places that `like` has them."""
    place = like or data
    found = []
    with zipfile.ZipFile(io.BytesIO(place)) as archive:
        for info in archive.infolist():
            start = info.header_offset + 30 + int.from_bytes(place[info.header_offset + 26 : info.header_offset + 28], "little")
            start += int.from_bytes(place[info.header_offset + 28 : info.header_offset + 30], "little")
            found.append(data[start : start + info.file_size])
    return found


@pytest.mark.seam("step_00000007.g0001-socket", "step_3-socket", "checkpoint-9-socket")
@pytest.mark.parametrize("kind", ["fifo", "socket", "directory", "loop", "up", "root", "dangling"])
@pytest.mark.parametrize("name", ["step_00000007.g0001", "step_3", "checkpoint-9"])
def test_odd_entries(kind: str, name: str, samples: Path, tmp_path: Path) -> None:
    """Beside checkpoints, beside a checkpoint's files, in place of one of them: none is opened or followed for ever."""
    places = ["odd", f"{name}/odd", *(f"{name}/{file}" for file in files_of(samples / name))]
    fuzz = Fuzz(f"{kind} in {name}")

    def check(place: bytes) -> None:
        folder = tmp_path / "checkpoints"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(samples / name, folder / name)
        path = folder / place.decode()
        replaced = path.exists()
        path.unlink(missing_ok=True)
        plant(path, kind)
        try:
            command("checkpoints", "ls", str(folder), codes=(0,))
            code, *_ = command("checkpoints", "verify", str(folder), name, codes=(0, 1, EX_CONFIG))
            if replaced and code == 0 and name.startswith("step_00000007"):
                raise Broken("a file is gone, and verify says it is sound")
            command("checkpoints", "cp", str(folder), name, "--to", str(tmp_path / "copy"), codes=(0, 1, EX_CONFIG))
            tiers.own_checkpoints(open_storage(str(folder)))
        finally:
            if kind == "fifo":
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # for a thread that waits there after all

    fuzz.run(check, [b""], lambda data, rng, others: places.pop().encode(), len(places))


@pytest.mark.parametrize(
    "name", ["step_\x1b[2Jx", "step_00000009\n.g0001", "\x9b31mcheckpoint-7", "\udcff\udcfe.pt", "‮gpj.pt", "a" * 250]
)
def test_odd_names(name: str, samples: Path, tmp_path: Path) -> None:
    fuzz = Fuzz("names")
    folder = tmp_path / "checkpoints"
    shutil.copytree(samples / "step_3", folder / name)
    shutil.copytree(samples / "checkpoint-9", folder / f"good-{name}"[:240])

    def check(_: bytes) -> None:
        for action in (["ls"], ["verify", "--all"], ["prune"], ["ls", "--json"]):
            command("checkpoints", action[0], str(folder), *action[1:], codes=(0, 1, EX_CONFIG))
        command("checkpoints", "cp", str(folder), name, "--to", str(tmp_path / "copy"), codes=(0, 1, EX_CONFIG))
        command("checkpoints", "pin", str(folder), name, codes=(0, EX_CONFIG))

    fuzz.run(check, [b""], same, 1)
