"""What a public project has beside its code: the workflow, issue forms, and how to cite it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import yaml

import elastic_ext
from elastic_ext.base import settings
from tests import prose
from tests.jobs import ROOT

GITHUB = ROOT / ".github"
PROJECT = (ROOT / "pyproject.toml").read_text()


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def project(name: str) -> str:
    found = re.search(rf'(?m)^{name} = "(.*)"$', PROJECT)
    assert found is not None
    return found[1]


def test_the_workflow_runs_what_ci_runs():
    steps = read(".github/workflows/ci.yml")["jobs"]["test"]["steps"]
    (checkout,) = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert checkout["with"]["fetch-depth"] == 0, "the quarter of the long tests follows from the number of commits"
    assert [step["run"] for step in steps if ".ci/run" in step.get("run", "")] == [".ci/run"]
    assert (ROOT / ".ci" / "run").is_file()


def test_the_workflows_matrix_is_what_the_suite_takes():
    (run,) = [
        step["run"] for step in read(".github/workflows/ci.yml")["jobs"]["matrix"]["steps"] if "matrix" in step.get("run", "")
    ]
    assert run.startswith("make matrix PAIRS=")
    pairs = read(".github/workflows/ci.yml")["jobs"]["matrix"]["strategy"]["matrix"]["pair"]
    assert all(re.fullmatch(r"(newest|2\.\d+):3\.\d+", pair) for pair in pairs)


def test_the_workflow_builds_the_site():
    steps = [step["run"] for step in read(".github/workflows/ci.yml")["jobs"]["site"]["steps"] if "run" in step]
    (mkdocs,) = re.findall(r'"(mkdocs[^"]*)"', PROJECT)
    assert steps[:2] == [f"pip install '{mkdocs}' mike", "mkdocs build"]
    assert read("mkdocs.yml")["strict"] is True


@pytest.mark.parametrize("form", ["bug", "idea"])
def test_issue_forms_are_whole(form: str):
    found = read(f".github/ISSUE_TEMPLATE/{form}.yml")
    assert {"name", "description", "body"} <= found.keys()
    names = [each["id"] for each in found["body"]]
    assert len(set(names)) == len(names)
    assert all(each["type"] == "textarea" and each["attributes"]["label"] for each in found["body"])


def test_a_bug_report_brings_its_evidence():
    asked = {each["id"]: each for each in read(".github/ISSUE_TEMPLATE/bug.yml")["body"]}
    assert "elastic-ext doctor --json" in asked["doctor"]["attributes"]["label"]
    assert "verdict_file" in asked["verdict"]["attributes"]["description"]
    assert all(asked[name]["validations"]["required"] for name in ("doctor", "verdict", "command"))


def test_the_citation_is_of_this_version():
    cited = read("CITATION.cff")
    assert (cited["version"], cited["license"]) == (project("version"), project("license"))
    assert (cited["title"], cited["abstract"]) == (project("name"), project("description"))
    assert project("version") == elastic_ext.__version__


def newest_changes() -> str:
    return (GITHUB / "CHANGELOG.md").read_text().split("\n## ")[1]


def test_the_changelog_begins_with_this_version():
    version, _, dated, *_ = newest_changes().splitlines()
    assert version == elastic_ext.__version__
    assert re.match(r"Released on \d{4}-\d\d-\d\d\.|Not yet released\.", dated)
    assert prose.measure(newest_changes()).longest == ()


def test_upgrade_notes_name_each_gone_setting():
    notes = newest_changes().partition("Upgrade notes")[2].partition("\n\nRemoved:")[0]
    rows = dict(re.findall(r"(?m)^\| setting `(\w+)`.* \| (.*) \|$", notes))
    assert rows
    assert settings.GONE.keys() - rows.keys() == set()
    known = {each.name for each in dataclasses.fields(settings.Settings)}
    assert rows.keys() & known == set()
