"""The benchmarks run and report what they promise. Their figures are not tested, because those need a quiet machine."""

import importlib
import json
import subprocess
import sys

import jobs
import measure
import pytest
import report
import restart
import restart_reliability
import trainers

from tests.benchmarks.runs import BENCHMARKS, TIMEOUT_S, result
from tests.chaos.seeded.surroundings import unavailable
from tests.jobs import ROOT
from tests.programs import needs, required


def test_the_page_of_results_is_up_to_date():
    assert report.PAGE.read_text() == report.page(), "run benchmarks/report.py --page"
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}
    assert scripts - {"report", "plots", "entry_point"} == {each.script for each in report.BENCHMARKS}
    files = set(measure.RESULTS.rglob("*.json"))
    assert files <= {each.result for each in report.BENCHMARKS}
    paths = [path for each in report.BENCHMARKS for path in each.measures]
    assert [path for path in paths if not (ROOT / path).is_dir()] == []


@pytest.mark.seam
def test_a_result_is_old_once_code_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "REPOSITORY", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    code = tmp_path / "code" / "one.py"
    code.parent.mkdir()

    def commit(text: str) -> None:
        code.write_text(text)
        subprocess.run([*git, "add", "code"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", text], check=True)

    subprocess.run([*git, "init", "-q"], check=True)
    commit("first")
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    benchmark = report.Benchmark("one", ("code",))
    assert report.is_old(benchmark)  # never measured
    benchmark.result.parent.mkdir()
    benchmark.result.write_text(json.dumps({"measured": {"date": "2026-11-27", "commit": head}}))
    assert not report.is_old(benchmark)
    commit("second")
    assert report.is_old(benchmark)
    benchmark.result.write_text(json.dumps({"measured": {"date": "2026-11-27", "commit": "0" * 40}}))
    assert report.is_old(benchmark)  # a commit that is not in this clone


@pytest.mark.full
def test_restart_reliability(tmp_path):
    record = result("restart_reliability.py", tmp_path, "--tries=1", "--stock-tries=0", "--timeout=100")
    assert record["ours"] == {"clean": 1, "burned": 0, "hung": 0, "failed": 0, "tries": 1}
    assert record["stock"] == {"clean": 0, "burned": 0, "hung": 0, "failed": 0, "tries": 0}


@pytest.mark.full
def test_verdict(tmp_path):
    record = result("verdict.py", tmp_path, "--repeat=1")
    assert record["sides"]["ours"]["codes"] == ["65"]
    assert record["sides"]["ours"]["verdict_s"] > 0
    assert record["sides"]["stock"]["codes"] == ["1"]


@pytest.mark.full
def test_compressed(tmp_path):
    record = result("compressed.py", tmp_path, "--failures=2", "--calibrate=1", "--gap=2")
    assert record["restarts"] == [2, 2]
    assert record["same_decisions"] == record["decisions"][0] == record["decisions"][1]
    assert all(0 < ettr < 1 for ettr in record["ettr"])


@pytest.mark.full
def test_own_etcd(tmp_path):
    needs("ip")
    record = result("own_etcd.py", tmp_path, "--repeat=1")
    assert record["failed"] == 0
    assert [sides["own"] > 0 for sides in record["rows"].values()] == [True, True]


@pytest.mark.parametrize(
    ("returncode", "attempts", "expected"),
    [
        (0, {0, 1}, "clean"),
        (0, {0, 1, 2}, "burned"),
        (None, {0, 1}, "hung"),
        (1, {0, 1, 2, 3}, "failed"),
        (0, {0}, "failed"),
        (1, set(), "failed"),
    ],
)
def test_what_a_try_counts_as(returncode, attempts, expected):
    assert restart_reliability.verdict(returncode, attempts) == expected


@pytest.mark.full
def test_restart(tmp_path):
    record = result("restart.py", tmp_path, "--repeat=1", "--rows=sigkill")
    [row] = record["rows"]
    assert row["row"] == "sigkill"
    for agent in ("warm", "ours", "stock"):
        side = row[agent]
        assert side["lost"] == 0
        assert tuple(side["phases_s"]) == restart.PHASES
        assert min(side["phases_s"].values()) >= 0
        assert sum(side["phases_s"].values()) == pytest.approx(side["median_s"], abs=0.01)
        assert side["all_s"] == [side["median_s"]]
    assert row["ratio"] == pytest.approx(row["stock"]["median_s"] / row["ours"]["median_s"], rel=0.01)


def test_no_label_in_the_restart_plot_covers_another():
    """Drawn from the stored figures, as `--draw` does."""
    figure = pytest.importorskip("matplotlib.figure").Figure(layout="constrained")
    restart.draw(figure, json.loads((BENCHMARKS / "results" / "restart.json").read_text())["rows"])
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in (*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels())]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert len(boxes) > 3 * len(restart.ROWS)  # a name and two figures for each row, and the axis
    assert not [(a, b) for at, a in enumerate(boxes) for b in boxes[at + 1 :] if a.overlaps(b)]


def test_a_recovery_ends_with_the_last_rank_up():
    def stamps(attempt, rank, *ns):
        return [jobs.Stamp(attempt, rank, event, at) for event, at in zip(restart.EVENTS, ns, strict=False)]

    burned = stamps(1, 0, 10, 20, 30, 40, 50) + stamps(1, 1, 10, 20, 30)
    one = stamps(2, 0, 10**9, 2 * 10**9, 4 * 10**9, 5 * 10**9, 7 * 10**9)
    good = one + stamps(2, 1, 10**9, 3 * 10**9, 3 * 10**9, 6 * 10**9, 6 * 10**9)
    fault = jobs.Stamp(0, 1, "fault", 0)
    found = restart.recovery([fault, *burned, *good])
    assert found == restart.Recovery(2, {"agent": 1.0, "interpreter": 2.0, "torch": 1.0, "collective": 2.0, "steps": 1.0})
    assert restart.recovery([fault, *burned]) is None
    assert restart.recovery(good) is None


@pytest.mark.seam
def test_entry_point(tmp_path):
    record = result("entry_point.py", tmp_path, "--repeat=1", "--torchrun-repeat=0", "--promise-ms=600000")
    assert "elastic_ext.agent.plugin" in record["modules"]
    assert record["imports_torch"] is False
    assert 0 < record["median_s"] <= record["max_s"]
    assert record["kept"] is True


@pytest.mark.seam
def test_entry_point_says_when_the_promise_is_broken(tmp_path):
    assert result("entry_point.py", tmp_path, "--repeat=1", "--torchrun-repeat=0", "--promise-ms=0")["kept"] is False


@pytest.mark.full
def test_code_bug_waste(tmp_path):
    record = result("code_bug_waste.py", tmp_path, "--faults=name", "--max-restarts=1")
    ours, stock = (record["rows"]["name"][agent] for agent in ("ours", "stock"))
    assert (ours["returncode"], ours["restarts"]) == (65, 0)
    assert (stock["returncode"], stock["restarts"]) == (1, 1)


@pytest.mark.full
def test_checkpoints(tmp_path):
    record = result("checkpoints.py", tmp_path, "--count=30", "--megabytes=16", "--repeat=1", "--rows=choose")
    assert record["rows"]["choose"].keys() == {"elastic_ext", "torch.save", "Hugging Face"}
    import checkpoints

    assert record["kept"] is checkpoints.kept(record["rows"], 30)
    assert checkpoints.kept({"choose": {"a": {"median_s": 0.9}}, "verify": {"verify_by_read": 1.0}}, 10_000) is True
    assert checkpoints.kept({"verify": {"verify_by_read": 1.31}}, 0) is False
    assert checkpoints.kept({"choose": {"a": {"median_s": 1.1}}}, 10_000) is False


@pytest.mark.full
def test_checkpoint_stall(tmp_path):
    record = result("checkpoint_stall.py", tmp_path, "--mb=8", "--upload-mb=8", "--saves=2")
    assert all(seconds > 0 for name in ("dcp.async_save", "elastic_ext") for seconds in record[name].values())
    assert record["overlap"].keys() == {"disk", "S3"}


@pytest.mark.full
@pytest.mark.timeout(450)
def test_trainers(tmp_path):
    required(not (why := unavailable("disk slow")), why)
    record = result("trainers.py", tmp_path, "--trainers=dcp_async", "--mb=6", "--steps=30", "--every=8")
    row = record["rows"]["dcp_async"]
    assert row["same_every_time"]
    assert [len(row[way]["all_ms"]) for way in ("disk", "local")] == [3, 3]
    for victim in trainers.VICTIMS:
        assert row[victim]["equal"] == 1
        [lost], [since] = row[victim]["lost_steps"], row[victim]["since_save"]
        assert lost in (since, since + 8), "the last save, or the one before it: it may still have been written"
        assert row[victim]["next_step_s"] > 0


def test_a_stall_is_what_a_save_adds():
    """Steps of 0.1 s, and saves after every 5th that take 0.3 and 0.5 s."""
    steps, at = [], 0.0
    for step in range(1, 12):
        steps.append((step, at))
        at += 0.1 + {5: 0.3, 10: 0.5}.get(step, 0)
    assert trainers.stalls(steps, 5) == pytest.approx([0.3, 0.5])
    assert trainers.stalls(steps[:5], 5) == []


def test_steps_after_the_last_save_are_lost():
    """Step 9 had begun when the job was killed, and the new start went on after the save at step 5."""
    notes = trainers.Notes()
    for attempt, numbers, since in ((0, range(1, 10), 0), (1, range(6, 12), 100)):
        for step in numbers:
            for rank in (0, 1):
                notes.add(f"step {attempt} {rank} {step} {(since + step) * 10**9}")
    assert trainers.lost(trainers.Ran(notes, 9.5, 0.0), 5) == (3, 3, 99.5)


@pytest.mark.full
def test_save_record(tmp_path):
    record = result("save_record.py", tmp_path, "--repeat=1", "--steps=20", "--files=10", "--seconds=1")
    assert record["us_per_event"] < 20
    assert all(record[f"{name}_{side}"] > 0 for name in ("steps_per_s", "save_s", "start_ms") for side in ("without", "with"))


MEMORY_TIER = ("--mb=8", "--nodes=2", "--repeat=1", "--steps=20", "--step-ms=5")


@pytest.mark.full
@pytest.mark.timeout(450)
@pytest.mark.xdist_group("memory_tier")
def test_memory_tier(tmp_path):
    record = result("memory_tier.py", tmp_path, *MEMORY_TIER, "--parts=cost,rates", "--ways=async")
    assert {row["way"]: row["throughput"] for row in record["cost"]}["no saves"] == 1.0
    ways = ("copy", "out", "back", "socket", "peer")
    assert [way for way in ways if record["rates"][0][f"{way}_gb_s"] is None] == []  # a share of a slow one is rounded to 0


@pytest.mark.full
@pytest.mark.timeout(450)
@pytest.mark.xdist_group("memory_tier")
@pytest.mark.parametrize("fault", ["worker", "node"])
def test_memory_tier_after_a_failure(tmp_path, fault):
    (row,) = result("memory_tier.py", tmp_path, *MEMORY_TIER, "--parts=failure", f"--faults={fault}")["failure"]
    assert row["fault"] == fault
    assert row["memory_s"] > 0
    assert row["disk_s"] > 0


@pytest.mark.full
def test_classification(tmp_path):
    record = result("classification.py", tmp_path, "--repeat=1", "--promise-ms=600000")
    assert len(record["rows"]) == 10
    assert all(0 < row["median_ms"] <= row["max_ms"] for row in record["rows"].values())


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_each_finds_what_it_takes_from_the_others(name):
    importlib.import_module(name)


@pytest.mark.full
def test_scrape_load():
    """The kind of run that needs all parts. What a storm does to the agent's own server: see http/test_server_load.py."""
    command = (
        "import sys; sys.path.insert(0, sys.argv[1]); import scrape_load\n"
        "scrape_load.STORM_SPARE_S = scrape_load.DROPPED_S = 200.0\n"  # for a busy machine,
        "scrape_load.EVERY = scrape_load.WARM_UP = 1\n"  # which has to print a rate meanwhile
        "print(scrape_load.one_run('control', 5.0))"
    )
    import scrape_load

    done = subprocess.run(
        [sys.executable, "-c", command, str(BENCHMARKS)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = eval(done.stdout.splitlines()[-1], {"Run": scrape_load.Run})
    assert seen.tokens_s > 0
    assert seen.storm["seconds"] > 5
    assert max(seen.leaked) <= 0


@pytest.mark.full
def test_overhead(tmp_path):
    import overhead

    runs = "overhead.WARM_UP_S = 1.0; print(overhead.measured(2, 2.0))"
    command = f"import sys; sys.path.insert(0, sys.argv[1]); import overhead; {runs}"
    done = subprocess.run(
        [sys.executable, "-c", command, str(BENCHMARKS)], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    [block], used = eval(done.stdout.splitlines()[-1], {"Turns": overhead.Turns, "Use": overhead.Use})
    assert block.seconds["ours"] >= 2 * 2.0 * overhead.OURS
    assert all(used[side].steps_s > 0 and used[side].step_cpu_ms > 0 for side in overhead.SIDES)
    assert 0 <= used["ours"].agent_cpu < 2
    assert used["stock"].standby_mb is None


def test_a_slower_machine_time_counts_for_all_jobs():
    import overhead

    seconds = {"ours": 4.0, "stock": 1.0}
    blocks = [overhead.Turns({"ours": 396 * pace, "stock": 100 * pace}, seconds) for pace in (1, 2, 1)]
    assert overhead.mean_of(overhead.ratios_to("stock", blocks)) == pytest.approx((0.99, 0.0))
    assert overhead.mean_of([0.99])[1] is None
