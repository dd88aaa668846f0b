"""The board of a round, and the rules of its topics."""

import dataclasses

import pytest

from elastic_ext.base.records import encode
from elastic_ext.failures.joint_evidence import Hashed, difference
from elastic_ext.rendezvous import board, round_records, topics
from elastic_ext.rendezvous.board import Posts, RoundMembers, Rules, Ruling, posted
from elastic_ext.rendezvous.round_records import Agreed, EndKind, Node, Post

ABC = RoundMembers(("a", "b", "c"))
C_DONE = dataclasses.replace(ABC, done=frozenset("c"), finished_at=80.0)
STALLS = topics.Stalled()


def posts(topic, value, round_=3):
    return posted(Posts(), round_, topic, value)


def test_the_last_value_of_a_topic_wins():
    one = posted(posts(topics.SAVED, topics.SaveDone(1, 5)), 3, topics.STALLED, STALLS)
    two = posted(one, 3, topics.SAVED, topics.SaveDone(2, 9))
    assert (topics.SAVED.of(two, 3), topics.STALLED.of(two, 3)) == (topics.SaveDone(2, 9), STALLS)
    assert topics.STALLED.of(posted(two, 3, topics.STALLED, None), 3) is None
    assert len(two.posts) == 2


def test_a_post_counts_in_its_round_only():
    one = posts(topics.SAVED, topics.SaveDone(1, 5))
    assert [topics.SAVED.of(one, round_) for round_ in (2, 3, 4)] == [None, topics.SaveDone(1, 5), None]
    assert posted(one, 4, topics.STALLED, STALLS) == posts(topics.STALLED, STALLS, 4)


@pytest.mark.parametrize("value", ["", "17", "{}", '{"schema": 2, "number": 1}', '{"schema": 1, "number": -1}', "[" * 10_000])
def test_an_unreadable_value_is_no_post(value):
    """The node stays in the job."""
    record = Node(2, 1, "w", "h", 1, board=Posts(3, (Post("saved", value),)))
    read = round_records.decode(Node, round_records.encode(record), "nodes/x")
    assert read == record
    assert topics.SAVED.of(read.board, 3) is None
    assert Rules(topics.RULED).rulings({"a": Posts(3, (Post("hashed", value),))}, 3, RoundMembers(("a",)), 0.0) == ()


def ranks(*values, of=0):
    return topics.Replicas(tuple(Hashed("s", 2, step, value, (of,)) for step, value in zip((10, 20), values, strict=True)))


@pytest.mark.parametrize(
    ("there", "end"), [("ab", EndKind.DIFFERS), ("aa", None), ("bb", ...)], ids=["was equal", "equal", "never equal"]
)
def test_a_round_of_unequal_replicas_ends(there, end):
    """Also if a node is done with it; replicas that never were equal are a warning."""
    here, other = ranks("a", "a"), ranks(*there, of=1)
    found = topics.equal({"a": here, "b": other}, dataclasses.replace(ABC, done=frozenset("b")), 0.0)
    text = getattr(difference((*here.hashed, *other.hashed)), "text", "")
    assert found == (None if end is None else Ruling(text, None if end is ... else end))
    assert found is None or found.warns == (end is ...)


@pytest.mark.parametrize(
    ("stalled", "members", "found"),
    [
        ("abc", ABC, Ruling(topics.NO_PROGRESS, EndKind.STALLED)),
        ("ab", ABC, None),
        ("ab", dataclasses.replace(ABC, done=frozenset("c")), Ruling(topics.NO_PROGRESS, EndKind.STALLED)),
        ("ab", RoundMembers(("a", "b"), frozenset("ab")), None),  # all have finished
        ("ab", C_DONE, Ruling(topics.MAY_BE_OLD, until=80.0 + topics.CLAIMS_S)),
        ("ab", dataclasses.replace(C_DONE, finished_at=100.0 - topics.CLAIMS_S), Ruling(topics.NO_PROGRESS, EndKind.STALLED)),
    ],
)
def test_a_round_stalls_when_all_unfinished_claim_it(stalled, members, found):
    """A claim may be from the time before others finished, for whom they all waited: it may yet be withdrawn."""
    assert topics.stall(dict.fromkeys(stalled, STALLS), members, 100.0) == found


@pytest.mark.parametrize(
    ("wanted", "known", "ordered"), [([1], None, 1), ([1, 1], None, 1), ([1, 2], 1, 2), ([1], 1, None), ([1, 2], 3, None)]
)
def test_the_newest_save_is_ordered_once(wanted, known, ordered):
    """An operator's command writes the order without the rule."""
    values = {str(number): topics.SaveOrder(each) for number, each in enumerate(wanted)}
    agreed = board.agree(Agreed(), topics.SAVE.for_all(topics.SaveOrder(known))) if known is not None else Agreed()
    found = topics.last_save(values, dataclasses.replace(ABC, agreed=agreed), 0.0)
    assert (topics.SAVE.agreed(board.agree(agreed, found.agreed)) if found else None) == (ordered and topics.SaveOrder(ordered))
    assert found is None or not (found.warns or found.decides)


def test_what_is_agreed_changes_by_topic():
    one = board.agree(Agreed(), topics.SAVE.for_all(topics.SaveOrder(1)), topics.RESUME.for_all(topics.ResumeChoice("x")))
    two = board.agree(one, topics.SAVE.for_all(topics.SaveOrder(2)))
    assert (one.made, two.made, len(two.posts)) == (1, 2, 2)
    assert (topics.SAVE.agreed(two), topics.RESUME.agreed(two)) == (topics.SaveOrder(2), topics.ResumeChoice("x"))
    assert board.agree(two, topics.SAVE.for_all(topics.SaveOrder(2))) is two
    assert topics.SAVE.agreed(Agreed(1, (Post("save", "{"),))) is None


def counting(rule):
    asked = []

    def ask(values, members, now):
        asked.append(dict(values))
        return rule(values, members, now)

    return dataclasses.replace(topics.STALLED, rule=ask), asked


def test_a_rule_is_asked_again_when_due():
    topic, asked = counting(topics.stall)
    rules, both = Rules((topic,)), RoundMembers(("a", "b"))
    one = {"a": posts(topic, STALLS), "b": Posts()}
    assert [rules.rulings(one, 3, both, now) for now in (0.0, 1.0)] == [(), ()]
    assert asked == [{"a": STALLS}]
    late = RoundMembers(("a", "b"), frozenset("b"), 10.0)
    waits = (Ruling(topics.MAY_BE_OLD, until=10.0 + topics.CLAIMS_S),)
    assert [rules.rulings(one, 3, late, now) for now in (11.0, 12.0)] == [waits, waits]
    assert len(asked) == 2
    assert board.ending(rules.rulings(one, 3, late, 10.0 + topics.CLAIMS_S)).end is EndKind.STALLED
    assert len(asked) == 3
    assert rules.rulings(one, 4, late, 99.0) == ()  # nothing is posted in that round
    assert rules.rulings({"a": posts(topic, None), "b": Posts()}, 3, both, 99.0) == ()
    assert len(asked) == 3, "without a post there is nothing to ask"


def test_each_topic_has_a_name_of_its_own():
    known = [topic for topic in vars(topics).values() if isinstance(topic, board.Topic)]
    assert len({topic.name for topic in known}) == len(known)
    assert tuple(topic for topic in known if topic.rule is not None) == topics.RULED
    values = {topics.SAVED: topics.SaveDone(1, 5), topics.READY: topics.ReadyToLeave(1), topics.HASHED: ranks("a", "b")}
    for topic, value in values.items():
        assert topic.of(posts(topic, value), 3) == value
        assert encode(value, board.SCHEMA) == posts(topic, value).posts[0].value
