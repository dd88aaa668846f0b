"""The life of a job from its events: what each node did, what happened, on one clock."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from elastic_ext.events import event_table
from elastic_ext.events.event_table import EventTime, Source
from elastic_ext.timeline import events, spans
from elastic_ext.timeline.events import TimelineEvent
from elastic_ext.timeline.spans import (
    BACKOFF,
    BETWEEN,
    GONE,
    HUNG,
    RENDEZVOUS,
    RUNNING,
    START,
    STARTUP,
    STOPPING,
    TRAINING,
    VERDICT,
    WAITING,
    Row,
    Span,
)
from tests.reference import EVENTS

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
    made = spans.timeline(read(one_crash()))
    (row,) = made.rows
    assert row.label == "a"
    assert states(row) == [
        *((RENDEZVOUS, 0, 1), (START, 1, 1.25), (STARTUP, 1.25, 1.5), (TRAINING, 1.5, 7), (STOPPING, 7, 9), (VERDICT, 9, 10)),
        *((BACKOFF, 10, 13), (RENDEZVOUS, 13, 15), (WAITING, 15, 19), (START, 19, 20), (STARTUP, 20, 22), (TRAINING, 22, 30)),
        (STOPPING, 30, 31),
    ]
    assert made.saved == ((5, "step 40"),)
    assert not any("No save" in note for note in made.notes)
    (end,) = made.interruptions
    assert (end.at, end.row, end.rank, end.round, end.kind, end.decision) == (7, 0, 0, 1, "crash", "restart")
    assert end.after == "resumed from step 40"
    assert made.headline == "Job job: 31 s, 1 restart (1 of 3 charged), ended: succeeded"
    unnamed = spans.timeline([replace(each, run_id="none") for each in read(one_crash())])
    assert unnamed.headline.startswith("Job without --rdzv-id: 31 s, ")
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
    made = spans.timeline(read(agent))
    assert states(made.rows[0])[2:] == [(TRAINING, 0.5, 10), (HUNG, 10, 50), (STOPPING, 50, 52.5), (VERDICT, 52.5, 53.5)]
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
        a.at(20, "decision", **crash(-1, "b", kind="node_lost", decision="restart_free", reason="node b was lost; then rank 0"))
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
    made = spans.timeline(read(*agents))
    assert [each.label for each in made.rows] == ["a", "b"]
    assert made.length == pytest.approx(40, abs=1e-4)
    assert states(made.rows[1])[-2:] == [(STOPPING, 20.0, 20.6), (GONE, 20.6, 40.0)]
    aligned = events.aligned(read(*agents))
    assert aligned.correction == pytest.approx(abs(ahead) / 2, abs=1e-4)
    assert aligned.residual == pytest.approx(0, abs=1e-4)
    assert any("clocks of 2 nodes are aligned" in note for note in made.notes)


def test_the_residual_is_what_a_constant_cannot_explain():
    a, b = Agent("a"), Agent("b", ahead=100.0)
    for rank, agent in enumerate((a, b)):
        for round_, at in enumerate((10, 20, 30), 1):
            agent.joins(at + (0.4 if agent is b and round_ == 2 else 0.0), round_, rank)
    found = events.aligned(read(a, b))
    assert found.correction == pytest.approx(50, abs=0.01)
    assert found.residual == pytest.approx(0.2, abs=0.01)


def test_setting_a_clock_meanwhile_does_not_count():
    agent = one_crash()
    late = [json.loads(each) for each in agent.text.splitlines()]
    late[-1]["time"] = "2031-01-01T00:00:00.000000Z"
    found, _ = events.parse("".join(json.dumps(each) + "\n" for each in late), "events")
    assert spans.timeline(found).length == pytest.approx(31, abs=1e-4)


def test_a_node_without_shared_rounds_keeps_its_clock():
    spare = Agent("spare")
    spare.at(3, "agent_started")
    made = spans.timeline(read(*two_nodes(), spare))
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
            agent.at(start + 1, "checkpoint_chosen", path="/c/step_40" if start else None, step=40 if start else 0)
            agent.at(start + 20, "preemption_noticed", signal="SIGTERM")
            agent.at(start + 21, "workers_stopped")
            agent.at(start + 22, "agent_ended", state="signalled", exit_code=75)
            runs.append(agent)
    made = spans.timeline(read(*runs))
    assert made.rounds == ((pytest.approx(1), "1"), (pytest.approx(26), "1"))
    assert [(each.kind, each.at, each.decision) for each in made.interruptions] == [
        ("preemption", pytest.approx(20), "left with exit code 75"),
        ("preemption", pytest.approx(45), "left with exit code 75"),
    ]
    assert made.interruptions[0].reason == "its agent received SIGTERM; likewise 1 other"
    assert [each.after for each in made.interruptions] == ["a later start resumed from step 40", ""], "these agents had ended"
    assert any("No save is known" in note for note in made.notes)
    assert len(made.rows) == 2
    assert (GONE, 22.0, 25.0) in states(made.rows[0])
    assert made.headline.endswith(", 1 restart, ended: signalled with exit code 75")


def test_recorded_saves_where_none_is_reported():
    """Else each would be shown twice."""
    agent = Agent("a")
    agent.at(0, "agent_started")
    agent.joins(1, 1, 0)
    agent.at(3, "save_recorded", save="checkpoint-10", step=10)
    assert spans.timeline(read(agent)).saved == ((pytest.approx(3), "checkpoint-10"),)
    agent.at(4, "checkpoint_saved", step=20, seconds=0.5)
    assert spans.timeline(read(agent)).saved == ((pytest.approx(4), "step 20"),)


def test_a_lost_node_goes_when_peers_stop():
    made = spans.timeline(read(*two_nodes(lost=True)))
    assert states(made.rows[1])[-2:] == [(TRAINING, 1.5, 20.0), (GONE, 20.0, 40.0)]
    (end,) = made.interruptions
    assert (end.kind, end.node, end.row, end.decision, end.reason) == ("node_lost", "b", 1, "", "b is gone")


def test_the_verdict_on_a_lost_node_counts():
    """The kind is that of the verdict, the row that of the host which it names."""
    made = spans.timeline(read(*two_nodes(lost=True, victim=True)))
    (end,) = made.interruptions
    assert (end.kind, end.node, end.row, end.rank, end.decision) == ("node_lost", "b", 1, -1, "restart_free")
    assert end.reason.startswith("node b was lost; ")


def test_a_node_that_only_trains_is_not_lost():
    """A live job: a has just told of a checkpoint, b trains without a word."""
    a, b = in_round_1("a", "b")
    a.at(60, "checkpoint_saved", step=5)
    made = spans.timeline(read(a, b))
    assert states(made.rows[1])[-1] == (TRAINING, 1.5, 60.0)
    assert made.interruptions == ()
    assert made.headline.endswith("as of its last event")


def test_an_unreported_rounds_end_is_no_loss():
    a, b = in_round_1("a", "b")
    a.at(60, "round_over", cause="broken", reason="b says so")
    a.at(61, "workers_stopped")
    made = spans.timeline(read(a, b))
    assert states(made.rows[1])[-1] == (TRAINING, 1.5, 61.0)
    assert [each.kind for each in made.interruptions] == ["membership"]


@pytest.mark.parametrize("kind", ["node_lost", "membership"])
def test_the_end_of_a_round_says_its_kind(kind):
    """Also where the lost node is back, and so has not fallen silent."""
    a, b = in_round_1("a", "b")
    for agent in (a, b):
        agent.at(60, "round_over", cause="broken", reason="lost b", kind=kind)
        agent.at(61, "workers_stopped")
        agent.joins(62, 2, 0 if agent is a else 1)
    assert [each.kind for each in spans.timeline(read(a, b)).interruptions] == [kind]


def test_agents_that_end_alike_are_one_interruption():
    agents = in_round_1(*"abcdef")
    for agent in agents:
        agent.at(9, "agent_ended", state="error", exit_code=1, error="RendezvousClosedError")
    (end,) = spans.timeline(read(*agents)).interruptions
    assert (end.kind, end.reason) == ("error", "RendezvousClosedError; likewise 5 others")


@pytest.mark.parametrize(("event", "kind"), [("node_refused", "refused"), ("node_drained", "drained")])
def test_a_node_that_is_sent_away_says_why(event, kind):
    first, second = in_round_1("a", "b")
    second.at(5, "workers_stopped")
    second.at(5.5, event, reason="its fan is loud")
    second.at(6, "agent_ended", state="error", error="NodeRefused")
    first.at(9, "agent_ended", state="succeeded")
    (end,) = spans.timeline(read(first, second)).interruptions
    assert (end.row, end.kind, end.reason) == (1, kind, "its fan is loud")


def test_two_agents_of_a_host_have_rows():
    agents = [Agent("a", pid) for pid in (1, 2)]
    for rank, agent in enumerate(agents):
        agent.at(rank, "agent_started")
        agent.joins(2, 1, rank)
        agent.at(9, "workers_stopped")
        agent.at(9, "agent_ended", state="succeeded")
    assert [each.label for each in spans.timeline(read(*agents)).rows] == ["a (pid 1)", "a (pid 2)"]


def test_the_lines_order_and_repetition_do_not_matter():
    text = "".join(each.text for each in two_nodes())
    plain, _ = events.parse(text, "events")
    mixed, _ = events.parse("\n".join(sorted(text.splitlines() * 2)) + "\n", "events")
    assert spans.timeline(mixed) == spans.timeline(plain)


def test_other_lines_are_named_and_the_rest_read():
    good = one_crash().text
    first = json.loads(good.splitlines()[0])
    bad = ["{", "[]", "NaN", "[" * 100_000, json.dumps({**first, "schema": 2}), json.dumps({**first, "time": "now"})]
    bad += [json.dumps({**first, "pid": True}), json.dumps({**first, "monotonic": "1"}), json.dumps({**first, "round": -1})]
    bad += [json.dumps({**first, "time": "9999-12-31T23:59:59.000000Z"}), json.dumps({**first, "monotonic": 1e300})]
    found, faults = events.parse(good + "\n".join(bad) + "\n" + good[: len(good) // 3].splitlines()[-1], "e.jsonl")
    assert found == events.parse(good, "")[0]
    count = len(good.splitlines())
    assert [re.match(r"e\.jsonl:(\d+)\b", each)[1] for each in faults] == [str(count + 1 + number) for number in range(len(bad))]
    assert all(len(each) < 200 and "\n" not in each for each in faults)


def test_unknown_events_and_fields_do_no_harm():
    first, *rest = (json.loads(line) for line in one_crash().text.splitlines())
    of_newer = [{**first, "a field": ["of a newer version"]}, {**first, "event": "of a newer version", "seconds": "soon"}]
    found, faults = events.parse("".join(json.dumps(each) + "\n" for each in [*of_newer, *rest]), "")
    assert faults == []
    assert spans.timeline(found).length == pytest.approx(31)


def test_the_job_trains_unless_a_node_prevents_it():
    rows = (Row("a", (Span(0, 10, TRAINING),)), Row("b", (Span(0, 4, RENDEZVOUS), Span(4, 6, STARTUP), Span(6, 8, TRAINING))))
    assert [(each.state, each.begin, each.end) for each in spans.whole_job(rows, 12)] == [
        (TRAINING, 0, 4),
        (BETWEEN, 4, 6),
        (TRAINING, 6, 10),
        (GONE, 10, 12),
    ]


def test_without_steps_workers_run():
    agent = Agent("a")
    agent.at(0, "agent_started")
    agent.at(1, "round_started", round_=1, ranks=[0])
    agent.at(2, "workers_started")
    agent.at(9, "workers_stopped")
    made = spans.timeline(read(agent))
    assert states(made.rows[0]) == [(RENDEZVOUS, 0, 1), (START, 1, 2), (RUNNING, 2, 9)]
    assert made.trained == pytest.approx(7 / 9)


def test_a_killed_agent_without_peers_is_marked():
    """Nobody was there to notice: it was gone when the next one began at the latest."""
    first, second = Agent("a", pid=1), Agent("a", pid=2)
    first.at(0, "agent_started")
    first.joins(1, 1, 0, nodes=1)
    second.at(9, "agent_started")
    second.joins(10, 2, 0, nodes=1)
    made = spans.timeline(read(first, second))
    assert [(each.at, each.kind, each.reason) for each in made.interruptions] == [(9, "node_lost", spans.SILENT)]
    assert [row.label for row in made.rows] == ["a"]


def test_texts_are_safe_to_show():
    agent = one_crash()
    text = agent.text.replace("it crashed", "\\u001b[31mit\\ncrashed")
    found, _ = events.parse(text, "")
    assert spans.timeline(found).interruptions[0].reason == r"\x1b[31mit\ncrashed"


@pytest.mark.parametrize(
    ("at", "length", "said"),
    [(1.25, 9, "1.25 s"), (5, 9, "5 s"), (200, 900, "3:20"), (3800, 5000, "1:03:20"), (1e5, 2e5, "27:46:40")],
)
def test_times_for_people(at, length, said):
    assert spans.offset(at, length) == said
