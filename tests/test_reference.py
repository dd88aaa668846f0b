"""The generated tables of the pages are those of the code."""

import pytest

from elastic_ext.base.settings import DEFAULT_STOP_GRACE, Settings
from tests import reference


@pytest.mark.parametrize("name", reference.TABLES)
def test_a_table_is_the_codes(name):
    _, shown, _ = reference.parted(name)
    assert shown == reference.TABLES[name][1](), "make reference writes it"


def test_the_schema_of_events_is_the_codes():
    assert reference.EVENT_SCHEMA.read_text() == reference.event_schema(), "make reference writes it"


def test_the_schema_of_a_jobs_status_is_the_codes():
    assert reference.JOB_SCHEMA.read_text() == reference.job_schema(), "make reference writes it"


def test_every_exit_code_has_a_meaning():
    assert {*reference.EXIT_CODES, 2, *(128 + code for code in reference.EXIT_CODES)} >= reference.policy.STOP_CODES


def test_the_default_that_is_worked_out_is_the_one_that_is_told():
    assert f"default {DEFAULT_STOP_GRACE:g}" in Settings.__dataclass_fields__["stop_grace"].metadata["help"]
