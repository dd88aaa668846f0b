"""Runs a benchmark as a user does."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.jobs import ROOT

BENCHMARKS = ROOT / "benchmarks"
TIMEOUT_S = 400


def result(script: str, results: Path, *options: str, code: int | None = None, env: Mapping[str, str] | None = None) -> dict:
    """Run a benchmark and return its JSON line, which must be the last line of its output and the file that it left.

    code: that it must end with; by default 0, or 1 where its record says that a promise was not kept.
    """
    command = [sys.executable, str(BENCHMARKS / script), "--results", str(results), *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert done.stdout, done.stderr
    line = done.stdout.splitlines()[-1]
    record = json.loads(line)
    expected = int(not record.get("kept", True)) if code is None else code
    assert done.returncode == expected, done.stdout + done.stderr
    name = record["benchmark"]
    assert (results / f"{name}.json").read_text() == line + "\n"
    assert (results / f"{name}.md").read_text().strip() in done.stdout
    draws = name != "entry_point" and importlib.util.find_spec("matplotlib") is not None
    assert (results / f"{name}.png").exists() == draws
    assert {"cores", "load_1m", "python", "torch"} == record["machine"].keys()
    return record
