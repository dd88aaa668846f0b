"""The codec of records: JSON and back, and keys that differ from the names of fields."""

import json
from dataclasses import dataclass, field
from enum import Enum

import pytest

from elastic_ext.base import records
from elastic_ext.base.records import RecordError, stored_as


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    response: Colour = field(metadata=stored_as("verdict"))
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner | None = None
    more: tuple[Inner, ...] = ()


RECORD = Outer("x", Inner(Colour.RED, (1, 2)), (Inner(Colour.RED),))


def test_a_record_comes_back_as_it_went():
    text = json.dumps({"schema": 1, **records.plain(RECORD)})
    assert records.read(Outer, text, "a record", 1) == RECORD


def test_a_renamed_field_keeps_its_key_in_json():
    assert records.plain(RECORD)["inner"] == {"verdict": "red", "numbers": [1, 2]}
    assert records.build(Inner, {"verdict": "red", "response": 5}, "a record") == Inner(Colour.RED)
    with pytest.raises(RecordError, match=r"Inner\.verdict: expected one of red"):
        records.build(Inner, {"verdict": "blue"}, "a record")


def test_only_dataclasses_are_records():
    with pytest.raises(TypeError):
        records.plain({"name": "x"})
