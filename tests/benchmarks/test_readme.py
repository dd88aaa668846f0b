"""benchmarks/README.md names every script and the machines of the results."""

import json
import re
from pathlib import Path

import pytest

from tests.benchmarks.runs import BENCHMARKS

RESULTS = BENCHMARKS / "results"
README = (BENCHMARKS / "README.md").read_text()
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL))
SCRIPTS = sorted(path for path in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__":' in path.read_text())
PUBLISHED = sorted(path.relative_to(RESULTS).with_suffix("").as_posix() for path in RESULTS.rglob("*.json"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_a_section_with_valid_commands(script: Path):
    section = SECTIONS[script.name]
    assert f"python benchmarks/{script.name}" in section
    row = next(line for line in README.splitlines() if line.startswith(f"| [{script.name}]"))
    options = set(re.findall(r"--[\w-]+", row + section.partition(f"python benchmarks/{script.name}")[2].partition("\n")[0]))
    assert options
    assert not [option for option in options if f'"{option}"' not in script.read_text()]


def test_no_section_is_about_a_missing_script():
    assert SECTIONS.keys() == {script.name for script in SCRIPTS}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_machine_class_matches_the_published_result(name):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    machine = record.get("machine", record)  # an old result has it at the top
    device = record.get("device", "cpu")
    which = "no GPU" if device == "cpu" else device.replace("1 x ", "an ")
    assert f"with {machine['cores']} cores and {which}, Python {machine['python']}, torch {machine['torch']}." in README
