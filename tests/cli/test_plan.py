"""`elastic-ext plan`."""

import json
import shlex

import pytest

from elastic_ext.cli import main, plan
from tests.jobs import ROOT

JOB = ["--nodes=2048", "--mtbf-node-days=264", "--step=6s", "--state=5.67TB", "--storage=160GB/s"]


def planned(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main.main(["plan", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_for_people(capsys):
    code, out, err = planned(capsys, *JOB)
    assert (code, err) == (0, "")
    assert out.startswith("2,048 nodes, 16,384 GPUs: a failure every 3.09 h\n")
    for said in (
        "ETTR",
        "goodput",
        "lost to",
        "to disk every",
        "--nnodes=2048",
        "--max-restarts=",
        "budget_window=",
        "the greatest loss: lost steps, ",
    ):
        assert said in out
    assert max(map(len, out.splitlines())) < 140


def test_as_json(capsys):
    code, out, err = planned(capsys, *JOB, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["ettr"] + sum(found["lost"].values()) == pytest.approx(1.0)
    assert found["goodput"] == pytest.approx(found["ettr"] * 2048 / (2048 + found["spares"]))
    assert found["failures_per_day"] == pytest.approx(2048 / 264)
    assert found["settings"]["--nnodes"]["value"] == "2048"
    assert found["dominates"] in found["lost"]
    assert found["control_plane"]


def test_what_is_given_counts(capsys):
    given = {
        "--gpus-per-node=4": ("job", "gpus_per_node", 4),
        "--spares=7": ("job", "spares", 7),
        "--repair=2h": ("job", "repair_s", 7200.0),
        "--every=20min": ("job", "every_s", 1200.0),
        "--setup=1500ms": ("job", "setup_s", 1.5),
        "--connect=90": ("job", "connect_s", 90.0),
        "--storage-read=1TB/s": ("job", "read_bytes_s", 1e12),
        "--no-memory": ("job", "memory", False),
        "--replaced=50%": ("job", "replaced", 0.5),
        "--lost=0.1": ("job", "lost", 0.1),
        "--hangs=0": ("job", "hangs", 0.0),
        "--etcd-away=1h": ("job", "etcd_away_s", 3600.0),
    }
    for option, (part, name, value) in given.items():
        _, out, _ = planned(capsys, *JOB, option, "--json")
        assert json.loads(out)[part][name] == pytest.approx(value), option
    _, out, _ = planned(capsys, *JOB, "--target=97%", "--json")
    assert json.loads(out)["ettr"] >= 0.97


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--nodes=0", "--nodes: '0': expected a whole number, 1 to 1,000,000"),
        ("--nodes=9999999999", "expected a whole number"),
        ("--step=fast", "expected a number above 0 with its unit, e.g. 6s"),
        ("--step=-1s", "expected a number above 0"),
        ("--state=1.2XB", "expected a number above 0 with its unit, e.g. 1.2TB"),
        ("--storage=40", None),
        ("--storage=quick", "expected bytes per second, e.g. 40GB/s"),
        ("--storage=400Gb/s", "expected bytes per second, e.g. 40GB/s; Gb are bits"),
        ("--target=101%", "expected a share, e.g. 0.97 or 97%"),
        ("--spares=-1", "expected a whole number, 0 to"),
    ],
)
def test_wrong_values_are_refused(capsys, option, said):
    if said is None:
        assert planned(capsys, *JOB, option)[0] == 0  # plain bytes
        return
    with pytest.raises(SystemExit, match="78"):
        main.main(["plan", *JOB, option])
    assert said in capsys.readouterr().err


def test_shares_that_do_not_fit_are_refused(capsys):
    code, out, err = planned(capsys, *JOB, "--replaced=80%", "--lost=30%")
    assert (code, out) == (78, "")
    assert "expected 1 at most" in err


def test_the_commands_of_the_page(capsys):
    page = (ROOT / "elastic_ext" / "docs" / "planning.md").read_text()
    commands = [shlex.split(line)[2:] for line in page.splitlines() if line.startswith("elastic-ext plan ")]
    assert len(commands) == 2
    assert [planned(capsys, *command)[0] for command in commands] == [0, 0]


def test_times_are_shown_with_a_unit_that_suits():
    shown = {0.0005: "0.5 ms", 1.5: "1.5 s", 130.0: "2.17 min", 9000.0: "2.5 h", 900_000.0: "10.4 d"}
    assert {seconds: plan._time(seconds) for seconds in shown} == shown
