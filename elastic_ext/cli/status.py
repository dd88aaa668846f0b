"""`elastic-ext status`: the status of a whole job, live or ended, from its etcd or from any of its agents. `elastic-ext explain`:
its failures, from its records in etcd or from files with evidence.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_ext.base import files, records
from elastic_ext.base.errors import EX_CONFIG, EX_UNAVAILABLE, UsageError
from elastic_ext.base.printable import counted, named_job, shown
from elastic_ext.cli import Commands, job_source, print_error
from elastic_ext.failures import case, classify, policy, user_rules
from elastic_ext.rendezvous import job_status, running_job
from elastic_ext.status import headline
from elastic_ext.status.job_status import ENDED_STATES, SILENT, Document, NodeStatus, encode
from elastic_ext.telemetry import families

WATCH_S = 2.0  # between two looks
LOST_S = 60.0  # without an answer, after which `--watch` gives up: longer than an election in etcd
MOST_NODES = 40  # rows on a terminal; those that do not run come first
EX_INTERRUPTED = 130
# By the state of the job.
EXIT_CODES = {"running": 0, "succeeded": 0, "failed": 1, "recovering": 2, "starting": 2, "forming": 2, "ended": 3}
MEANINGS = {
    0: "the job runs, or has succeeded",
    1: "the job has failed",
    2: "its workers do not run now: it starts, recovers from a failure, or waits for nodes",
    3: "no agent is left in it: a signal stopped it, or nothing shows how it ended",
    EX_UNAVAILABLE: "no such job, or neither etcd nor the agent answers",
    78: "wrong usage",
    EX_INTERRUPTED: "interrupted with Ctrl-C",
}


def add_command(commands: Commands) -> None:
    status = commands.add_parser("status", help="show the state of a job: nodes, rounds, failures, checkpoints, stragglers")
    status.description = "Show a job, live or ended. Changes nothing."
    status.epilog = "Exit codes: " + "; ".join(f"{code}: {meaning}" for code, meaning in MEANINGS.items()) + "."
    job_source.add_arguments(status)
    status.add_argument("--json", action="store_true", help="print JSON: one line, with --watch one line for each update")
    status.add_argument("--watch", action="store_true", help=f"update every {WATCH_S:g} s, until the job has ended, or Ctrl-C")
    status.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the job; return the exit code of its state at the last look. Raises UsageError: wrong usage."""
    agent = job_source.agent_of(args, "status")
    try:
        with job_source.reader(args, agent, again=args.watch) as read:
            return _watch(read, args.json) if args.watch else _show(read(), args.json)
    except (UsageError, records.RecordError) as error:
        print_error(str(error))
        return EX_UNAVAILABLE
    except KeyboardInterrupt:
        return EX_INTERRUPTED


def _watch(read: job_source.Read, as_json: bool) -> int:
    """Show the job again and again until it has ended or answers have stopped. Raises what the first `read` raises."""
    document, read_at, fault = read(), time.monotonic(), ""
    code = _show(document, as_json, again=True)
    while document.job.state not in ENDED_STATES:
        time.sleep(WATCH_S)
        try:
            document, read_at, fault = read(), time.monotonic(), ""
        except running_job.NoSuchJob as error:
            ended = replace(document.job, state="ended", headline=headline.NONE_LEFT, reason=str(error))
            document = replace(document, job=ended, nodes=(), unknown=())
        except (UsageError, records.RecordError) as error:
            if time.monotonic() - read_at >= LOST_S:
                raise
            if str(error) != fault:
                fault, left_s = str(error), read_at + LOST_S - time.monotonic()
                ago = age(time.monotonic() - read_at)
                print_error(f"{fault}; the job as it was {ago} ago is above; asking again for {age(left_s)} at most")
            continue
        code = _show(document, as_json, again=True)
    return code


def _show(document: Document, as_json: bool, again: bool = False) -> int:
    """Show the document. again: in place of what was shown before, on a terminal."""
    if as_json:
        print(encode(document), flush=True)
    else:
        terminal = _terminal(again)
        found = [as_text(line, terminal) for line in job_lines(document, terminal)]
        if again and sys.stdout.isatty():
            sys.stdout.write("\033[H\033[2J")
        print("\n".join(found), flush=True)
    return EXIT_CODES.get(document.job.state, 3)


def _terminal(whole_screen: bool) -> Terminal:
    """Return what standard output is. whole_screen: the nodes get what the rest leaves of it, at least a few rows."""
    if not sys.stdout.isatty():
        return Terminal()
    size = shutil.get_terminal_size()
    colors = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Terminal(colors, size.columns, min(MOST_NODES, max(4, size.lines - 20)) if whole_screen else MOST_NODES)


COLUMNS = ("rank", "node", "state", "workers", "step", "steps/s", "last step", "checkpoint", "standbys", "last heard")
LATEST = 5  # of rounds and failures
OLD_S = 10.0  # what an agent has read of the others is then called old
BAR = 40  # characters of a bar

GOOD, BUSY, BAD, SOFT, BOLD, PLAIN = "32", "33", "31", "2", "1", ""  # codes of ECMA-48's SGR
TONES = {
    **dict.fromkeys(("running", "succeeded"), GOOD),
    **dict.fromkeys(("failed", SILENT), BAD),
    **dict.fromkeys(("recovering", "starting", "forming", "stop", "verdict", "rendezvous", "start", "backoff"), BUSY),
}

Part = tuple[str, str]  # a text and its SGR code
Line = Sequence[Part]


@dataclass(frozen=True)
class Terminal:
    """What the lines are for. width: characters of a row; 0: any. nodes: the most rows of nodes; 0: any."""

    colors: bool = False
    width: int = 0
    nodes: int = 0


def as_text(line: Line, terminal: Terminal) -> str:
    if not terminal.colors:
        return "".join(shown(each) for each, _ in line)
    return "".join(f"\033[{code}m{shown(each)}\033[0m" if code and each else shown(each) for each, code in line)


def job_lines(document: Document, terminal: Terminal) -> Iterator[Line]:
    """Return the document as lines. They may hold what others wrote; `as_text` makes that safe to show."""
    job = document.job
    name, tone = f"{named_job(job.run_id)} ({job.backend}): ", TONES.get(job.state, BOLD)
    yield (name, BOLD), (job.state, tone), (f", round {job.round}", PLAIN)
    if job.headline:
        yield ((f"  {job.headline}", BOLD),)
    if job.reason:
        yield ((f"  because: {job.reason}", PLAIN),)
    if old := _old(document):
        yield ((f"  {old}", BUSY),)
    yield ((f"  {', '.join(_facts(document))}", PLAIN),)
    yield from _goodput(document, terminal)
    yield from _timeline(document, terminal)
    yield from _nodes(document, terminal)
    yield from (((f"straggler: {slow.text}", BUSY),) for slow in document.stragglers)
    for span in document.rounds[-LATEST:]:
        ended = f", ended {age(span.ended_s)} ago" if span.ended_s is not None else ", runs"
        why = f": {span.why}" if span.why else ""
        yield ((f"round {span.round}: began {age(span.began_s)} ago{ended}{why}", PLAIN),)
    for failure in document.failures[-LATEST:]:
        code = f", exit code {failure.exit_code}" if failure.exit_code is not None else ""
        where = f"rank {failure.rank} on {failure.host}" if failure.rank >= 0 else failure.host
        yield (
            (f"{failure.at} ".lstrip(), SOFT),
            (f"round {failure.round}: {failure.kind} ({where}), ", PLAIN),
            (f"{failure.decision}{code}", BAD if code else PLAIN),
            (f": {failure.reason}", PLAIN),
        )
    yield from (((f"{each.host} may not come back yet: {each.why}", PLAIN),) for each in document.refused)
    yield from (((f"not known: {each.what}: {each.why}", SOFT),) for each in document.unknown)


def _old(document: Document) -> str:
    if document.read_s is None:
        return f"nothing is known of the other nodes yet: {document.fault}" if document.fault else ""
    if not document.fault and document.read_s < OLD_S:
        return ""
    return f"what is shown of the other nodes is {age(document.read_s)} old" + (f": {document.fault}" if document.fault else "")


def _facts(document: Document) -> Iterator[str]:
    job = document.job
    last = " in the last round" if job.state in ENDED_STATES else ""
    yield f"{counted(job.nodes, 'node')}, {counted(job.world_size, 'worker')}{last}"
    if job.step is not None:
        total = f" of {job.total_steps}" if job.total_steps is not None else ""
        yield f"step {job.step}{total}" + (f" at {job.steps_per_s:.2f}/s" if job.steps_per_s is not None else "")
    if job.saved_step is not None:
        yield f"saved step {job.saved_step} {age(job.saved_s)} ago"
    yield f"restarts charged: {job.restarts_charged}" + (f" of {job.restarts_limit}" if job.restarts_limit is not None else "")


def _goodput(document: Document, terminal: Terminal) -> Iterator[Line]:
    total = sum(each.seconds for each in document.goodput)
    if not total:
        return
    parts = sorted(document.goodput, key=lambda each: (each.state != "productive", -each.seconds))
    said = ", ".join(
        f"{each.state.replace('_', ' ')} {each.seconds / total:.1%}" for each in parts if each.seconds / total >= 5e-4
    )
    good = next((each.seconds for each in parts if each.state == "productive"), 0.0) / total
    bar = _bar([(good, " ", "42"), (1 - good, " ", "41")]) if terminal.colors else ()
    yield ("  goodput ", PLAIN), *bar, (f" {said}" if bar else said, PLAIN)


def _timeline(document: Document, terminal: Terminal) -> Iterator[Line]:
    """Return the rounds on one axis of time: "=" while workers ran, "." while none did."""
    rounds = document.rounds
    if not rounds:
        return
    end_s = rounds[-1].ended_s or 0.0 if document.job.state in ENDED_STATES else 0.0
    whole_s = max(rounds[0].began_s - end_s, 1e-3)
    shares = []
    for span, after in zip(rounds, [*rounds[1:], None], strict=True):
        ended_s = span.ended_s if span.ended_s is not None else 0.0
        gap_s = 0.0 if span.ended_s is None else ended_s - (after.began_s if after is not None else end_s)
        shares += [((span.began_s - ended_s) / whole_s, "=", "42"), (gap_s / whole_s, ".", "43")]
    shown_by = [each for each in document.nodes if each.name == document.rounds_by and each.seen_s is None]
    as_of = f", as of {shown_by[0].reported_at}" if shown_by and shown_by[0].reported_at else ""
    said = f" {age(rounds[0].began_s - end_s)} until {'now' if not end_s else f'{age(end_s)} ago'}"
    yield ("  rounds  ", PLAIN), *_bar(shares, terminal.colors), (said, PLAIN), (as_of, SOFT)


def _bar(shares: Iterable[tuple[float, str, str]], colors: bool = True) -> list[Part]:
    """Return parts of BAR characters in all. shares: of the bar, with the character and the color of each."""
    parts: list[Part] = []
    upto = drawn = 0.0
    for share, character, color in shares:
        upto += max(0.0, share)
        count = max(0, min(BAR, round(upto * BAR)) - round(drawn))
        drawn += count
        parts += [((" " if colors else character) * count, color if colors else PLAIN)] if count else []
    return parts


def _nodes(document: Document, terminal: Terminal) -> Iterator[Line]:
    nodes = document.nodes
    if not nodes:
        return
    states = Counter(each.state for each in nodes)
    counts: list[Part] = [("  nodes   ", PLAIN)]
    for state, count in states.most_common():
        counts += [(", " if len(counts) > 1 else "", PLAIN), (f"{count} {state}", TONES.get(state, PLAIN))]
    if any(each.seen_s is None and each.reported_at for each in nodes):
        counts += [("; ages are as of the newest time under last heard", SOFT)]
    yield counts
    kept = chosen(nodes, terminal.nodes)
    rows = [COLUMNS, *(_row(each, here=each.id == document.shown_by) for each in kept)]
    used = [number for number in range(len(COLUMNS)) if any(row[number] for row in rows[1:])]
    widths = {number: max(len(row[number]) for row in rows) for number in used}
    yield _cut([("  ".join(COLUMNS[number].ljust(widths[number]) for number in used).rstrip(), SOFT)], terminal.width)
    for node, row in zip(kept, rows[1:], strict=True):
        cells = [(row[number].ljust(widths[number]), TONES.get(node.state, PLAIN) if number == 2 else PLAIN) for number in used]
        yield _cut([(f"{cell}  ", code) for cell, code in cells[:-1]] + [(cells[-1][0].rstrip(), cells[-1][1])], terminal.width)
    if len(kept) < len(nodes):
        yield ((f"and {len(nodes) - len(kept)} more; --json, or a pipe, shows all", SOFT),)


def chosen(nodes: Sequence[NodeStatus], most: int) -> list[NodeStatus]:
    """Return at most `most` nodes in their order: the silent, then others that do not run, then the rest; 0: all."""
    if not most or len(nodes) <= most:
        return list(nodes)
    need = {SILENT: 0, families.RUNNING: 2}
    by_need = sorted(range(len(nodes)), key=lambda index: (need.get(nodes[index].state, 1), index))
    return [nodes[index] for index in sorted(by_need[:most])]


def _cut(line: Line, width: int) -> Line:
    """Return the line without what does not fit into a row."""
    left, parts = width, []
    for each, code in line if width else ():
        parts.append((each[:left], code))
        left = max(0, left - len(each))
    return parts or line


def _row(node: NodeStatus, here: bool) -> tuple[str, ...]:
    saved = f"step {node.saved_step}, {age(node.saved_s)} ago" if node.saved_step is not None else ""
    cells = (
        str(node.node_rank) if node.node_rank >= 0 else "-",
        node.name or node.id,
        f"{node.state} {age(node.state_s)}".rstrip(),
        str(node.workers),
        "" if node.step is None else str(node.step),
        "" if node.steps_per_s is None else f"{node.steps_per_s:.2f}",
        f"{age(node.last_step_s)} ago" if node.last_step_s is not None else "",
        saved,
        str(node.standbys or ""),
        "here" if here else f"{age(node.seen_s)} ago" if node.seen_s is not None else node.reported_at,
    )
    return tuple(map(shown, cells))


def age(seconds: float | None) -> str:
    """Return an age for people: 90 -> "90 s", 7200 -> "2.0 h"; "" if unknown."""
    if seconds is None:
        return ""
    for most, unit, name in ((10.0, 1.0, "s"), (100.0, 1.0, "s"), (6000.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if seconds < most:
            return f"{seconds / unit:.{0 if most in (100.0, 6000.0) else 1}f} {name}"
    return f"{seconds / 86400:.1f} d"


# Why a job failed.


def add_explain(commands: Commands) -> None:
    explain = commands.add_parser("explain", help="explain a failure, and what the agent would do about it")
    explain.description = (
        "Read evidence of failures and print one JSON object for each case: id, kind, decision, exit_code (null if the agent "
        "continues), reason, rule. Or, with --rdzv-endpoint and --rdzv-id, print all failures of a job and what was decided. A "
        "case that cannot be read gets one line on stderr, and the others are still printed. The exit code is 78 if anything "
        "could not be read."
    )
    explain.add_argument("files", nargs="*", metavar="FILE", help="evidence: one JSON object, or one per line of a .jsonl file")
    explain.add_argument("--rdzv-endpoint", metavar="HOST:PORT[,...]", help=f"instead of files, {job_source.ENDPOINT}")
    explain.add_argument("--rdzv-id", metavar="ID", help="run id of the job; prints its failures, the decisions and the reasons")
    explain.add_argument("--rules", metavar="FILE", help="TOML file with your own rules, like the setting `rules`")
    sets = sorted(policy.EXIT_CODES)
    explain.add_argument("--exit-codes", choices=sets, default="design", help="which set of exit codes to print")
    explain.set_defaults(run=run_explain)


def run_explain(args: argparse.Namespace) -> int:
    """Explain files or a job; return 0, or 78 if something could not be read. Raises UsageError."""
    job = (args.rdzv_endpoint, args.rdzv_id)
    if any(job) == bool(args.files) or any(job) != all(job):
        raise UsageError("explain: expected files, or a job with --rdzv-endpoint and --rdzv-id")
    return _explain_job(*job) if all(job) else _explain_files(args)


def _explain_job(endpoint: str, run_id: str) -> int:
    with job_source.job_client(endpoint, run_id) as client:
        found = running_job.read(client, run_id)
    print("\n".join(job_status.lines(found)), flush=True)
    for fault in found.faults:
        print_error(fault)
    return EX_CONFIG if found.faults else 0


def _explain_files(args: argparse.Namespace) -> int:
    rules = user_rules.load(args.rules)
    faults = 0
    for path in args.files:
        try:
            content = files.read_text(path)
        except (OSError, ValueError) as error:
            faults += 1
            print_error(f"{path}: cannot be read: {error}")
            continue
        cases = [(path, content)]
        if path.endswith(".jsonl"):  # not splitlines(): a JSON text may hold other line breaks
            cases = [(f"{path}:{number}", line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
        if _is_event(cases[0][1] if cases else ""):
            faults += 1
            print_error(f"{path}: a job's events, and explain reads evidence; elastic-ext timeline {path} -o job.svg shows them")
            continue
        for where, text in cases:
            try:
                print(json.dumps(explained(_parsed(text), rules, args.exit_codes)), flush=True)
            except UsageError as error:
                faults += 1
                print_error(f"{where}: {error}")
    return EX_CONFIG if faults else 0


def explained(value: Any, rules: Sequence[user_rules.UserRule] = (), exit_codes: str = "design") -> dict[str, Any]:
    """Return the object that `explain` prints for one case. Raises UsageError if the case is not evidence."""
    diagnosis = classify.root_cause([classify.classify(case.parse_evidence(value), rules)])
    decision = policy.decide(diagnosis, exit_codes=exit_codes)
    assert decision.response is not None
    return {
        "id": value.get("id"),
        "kind": decision.kind,
        "decision": decision.response.value,
        "exit_code": decision.exit_code,
        "reason": decision.reason,
        "rule": decision.rule,
    }


def _is_event(text: str) -> bool:
    """Return whether a case is an event: people have the file `events_file` at hand, and none with evidence."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("event"), str) and "monotonic" in found


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}") from error
