"""The life of a job from its events and from its status: what each node did, what happened, on one clock."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elastic_ext.events import event_table
from elastic_ext.events.event_table import EventTime, Source
from elastic_ext.status.job_status import RoundSpan
from elastic_ext.timeline import builder, events, model
from elastic_ext.timeline.events import TimelineEvent
from elastic_ext.timeline.model import (
    BACKOFF,
    BETWEEN,
    GONE,
    HANG,
    RENDEZVOUS,
    START,
    STARTUP,
    STOPPING,
    TRAINING,
    UNKNOWN,
    VERDICT,
    WAITING,
    Row,
    Span,
)
from tests.reference import EVENT_SCHEMA, EVENTS
from tests.status.pages_in_chromium import document, failure

BLANK = {"string": "", "integer": 0, "number": 0.0, "boolean": False, "array": [], "object": {}}


class Agent:
    """Writes events as an agent does, at times that the test chooses. ahead: of its host's clock."""

    def __init__(self, node: str, pid: int = 7, ahead: float = 0.0, booted: float = 1e6) -> None:
        self.source, self.ahead, self.booted, self.round, self.text = Source("job", node, pid), ahead, booted, 0, ""

    def at(self, when: float, name: str, /, **own: object) -> None:
        self.round = int(own.pop("round_", self.round))  # type: ignore[arg-type]
        fields = EVENTS[name]["properties"].items()
        blank = {field: BLANK[of["type"]] if isinstance(of["type"], str) else None for field, of in fields}
        moment = EventTime(1.8e9 + when + self.ahead, when + self.booted, self.round)
        self.text += json.dumps(event_table.record(name, self.source, moment, {**blank, **own})) + "\n"  # type: ignore[arg-type]

    def joins(self, seconds: float, round_: int, rank: int, nodes: int = 2) -> None:
        """Join a round, and train from half a second later."""
        self.at(seconds, "round_started", round_=round_, node_rank=rank, nodes=nodes, ranks=[rank], world_size=nodes)
        self.at(seconds + 0.25, "workers_started")
        self.at(seconds + 0.75, "first_step", seconds=0.25)


def in_round_1(*nodes: str, ahead: float = 0.0) -> list[Agent]:
    """Agents that train from 1.5 on. ahead: of the clocks of all hosts but the first, which have booted at another time."""
    agents = [Agent(node, ahead=ahead if rank else 0.0, booted=5.0 if rank else 1e6) for rank, node in enumerate(nodes)]
    for rank, agent in enumerate(agents):
        agent.at(0, "agent_started")
        agent.joins(1, 1, rank, nodes=len(nodes))
    return agents


def read(*agents: Agent) -> list[TimelineEvent]:
    found, faults = events.parse("".join(each.text for each in agents), "events")
    assert faults == []
    return found


def states(row: Row) -> list[tuple[str, float, float]]:
    return [(each.state, round(each.begin, 3), round(each.end, 3)) for each in row.spans]


def crash(rank: int = 0, node: str = "a", **more: object) -> dict[str, object]:
    return {
        "decision": "restart", "action": "restart", "kind": "crash", "reason": "it crashed", "culprit_rank": rank,
        "culprit_host": node, "restarts": 1, "max_restarts": 3, **more,
    }  # fmt: skip


def one_crash() -> Agent:
    agent = Agent("a")
    agent.at(0, "agent_started")
    agent.joins(1, 1, 0, nodes=1)
    agent.at(5, "checkpoint_saved", step=40, seconds=0.5)
    agent.at(10, "failure", rank=0, kind="crash", reason="it crashed")
    agent.at(10, "decision", phases={"stop": 2.0, "verdict": 1.0}, delay=3.0, **crash())
    agent.at(13, "workers_stopped")
    agent.at(19, "round_started", round_=2, nodes=1, ranks=[0])
    agent.at(19, "checkpoint_chosen", path="/c/40", step=40)
    agent.at(20, "workers_started")
    agent.at(23, "first_step", seconds=2.0)
    agent.at(30, "workers_stopped")
    agent.at(31, "agent_ended", state="succeeded")
    return agent


def test_the_spans_of_an_agent_that_restarts():
    """Stop and verdict are told of when they are over, the first step when it is noticed; a long rendezvous is a wait."""
    made = builder.from_events(read(one_crash()))
    (row,) = made.rows
    assert row.label == "a"
    assert states(row) == [
        *((RENDEZVOUS, 0, 1), (START, 1, 1.25), (STARTUP, 1.25, 1.5), (TRAINING, 1.5, 7), (STOPPING, 7, 9), (VERDICT, 9, 10)),
        *((BACKOFF, 10, 13), (RENDEZVOUS, 13, 15), (WAITING, 15, 19), (START, 19, 20), (STARTUP, 20, 22), (TRAINING, 22, 30)),
        (STOPPING, 30, 31),
    ]
    assert [(each.at, each.step) for each in made.saved] == [(5, 40)]
    (end,) = made.interruptions
    assert (end.at, end.row, end.rank, end.round, end.kind, end.decision) == (7, 0, 0, 1, "crash", "restart")
    assert end.after == "resumed from step 40"
    assert (made.restarts, made.end, made.length) == ("1 restart (1 of 3 charged)", "ended: succeeded", 31)
    assert made.trained == pytest.approx((5.5 + 8) / 31)
    assert [(each.state, each.begin, each.end) for each in made.job][1] == (TRAINING, 1.5, 7)


def test_a_hang_began_before_anybody_said_so():
    agent = Agent("a")
    agent.at(0, "agent_started")
    agent.joins(0, 1, 0, nodes=1)
    agent.at(50, "round_over", cause="stalled", reason="the job hangs")
    agent.at(52, "hang", culprits=[0], reasons=["it sleeps"], seconds=42.0)
    agent.at(53, "decision", phases={"stop": 1.5, "verdict": 0.5}, **crash(kind="hang"))
    agent.at(53.5, "workers_stopped")
    made = builder.from_events(read(agent))
    assert states(made.rows[0])[2:] == [(TRAINING, 0.5, 10), (HANG, 10, 50), (STOPPING, 50, 52.5), (VERDICT, 52.5, 53.5)]
    assert [(each.kind, each.at) for each in made.interruptions] == [("hang", 50)]


def two_nodes(ahead: float = 0.0, lost: bool = False, victim: bool = False) -> tuple[Agent, Agent]:
    """b leaves, or is lost, at 20. victim: the worker of a fails of it."""
    a, b = in_round_1("a", "b", ahead=ahead)
    if not lost:
        b.at(20, "preemption_noticed", signal="SIGTERM", grace=30)
        b.at(20.5, "workers_stopped")
        b.at(20.6, "agent_ended", state="signalled", exit_code=75)
    if victim:
        a.at(20, "failure", rank=0, kind="cascade", reason="Connection closed by peer")
        a.at(20, "decision", **crash(-1, "b", kind="network", decision="restart_free", reason="node b was lost; then rank 0"))
    else:
        a.at(20, "round_over", cause="broken", reason="b is gone")
    a.at(20.5, "workers_stopped")
    a.joins(21, 2, 0, nodes=1)
    a.at(39.5, "workers_stopped")
    a.at(40, "agent_ended", state="succeeded")
    return a, b


@pytest.mark.parametrize("ahead", [0.0, 3.5, -7200.0])
def test_clocks_are_aligned_by_round_starts(ahead):
    """Whatever the second machine's clock says, the picture is the same."""
    agents = two_nodes(ahead)
    made = builder.from_events(read(*agents))
    assert [each.label for each in made.rows] == ["a", "b"]
    assert made.length == pytest.approx(40, abs=1e-4)
    assert states(made.rows[1])[-2:] == [(STOPPING, 20.0, 20.6), (GONE, 20.6, 40.0)]
    aligned = events.aligned(read(*agents))
    assert aligned.nodes == 2
    assert aligned.largest == pytest.approx(abs(ahead) / 2, abs=1e-4)
    assert aligned.residual == pytest.approx(0, abs=1e-4)
    assert any("clocks of 2 nodes are aligned" in note for note in made.notes)


def test_the_residual_is_what_a_constant_cannot_explain():
    a, b = Agent("a"), Agent("b", ahead=100.0)
    for rank, agent in enumerate((a, b)):
        for round_, at in enumerate((10, 20, 30), 1):
            agent.joins(at + (0.4 if agent is b and round_ == 2 else 0.0), round_, rank)
    found = events.aligned(read(a, b))
    assert found.largest == pytest.approx(50, abs=0.01)
    assert found.residual == pytest.approx(0.2, abs=0.01)


def test_setting_a_clock_meanwhile_does_not_count():
    agent = one_crash()
    late = [json.loads(each) for each in agent.text.splitlines()]
    late[-1]["time"] = "2031-01-01T00:00:00.000000Z"
    found, _ = events.parse("".join(json.dumps(each) + "\n" for each in late), "events")
    assert builder.from_events(found).length == pytest.approx(31, abs=1e-4)


def test_a_node_without_shared_rounds_keeps_its_clock():
    spare = Agent("spare")
    spare.at(3, "agent_started")
    made = builder.from_events(read(*two_nodes(), spare))
    assert states(made.rows[2]) == [(RENDEZVOUS, 3.0, 5.0), (WAITING, 5.0, 40.0)]
    assert any("spare" in note for note in made.notes)
    assert made.trained == pytest.approx((18.5 + 18) / 40)  # a spare that waits keeps nobody from training


def test_a_job_begun_again_has_two_first_rounds():
    """Under one run id rounds count from 1 again: what happens 2 seconds later on other ranks is another round."""
    runs = []
    for start in (0, 25):
        for rank, node in enumerate(("a", "b") if not start else ("b", "a")):
            agent = Agent(node, pid=7 + start)
            agent.at(start, "agent_started")
            agent.joins(start + 1, 1, rank)
            agent.at(start + 20, "preemption_noticed", signal="SIGTERM")
            agent.at(start + 21, "workers_stopped")
            agent.at(start + 22, "agent_ended", state="signalled", exit_code=75)
            runs.append(agent)
    made = builder.from_events(read(*runs))
    assert [(each.round, each.at) for each in made.rounds] == [(1, pytest.approx(1)), (1, pytest.approx(26))]
    assert [(each.kind, each.at, each.decision) for each in made.interruptions] == [
        ("preemption", pytest.approx(20), "left with exit code 75"),
        ("preemption", pytest.approx(45), "left with exit code 75"),
    ]
    assert made.interruptions[0].reason == "its agent received SIGTERM; likewise b"
    assert len(made.rows) == 2
    assert (GONE, 22.0, 25.0) in states(made.rows[0])
    assert made.restarts.startswith("1 restart")
    assert made.end == "ended with exit code 75"


def test_a_lost_node_goes_when_peers_stop():
    made = builder.from_events(read(*two_nodes(lost=True)))
    assert states(made.rows[1])[-2:] == [(TRAINING, 1.5, 20.0), (GONE, 20.0, 40.0)]
    (end,) = made.interruptions
    assert (end.kind, end.node, end.row, end.decision, end.reason) == ("node lost", "b", 1, "new round", "b is gone")


def test_a_lost_node_keeps_its_own_row():
    made = builder.from_events(read(*two_nodes(lost=True, victim=True)))
    (end,) = made.interruptions
    assert (end.kind, end.node, end.row, end.rank, end.decision) == ("node lost", "b", 1, None, "restart_free")
    assert end.reason.startswith("node b was lost; ")


def test_a_node_that_only_trains_is_not_lost():
    """A live job: a has just told of a checkpoint, b trains without a word."""
    a, b = in_round_1("a", "b")
    a.at(60, "checkpoint_saved", step=5)
    made = builder.from_events(read(a, b))
    assert states(made.rows[1])[-1] == (TRAINING, 1.5, 60.0)
    assert (made.interruptions, made.end) == ((), "as of its last event")


def test_an_unreported_rounds_end_is_no_loss():
    a, b = in_round_1("a", "b")
    a.at(60, "round_over", cause="broken", reason="b says so")
    a.at(61, "workers_stopped")
    made = builder.from_events(read(a, b))
    assert states(made.rows[1])[-1] == (TRAINING, 1.5, 61.0)
    assert [each.kind for each in made.interruptions] == ["membership"]


def test_agents_that_end_alike_are_one_interruption():
    agents = in_round_1(*"abcdef")
    for agent in agents:
        agent.at(9, "agent_ended", state="error", exit_code=1, error="RendezvousClosedError")
    (end,) = builder.from_events(read(*agents)).interruptions
    assert (end.kind, end.reason) == ("error", "RendezvousClosedError; likewise b, c, d and 2 more")


@pytest.mark.parametrize(("event", "kind"), [("node_refused", "refused"), ("node_drained", "drained")])
def test_a_node_that_is_sent_away_says_why(event, kind):
    first, second = in_round_1("a", "b")
    second.at(5, "workers_stopped")
    second.at(5.5, event, reason="its fan is loud")
    second.at(6, "agent_ended", state="error", error="NodeRefused")
    first.at(9, "agent_ended", state="succeeded")
    (end,) = builder.from_events(read(first, second)).interruptions
    assert (end.row, end.kind, end.reason) == (1, kind, "its fan is loud")


def test_two_agents_of_a_host_have_rows():
    agents = [Agent("a", pid) for pid in (1, 2)]
    for rank, agent in enumerate(agents):
        agent.at(rank, "agent_started")
        agent.joins(2, 1, rank)
        agent.at(9, "workers_stopped")
        agent.at(9, "agent_ended", state="succeeded")
    assert [each.label for each in builder.from_events(read(*agents)).rows] == ["a (pid 1)", "a (pid 2)"]


def test_the_lines_order_and_repetition_do_not_matter():
    text = "".join(each.text for each in two_nodes())
    plain, _ = events.parse(text, "events")
    mixed, _ = events.parse("\n".join(sorted(text.splitlines() * 2)) + "\n", "events")
    assert builder.from_events(mixed) == builder.from_events(plain)


def test_other_lines_are_named_and_the_rest_read():
    good = one_crash().text
    first = json.loads(good.splitlines()[0])
    bad = ["{", "[]", "NaN", "[" * 100_000, json.dumps({**first, "schema": 2}), json.dumps({**first, "time": "now"})]
    bad += [json.dumps({**first, "pid": True}), json.dumps({**first, "monotonic": "1"}), json.dumps({**first, "round": -1})]
    bad += [json.dumps({**first, "time": "9999-12-31T23:59:59.000000Z"}), json.dumps({**first, "monotonic": 1e300})]
    found, faults = events.parse(good + "\n".join(bad) + "\n" + good[: len(good) // 3].splitlines()[-1], "e.jsonl")
    assert found == events.parse(good, "")[0]
    count = len(good.splitlines())
    places, whys = zip(*(each.split(": ", 1) for each in faults), strict=True)
    assert list(places) == [f"e.jsonl:{count + number}" for number in range(1, len(bad) + 1)]
    assert all(each and len(each) < 200 and "\n" not in each for each in whys)


def test_unknown_events_and_types_do_no_harm():
    text = ""
    for line in (one := one_crash().text).splitlines():
        record = json.loads(line)
        common = EVENT_SCHEMA["properties"].keys()
        text += json.dumps({key: value if key in common else [value] for key, value in record.items()}) + "\n"
    found, faults = events.parse(text + json.dumps({**json.loads(one.splitlines()[0]), "event": "of a newer version"}) + "\n", "")
    assert faults == []
    assert builder.from_events(found).length == pytest.approx(31)


def test_invisible_spans_are_thinned_to_the_longest():
    spans = [Span(0, 100, TRAINING)]
    for number in range(50):
        at = 100 + number * 0.4
        spans += [Span(at, at + 0.3, STOPPING), Span(at + 0.3, at + 0.4, START)]
    spans.append(Span(120, 200, TRAINING))
    assert model.thinned(spans, 1.0) == (Span(0, 100, TRAINING), Span(100, spans[-2].end, STOPPING), Span(120, 200, TRAINING))
    assert model.thinned(spans, 0.05) == model.merged(spans)


def test_labels_without_room_move_a_level():
    assert model.levels([0, 1, 1.5, 1.6, 9], 2, 3) == [0, 1, 2, None, 0]


def test_the_job_trains_unless_a_node_prevents_it():
    rows = (Row("a", (Span(0, 10, TRAINING),)), Row("b", (Span(0, 4, RENDEZVOUS), Span(4, 6, STARTUP), Span(6, 8, TRAINING))))
    assert [(each.state, each.begin, each.end) for each in model.job_spans(rows, 12)] == [
        (TRAINING, 0, 4),
        (BETWEEN, 4, 6),
        (TRAINING, 6, 10),
        (GONE, 10, 12),
    ]


def test_times_for_people():
    assert [model.offset(at, length) for at, length in ((1.25, 9), (5, 9), (200, 900), (3800, 5000), (1e5, 2e5))] == [
        *("1.2 s", "5 s", "3:20", "1:03:20", "1 d 3:46"),
    ]
    assert [model.duration(each) for each in (0.02, 45.2, 725, 11520, 190000)] == [
        *("20 ms", "45.2 s", "12 min 5 s", "3 h 12 min", "2 d 4 h"),
    ]
    for length in (0.3, 7, 47, 3000, 9e4, 4e6, 4e7):
        assert 3 <= len(model.ticks(length, 12)) <= 13


# The status of a job.


def test_the_status_shows_rounds_verdicts_and_gaps():
    made = builder.from_status(document(3, "recovering"), 1.8e9)
    assert (made.length, made.began_unix) == (3600, 1.8e9 - 3600)
    assert [(each.round, each.at) for each in made.rounds] == [(1, 0), (2, 2390)]
    assert [(each.state, each.begin, each.end) for each in made.job][-1] == (BETWEEN, 3592.5, 3600)
    (end,) = made.interruptions
    assert (end.at, end.rank, end.node) == (2320, 27, "n3")
    nodes = made.rows[-3:]
    assert [each.spans[0].state for each in nodes] == [UNKNOWN] * 3
    assert [each.spans[-1].state for each in nodes] == [RENDEZVOUS] * 3
    assert made.notes[0] == builder.WITHOUT_EVENTS
    assert any("only verdicts that this node has heard" in note for note in made.notes)
    spent = {each.state: each.seconds for each in document(3).goodput}
    assert made.trained == pytest.approx(spent["productive"] / sum(spent.values()))
    assert [each.label for each in made.rows] == ["goodput, all nodes", "rank 0: n0", "rank 1: n1", "rank 2: n2"]
    assert (made.nodes, made.spent["productive"]) == (3, made.trained)


def test_a_job_of_which_only_verdicts_are_left():
    verdicts = tuple(replace(failure(number), at=f"2026-01-02 03:0{number}:05+0000") for number in (1, 2, 5))
    made = builder.from_status(replace(document(0, "ended"), rounds=(), nodes=(), failures=verdicts), 1.8e9)
    assert [each.at for each in made.interruptions] == [0, 60, 240]
    assert builder.BY_JUDGES in made.notes
    unknown = replace(document(1), rounds=(RoundSpan(9, 5.0),), failures=(failure(1),))
    (end,) = builder.from_status(unknown, 1.8e9).interruptions
    assert (end.at, end.after) == (None, "at 2026-01-02 03:04:05+0000")
