"""When an embedded store ends."""

from __future__ import annotations

import pytest

from elastic_ext.embedded import process
from elastic_ext.embedded.process import FIRST_AGENT_S, LONELY_S, OVER_S, SIGNALLED_S, Lifetime, StoreSituation


def seen(**more):
    """A job whose nodes, here and elsewhere, have all left at 100, without a word."""
    usual = {"started": 10.0, "streams": 0, "nodes": 0, "agents": 0, "had_agents": True, "orderly": False, "over": False}
    return StoreSituation(**{**usual, "quiet": 100.0, **more})


def busy(**more):
    return seen(**{"streams": 1, "quiet": None, **more})


GOES_ON = Lifetime(False, "nodes are in the job")


@pytest.mark.parametrize(
    "situation",
    [
        busy(agents=1),
        busy(),  # those of this host have left
        busy(orderly=True),
        busy(over=True),
        busy(over=True, orderly=True),
        seen(agents=1),  # between two streams
        seen(agents=1, over=True),
        seen(agents=1, had_agents=False),  # it has not said hello yet
        busy(had_agents=False),
    ],
)
def test_a_store_stays_while_it_is_needed(situation):
    assert process.decide(situation, 1e6) == GOES_ON


@pytest.mark.parametrize(
    ("situation", "until", "reason"),
    [
        (seen(had_agents=False, quiet=10.0), 10 + FIRST_AGENT_S, "no agent has come"),
        (seen(had_agents=False, quiet=10.0, over=True), 10 + FIRST_AGENT_S, "no agent has come"),
        (seen(), 100 + LONELY_S, "all agents are gone"),
        (seen(quiet=150.0), 150 + LONELY_S, "all agents are gone"),  # a node had come back
        (seen(over=True), 100 + OVER_S, "the job is over"),
        (seen(over=True, orderly=True), 100 + OVER_S, "the job is over"),
        (seen(orderly=True), 100 + OVER_S, "all have left"),
        (seen(orderly=True, nodes=1), 100 + LONELY_S, "all agents are gone"),  # a node is cut off
        (seen(over=True, nodes=1), 100 + OVER_S, "the job is over"),
        # Told to end: at once where nobody is left, else soon, whoever is there.
        (seen(signalled=50.0), 50 + SIGNALLED_S, "a signal"),
        (seen(signalled=99.0), 100 + OVER_S, "all have left"),
        (seen(signalled=99.0, over=True), 100 + OVER_S, "the job is over"),
        (seen(signalled=99.0, agents=1), 99 + SIGNALLED_S, "a signal"),
        (busy(signalled=99.0), 99 + SIGNALLED_S, "a signal"),
        (busy(signalled=99.0, agents=2, over=True), 99 + SIGNALLED_S, "a signal"),
        (seen(signalled=11.0, had_agents=False, quiet=10.0), 11 + SIGNALLED_S, "a signal"),
        (seen(signalled=39.0, had_agents=False, quiet=10.0), 10 + FIRST_AGENT_S, "no agent has come"),
    ],
)
def test_when_a_store_ends(situation, until, reason):
    """It looks again at that time, and not before."""
    assert process.decide(situation, until - 0.01) == Lifetime(False, reason, until)
    assert process.decide(situation, until) == Lifetime(True, reason, until)
    assert process.decide(situation, until + 1000) == Lifetime(True, reason, until)
