"""Which hosts' stores did not answer, of late. Pure."""

import pytest

from elastic_ext.rendezvous.round_store import MAX_SILENT, ROUNDS_SILENT, recently_silent


@pytest.mark.parametrize(
    ("silent", "round_", "found"),
    [
        ({}, 9, ()),
        ({"a": 9}, 9, ("a",)),
        ({"a": 9}, 8 + ROUNDS_SILENT, ("a",)),
        ({"a": 9}, 9 + ROUNDS_SILENT, ()),  # the network may have been mended
        ({"a": 9, "b": 10}, 9 + ROUNDS_SILENT, ("b",)),
        ({str(number): 9 for number in range(MAX_SILENT + 1)}, 9, tuple(map(str, range(1, MAX_SILENT + 1)))),
    ],
)
def test_a_store_that_did_not_answer_is_forgotten_after_some_rounds(silent, round_, found):
    assert recently_silent(silent, round_) == found
