"""The generated tables of the pages are those of the code."""

import re

import pytest

from elastic_ext.base.settings import Settings
from tests import reference


@pytest.mark.parametrize("name", reference.TABLES)
def test_a_table_is_the_codes(name):
    _, shown, _ = reference.parted(name)
    assert shown == reference.TABLES[name][1](), "make reference writes it"


def test_the_event_schema_is_the_codes():
    assert reference.EVENT_FILE.read_text() == reference.event_schema(), "make reference writes it"


def test_the_status_schema_is_the_codes():
    assert reference.JOB_SCHEMA.read_text() == reference.job_schema(), "make reference writes it"


def test_every_exit_code_has_a_meaning():
    assert {*reference.EXIT_CODES, 2, *(128 + code for code in reference.EXIT_CODES)} >= reference.policy.STOP_CODES


def test_ten_settings_of_start_page_exist():
    rows = (reference.DOCS / "README.md").read_text().partition("| setting | set it when |\n")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)
    assert len(named) == 10
    assert set(named) <= set(Settings.__dataclass_fields__)


def test_metrics_named_on_pages_exist():
    """A name that ends with an underscore is the beginning of several."""
    listed = re.findall(r"^\| `(elastic_ext_\w+)`", reference.metrics(), re.MULTILINE)
    named = {name for page in reference.DOCS.glob("*.md") for name in re.findall(r"\belastic_ext_[a-z_]+", page.read_text())}
    assert len(named) > len(listed)
    unknown = [name for name in named - set(listed) if not (name.endswith("_") and any(each.startswith(name) for each in listed))]
    assert unknown == []
