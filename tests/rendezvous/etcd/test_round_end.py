"""How a round has ended, by the newest header that a node of it knows."""

import pytest

from elastic_ext.rendezvous.contract import EndKind
from elastic_ext.rendezvous.etcd.round_part import round_end
from elastic_ext.rendezvous.round_records import Header, State
from elastic_ext.rendezvous.rounds import STALLED


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        (Header(3, State.RUNNING, seal="s"), None),
        (Header(3, State.DONE, seal="s"), None),
        (Header(3, State.BROKEN, seal="s"), EndKind.BROKEN),
        (Header(3, State.BROKEN, seal="s", reason=STALLED), EndKind.BROKEN),  # no reason is compared
        (Header(3, State.BROKEN, seal="s", end=EndKind.STALLED), EndKind.STALLED),
        (Header(3, State.CLOSED, seal="s"), EndKind.CLOSED),
        (Header(3, State.CLOSED, seal="other"), EndKind.CLOSED),
        (Header(3, State.RUNNING, seal="other"), EndKind.BROKEN),
        (Header(4, State.RUNNING, seal="s"), EndKind.BROKEN),
        (Header(4, State.BROKEN, seal="t", end=EndKind.STALLED), EndKind.BROKEN),  # another round stalled
        (Header(), EndKind.BROKEN),
    ],
)
def test_a_round_ends_by_its_header(header, kind):
    ended = round_end(header, 3, "s")
    assert (ended.kind if ended is not None else None) is kind


def test_before_the_first_round():
    assert round_end(Header(), 0, None) is None
    assert round_end(Header(state=State.CLOSED), 0, None).kind is EndKind.CLOSED
    assert round_end(Header(2, State.RUNNING, seal="s"), 0, None).kind is EndKind.BROKEN
