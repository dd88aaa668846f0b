"""Which connection makes room for a new one."""

from __future__ import annotations

import pytest

from elastic_ext.rendezvous.link_places import LinkPlaces


@pytest.mark.parametrize(
    ("come", "lost"),
    [
        ("a1 b1 c1", []),
        ("a1 b1 c1 d1", ["a1"]),  # all have one: the oldest
        ("a1 b1 b2 b3", ["b1"]),  # with the new one, b has most
        ("a1 b1 b2 c1", ["b1"]),
        ("a1 b1 b2 b3 b4 b5 c1 d1", ["b1", "b2", "b3", "b4", "a1"]),
        ("a1 b1 a2 b2", ["a1"]),
    ],
)
def test_a_crowd_makes_room(come, lost):
    """A letter: an address."""
    places = LinkPlaces[str](3)
    assert [each for name in come.split() if (each := places.take(name, name[0])) is not None] == lost
    assert len(places) == min(3, len(come.split()))


def test_a_place_that_is_left_is_free():
    places = LinkPlaces[str](2)
    assert [places.take(name, name) for name in "ab"] == [None, None]
    assert places.leave("a")
    assert not places.leave("a")
    assert places.take("c", "c") is None
    assert places.take("d", "d") == "b"
    assert not places.leave("b"), "it has lost it"
