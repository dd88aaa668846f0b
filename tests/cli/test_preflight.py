"""`elastic-ext doctor --preflight`: what figures mean, and real measurements on CPUs, alone and together."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest
import torch

from elastic_ext.base.settings import Settings
from elastic_ext.cli import FAIL, OK, WARN, Finding, preflight, preflight_probe
from elastic_ext.cli.preflight import (
    BANDWIDTH,
    COPY,
    DEVICES,
    DISK,
    LATENCY,
    MATMUL,
    MEASURES,
    NODE,
    OTHERS,
    PROCESS,
    SETTINGS,
    STORAGE,
    DevicesSeen,
    Figure,
    bad_node,
    devices_missing,
    judged,
    listed_devices,
    outliers,
    tournament,
)
from tests import lossy_network
from tests.jobs import AGENT, COMES, HOSTS, TORCHRUN, Job, run, wait_gone
from tests.lossy_network import CLEAN, LossyNetwork, Way
from tests.ports import free_port
from tests.until import LIMIT_S, until

PREFLIGHT = ["-m", "elastic_ext.cli", "doctor", "--preflight", "--json"]


# What figures mean.


def device(number: int, value: float | None, kind: str = "H100", measure: str = MATMUL, **more: object) -> Figure:
    return Figure(measure, ("n1",), f"cuda:{number}", kind, value, **more)


def pair(one: str, other: str, value: float | None, measure: str = BANDWIDTH, error: str = "") -> Figure:
    return Figure(measure, (one, other), "", "", value, error)


def the_finding(figures: list[Figure]) -> Finding:
    (found,) = judged(figures)
    return found


@pytest.mark.parametrize(
    ("values", "slow"),
    [
        ([400.0], []),  # nothing to compare it with
        ([400.0, 390.0], []),
        ([400.0, 200.0], [1]),
        ([400.0, 410.0, 390.0, 300.0, 405.0], []),  # 1.3 times: within what is stated
        ([400.0, 410.0, 390.0, 250.0, 405.0], [3]),
        ([900.0, 400.0, 400.0, 400.0], []),  # a fast one harms nobody
    ],
)
@pytest.mark.parametrize("measure", [MATMUL, COPY])
def test_a_device_is_compared_with_the_others_median(values, slow, measure):
    figures = [device(number, value, measure=measure) for number, value in enumerate(values)]
    assert outliers(figures) == [figures[number] for number in slow]
    found = the_finding(figures)
    assert found.state == (FAIL if slow else OK)
    assert [f"cuda:{number}" in found.detail for number in slow] == [True] * len(slow)


def test_the_outlier_is_named_with_the_factor():
    found = the_finding([device(0, 400.0), device(1, 404.0), device(2, 100.0)])
    assert found.detail == "n1 cuda:2: 100 TFLOP/s, 4.0 times worse than the median of the 2 others, 404 (limit: 1.5 times)"
    assert "have the device examined" in found.advice
    shared = the_finding([device(0, 400.0), device(1, 100.0, blame=OTHERS)])
    assert shared.detail.endswith("(limit: 1.5 times), and other processes use it")


@pytest.mark.parametrize(
    ("figures", "states", "bad"),
    [
        ([device(0, 400.0), device(1, 100.0)], [FAIL], True),
        ([device(0, 400.0), device(1, 100.0, kind="T4")], [OK], False),  # only devices of one model are compared
        ([device(0, 400.0), device(1, 100.0, blame=OTHERS)], [WARN], False),  # shared with another process: slow, not broken
        ([device(0, 400.0), device(1, None, error="out of memory", blame=OTHERS)], [WARN], False),
        ([device(0, 400.0), device(1, None, error="the product of two matrices is wrong")], [FAIL], True),
        ([device(0, None, error="wrong"), Figure(DISK, ("n1",), "/x", "local_dir", None, "", SETTINGS)], [FAIL, FAIL], True),
        ([Figure(DISK, ("n1",), "/x", "local_dir", None, "Permission denied", SETTINGS)], [FAIL], False),
        ([Figure(DISK, ("n1",), "/x", "local_dir", None, "Input/output error")], [FAIL], True),
        ([Figure(DISK, (node,), "/x", "local_dir", rate) for node, rate in (("a", 900.0), ("b", 9.0))], [WARN], False),
    ],
)
def test_only_its_own_hardware_makes_a_node_bad(figures, states, bad):
    assert [found.state for found in judged(figures)] == states
    assert bad_node(figures) == bad


@pytest.mark.parametrize(
    ("seen", "text", "blame"),
    [
        (DevicesSeen(8, 8, 8, None), None, ""),
        (DevicesSeen(0, 0, 8, None), None, ""),  # a node that computes on its processor
        (DevicesSeen(8, 0, 8, None), None, ""),  # devices of another vendor
        (DevicesSeen(8, 8, 1, None), None, ""),
        (DevicesSeen(7, 8, 8, None), "torch can use 7, and /dev has 8", NODE),
        (DevicesSeen(7, 8, 1, None), "torch can use 7, and /dev has 8", NODE),
        (DevicesSeen(7, 7, 8, None), "torch can use 7, and the workers of this node need 8", NODE),  # gone since the last boot
        (DevicesSeen(0, 8, 8, None, "Error 802: not ready"), "torch can use none, and /dev has 8: Error 802: not ready", NODE),
        (DevicesSeen(0, 8, 8, None, "The NVIDIA driver on your system is too old"), "too old", OTHERS),  # so on every node
        (DevicesSeen(8, 8, 16, None), None, ""),  # workers share devices on purpose
        (DevicesSeen(2, 8, 4, 2), None, ""),  # workers are to share two
        (DevicesSeen(0, 8, 8, 0), None, ""),  # none are to be used
        (DevicesSeen(1, 8, 2, 2), "torch can use 1, and the variable of visible devices lists 2", NODE),
        (DevicesSeen(0, 0, 2, 2), "lists 2", OTHERS),  # nothing shows that there was one
    ],
)
def test_devices_that_are_missing_are_noticed(seen, text, blame):
    found = devices_missing(seen)
    assert (found is None) == (text is None)
    if found is not None:
        assert found[0].endswith(text)
        assert found[1] == blame


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0, 2,-1,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-9a1b"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "1"}, 1),
    ],
)
def test_devices_that_the_environment_lists(environ, count):
    assert listed_devices(environ) == count


@pytest.mark.parametrize(("latency_us", "state"), [(35.0, OK), (105.0, OK), (250.0, FAIL)])
def test_a_latency_is_an_outlier_only_if_long(latency_us, state):
    """A healthy network's varies by tens of microseconds, several times the least."""
    figures = [pair(a, b, 10.0, LATENCY) for a, b in ("ab", "ac", "bc")]
    assert the_finding([*figures, pair("a", "d", latency_us, LATENCY)]).state == state


@pytest.mark.parametrize("measure", [DISK, STORAGE])
def test_slow_storage_is_a_warning_failing_is_not(measure):
    def of(node: str, value: float | None, error: str = "") -> Figure:
        return Figure(measure, (node,), "/tmp", "TMPDIR", value, error)

    assert the_finding([of("a", 900.0), of("b", 800.0), of("c", 400.0)]).state == OK
    slow = the_finding([of("a", 900.0), of("b", 800.0), of("c", 100.0)])
    assert (slow.state, slow.detail[:3]) == (WARN, "c /")
    assert the_finding([of("a", 900.0), of("b", None, "Input/output error")]).state == FAIL


@pytest.mark.parametrize("bad", [0.5, None])
@pytest.mark.parametrize("nodes", ["abc", "abcdef"])
def test_the_node_common_to_slow_pairs_is_named(nodes, bad):
    figures = [pair(a, b, bad if "c" in (a, b) else 4.0, error="" if bad else "timed out") for a, b in combinations(nodes, 2)]
    found = the_finding(figures)
    assert found.state == FAIL
    assert found.detail.startswith(f"c is what its {len(nodes) - 1} pairs have in common; a and c: ")


def test_a_slow_link_between_two_nodes_names_neither():
    found = the_finding([pair(a, b, 0.5 if a + b == "ac" else 4.0) for a, b in combinations("abcd", 2)])
    assert found.detail.startswith("a and c: 0.5 GB/s, 8.0 times worse")
    assert "in common" not in found.detail


def test_two_nodes_cannot_tell_whose_fault_it_is():
    found = the_finding([pair("a", "b", None, error="timed out")])
    assert (found.state, found.detail) == (FAIL, "a and b: timed out")
    assert the_finding([pair("a", "b", 0.1)]).detail == "a and b: 0.1 GB/s; there is no other to compare it with"


def test_a_finding_of_many_is_one_screen():
    found = the_finding([device(number, None, error="unspecified launch failure") for number in range(50)])
    assert found.detail.endswith("n1 cuda:7: unspecified launch failure; and 42 more")


def test_each_measure_has_a_finding_in_order():
    compared = {name: measure for name, measure in MEASURES.items() if name not in (PROCESS, DEVICES)}
    figures = [Figure(name, ("a",), "x", "", 1.0) for name in reversed(compared)]
    assert [found.name for found in judged(figures)] == [measure.title for measure in compared.values()]
    assert all(measure.factor > 1 for measure in compared.values())


@pytest.mark.parametrize("players", range(10))
def test_in_a_tournament_each_pair_meets_once(players):
    rounds = tournament(players)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(combinations(range(players), 2))
    assert all(len({player for pair in pairs for player in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == (players - 1 + players % 2 if players > 1 else 0)


# Who measures what.

OF_TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "GROUP_RANK": "1"}
OF_SRUN = {
    "SLURM_JOB_ID": "1000", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_NODEID": "1",
    "MASTER_ADDR": "n1",
}  # fmt: skip
SRUN_PARTY = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": str(32000 + 1002 % 768), "NODE": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        (OF_TORCHRUN, {"NODE": "1"}),
        ({**OF_TORCHRUN, "WORLD_SIZE": "1"}, {}),
        (OF_SRUN, SRUN_PARTY),
        ({**OF_SRUN, "MASTER_ADDR": ""}, {**SRUN_PARTY, "MASTER_ADDR": ""}),  # the hosts of the step cannot be found
        ({**OF_SRUN, "SLURM_STEP_NUM_TASKS": "1"}, {}),
        ({"SLURM_JOB_ID": "1000", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, {}),  # a batch script
    ],
)
def test_who_measures_together(environ, expected):
    assert preflight.party({"PATH": "", **environ}) == expected


def test_where_is_written_to(tmp_path):
    settings = Settings(checkpoint_dir=str(tmp_path), local_dir=str(tmp_path / "not" / "yet"))
    task = preflight._task(settings, False, {})
    assert preflight_probe._there(task.disks["local_dir"]) == str(tmp_path)
    assert (task.storage, task.together) == (str(tmp_path), False)
    assert preflight._task(settings, True, {}).storage == ""
    assert preflight._task(Settings(checkpoint_dir="s3://bucket/x"), False, {"NODE": "2"}).together


@pytest.mark.parametrize(("given", "workers"), [("8", 8), ("", 0), ("x", 0)])
def test_how_many_workers_need_a_device(monkeypatch, given, workers):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    assert preflight._task(Settings(), True, {}).workers == workers


def test_an_unlistable_directory_is_still_written_to(tmp_path, monkeypatch):
    """Before, the error of the look ended the check with 1, so the node was bad. Root may look everywhere."""
    stat = os.stat

    def fails(path: object, **more: object) -> os.stat_result:
        if str(path) == str(tmp_path / "closed" / "local"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **more)

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "stat", fails)
    monkeypatch.setattr(os, "lstat", fails)
    assert preflight_probe._there(str(tmp_path / "closed" / "local")) == str(tmp_path / "closed")


@pytest.mark.parametrize(
    ("number", "blame"),
    [
        (errno.EACCES, SETTINGS),
        (errno.ENOENT, SETTINGS),
        (errno.ENOTDIR, SETTINGS),
        (errno.ENOSPC, OTHERS),
        (errno.EIO, NODE),
        (errno.EROFS, NODE),
    ],
)
def test_who_is_to_blame_for_a_disk(monkeypatch, number, blame):
    def fails(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(preflight_probe.tempfile, "TemporaryFile", fails)
    assert preflight_probe._disk_figure("n1", "local_dir", "/x").blame == blame


def test_full_disks_are_no_bad_node(monkeypatch):
    """Python looks for a place for temporary files by writing there. Before, the check ended with an error."""

    def full() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", full)
    task = preflight._task(Settings(), True, {})
    figures = [preflight_probe._disk_figure("n1", *disk) for disk in task.disks.items()]
    assert [(figure.value, figure.blame) for figure in figures] == [(None, SETTINGS)]
    assert not bad_node(figures)


@pytest.mark.parametrize(
    ("error", "blame"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB"), OTHERS),
        (RuntimeError("CUDA error: out of memory"), OTHERS),  # of a context, for which there is no room
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OTHERS),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), OTHERS),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), NODE),
    ],
)
def test_a_device_without_room_is_busy_not_broken(monkeypatch, error, blame):
    def fails(*_: object) -> float:
        raise error

    for name in ("_tflops", "_copy_gb_s"):
        monkeypatch.setattr(preflight_probe, name, fails)
    assert [figure.blame for figure in preflight_probe._device_figures("n1", "cpu", 1.0)] == [blame, blame]


def test_a_shared_device_is_measured_and_named_so():
    for shared, blame in ((True, OTHERS), (False, NODE)):
        figures = preflight_probe._device_figures("n1", "cpu", 0.01, shared)
        assert [(figure.blame, figure.value is not None) for figure in figures] == [(blame, True)] * 2


def test_a_device_without_a_model_name_is_measured():
    assert preflight_probe._model(torch.device("mtia:0")) == "mtia"


# Real measurements.


def checks(out: str) -> dict[str, tuple[str, str]]:
    """State and detail of each finding, by name."""
    return {check["name"]: (check["state"], check["detail"]) for check in json.loads(out)["checks"]}


@pytest.mark.seam
def test_a_machine_alone(tmp_path):
    """However slow it is: there is nothing to compare its device with."""
    for name in ("tmp", "checkpoints", "local"):
        (tmp_path / name).mkdir()
    conf = f"--rdzv-conf=checkpoint_dir={tmp_path}/checkpoints,local_dir={tmp_path}/local"
    done = run([sys.executable, *PREFLIGHT, conf], tmp_path, TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0, done.all
    found = checks(done.out)
    assert {name: state for name, (state, _) in found.items()} == dict.fromkeys(
        ("matrix products", "memory copy", "disk writes", "storage writes"), OK
    )
    assert all(f"{tmp_path}/{name}: " in found["disk writes"][1] for name in ("tmp", "local"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.seam
def test_characters_outside_the_locale_end_no_check(tmp_path):
    """As a health check that ended with 1, it made a node bad."""
    command = [sys.executable, "-m", "elastic_ext.cli", "doctor", "--preflight", "--rdzv-conf=größe=1"]
    done = run(command, tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 78, done.all
    assert r"gr\xf6\xdfe" in done.out


_HANGS = """
import ctypes, os, sys
from elastic_ext.cli import main, preflight

options = f"fd={os.open('/dev/fuse', os.O_RDWR)},rootmode=40000,user_id=0,group_id=0"
assert ctypes.CDLL(None).mount(b"none", b"disk", b"fuse", 0, options.encode()) == 0, "no server answers what asks for it"
preflight.ALONE_S = 5.0
sys.exit(main.main(["doctor", "--preflight", "--alone", "--json", "--rdzv-conf=local_dir=disk/local,checkpoint_dir=disk/saved"]))
"""


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="mounts a file system, as only root may")
def test_a_hanging_directory_delays_only_the_child(tmp_path):
    (tmp_path / "disk").mkdir()
    done = run(["unshare", "-m", sys.executable, "-c", _HANGS], tmp_path)
    assert done.returncode == 69, done.all
    state, detail = checks(done.out)["preflight"]
    assert (state, "no end within 5 s" in detail) == (FAIL, True)


@pytest.mark.full
def test_an_unwritable_directory_is_no_bad_node(tmp_path):
    """As health_command, this node leaves with 78 before it starts a worker. Another one starts its workers."""
    done = run([sys.executable, *PREFLIGHT, "--rdzv-conf=local_dir=/proc"], tmp_path)
    assert done.returncode == 78, done.all
    state, detail = checks(done.out)["disk writes"]
    assert state == FAIL
    assert "/proc: " in detail

    (tmp_path / "job.py").write_text("print('started')")
    for local_dir, code in (("/proc", 78), (str(tmp_path / "local"), 0)):
        conf = f"--rdzv-conf=health_command=preflight,checkpoint_dir={tmp_path}/checkpoints,local_dir={local_dir}"
        job = run([*AGENT, "--nproc-per-node=1", conf, "job.py"], tmp_path, SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="0")
        assert job.returncode == code, job.all
        assert ("started" in job.out) == (code == 0)
        assert ("  fail  disk writes" in job.err) == (code == 78), job.err
        assert "storage writes" not in job.err


@pytest.mark.full
def test_stock_torchrun_on_two_nodes(tmp_path):
    """Two agents on this machine, with two processes each: each process takes its share, rank 0 prints for all.

    No agent learns the exit code, 78 here: stock's agent whose worker fails leaves at once, and the other one, if it hosts the
    store, waits 300 s for it without a word. Of agents of one address, the one started first has rank 0.
    """
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job", "--local-addr=127.0.0.1"]
    options = [*where, "--nnodes=2", "--nproc-per-node=2", "--no-python"]
    script = ["sh", "-c", '"$@"; echo "exit code $?" >&2', "sh", sys.executable, *PREFLIGHT, "--rdzv-conf=local_dir=/proc"]
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(Job([*TORCHRUN, *options, *role, *script], tmp_path, GLOO_SOCKET_IFNAME="lo"))
            for role in (COMES, HOSTS)
        ]
        done = [job.finish() for job in jobs]
    assert "".join(each.err for each in done).count("exit code 78") == 1
    (out,) = [each.out for each in done if each.out]
    figures = [Figure.of(fields) for fields in json.loads(out)["figures"]]
    host = socket.gethostname()
    one, other = f"{host}#0", f"{host}#1"
    assert {(figure.measure, *figure.nodes) for figure in figures} == {
        *((measure, node) for measure in (MATMUL, COPY, DISK) for node in (one, other)),
        *((measure, one, other) for measure in (BANDWIDTH, LATENCY)),
    }
    assert {figure.part for figure in figures if not figure.value} == {"/proc"}, out


@pytest.mark.full
@pytest.mark.parametrize("how", ["late", "apart"])
def test_the_host_with_a_bad_link_is_named(tmp_path, how):
    """Three hosts; what the third one sends comes 60 ms late, or nothing that the second and the third send each other comes."""
    lossy_network.required()
    hosts = ["one", "two", "three"]
    with LossyNetwork(hosts) as network, ExitStack() as stack:
        if how == "late":
            network.change({"three": (Way(delay_s=0.06), CLEAN)})
        else:
            network.part(("two", "three"))
        common = {"WORLD_SIZE": "3", "MASTER_ADDR": network.addresses["one"], "MASTER_PORT": "29500"}
        jobs = [
            stack.enter_context(
                Job(
                    [*network.inside(host), sys.executable, *PREFLIGHT], tmp_path, **common,
                    RANK=str(rank), GROUP_RANK=str(rank), GLOO_SOCKET_IFNAME=lossy_network.DEVICE,
                )
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [78, 0, 0], "".join(each.all for each in done)
    assert [each.out for each in done[1:]] == ["", ""]
    found = checks(done[0].out)
    if how == "late":
        state, detail = found["latency of two nodes"]
        assert state == FAIL
        assert "#2 is what its 2 pairs have in common" in detail
    else:
        state, detail = found["all_reduce of two nodes"]
        assert state == FAIL
        assert "#1 and " in detail
        assert "in common" not in detail
        assert "#0" not in detail


@pytest.mark.full
def test_the_child_ends_with_a_killed_check(tmp_path):
    """Otherwise it would keep its memory on a device, for as long as that hangs."""
    pid = tmp_path / "pid"
    (tmp_path / "probe.py").write_text(f"import os, time; print(os.getpid(), file=open({str(pid)!r}, 'w', 1)); time.sleep(1000)")
    check = "import os; from elastic_ext.cli import preflight as it; it.PROBE = 'probe.py'; it.measure(os.environ, 1000)"
    with Job([sys.executable, "-c", check], tmp_path) as job:
        until(lambda: pid.exists() and pid.read_text().endswith("\n"), job.err)
        os.killpg(job.process.pid, signal.SIGKILL)
        assert not wait_gone([int(pid.read_text())])


@pytest.mark.full
def test_what_libraries_print_on_import_is_no_failure(tmp_path, monkeypatch):
    script = tmp_path / "probe.py"
    script.write_text("""print('loaded a plug-in'); print('7'); print('{"end": true}')""")
    monkeypatch.setattr(preflight, "PROBE", str(script))
    assert preflight.measure({}, LIMIT_S) == ([], None)


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "limit_s", "why"),
    [
        ("import time; time.sleep(1000)", 0.5, "measuring cuda:3: no end within 0.5 s"),
        ("import sys; sys.exit('no room')", LIMIT_S, "measuring cuda:3: no room"),
        ("import os; os.abort()", LIMIT_S, "measuring cuda:3: ended with code -6"),
        ("import os; os.kill(os.getpid(), 9)", LIMIT_S, "measuring cuda:3: killed, "),
    ],
)
def test_results_of_a_child_that_never_ends(tmp_path, monkeypatch, program, limit_s, why):
    script = Path(tmp_path, "probe.py")
    script.write_text(f'print(\'{{"doing": "measuring cuda:3"}}\', flush=True); {program}')
    monkeypatch.setattr(preflight, "PROBE", str(script))
    figures, failure = preflight.measure({}, limit_s)
    assert failure is not None
    assert (figures, failure.name, failure.detail[: len(why)]) == ([], "preflight", why)
    assert failure.state == (WARN if "killed" in why else FAIL)  # the kernel kills for want of memory: no fault of the node
