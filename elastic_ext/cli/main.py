"""`elastic-ext`: the commands beside torchrun. Imports neither torch nor an agent, so it starts at once and anywhere."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from elastic_ext.base import log_records, settings, user_files
from elastic_ext.base.errors import EX_CONFIG, UsageError
from elastic_ext.base.printable import shown
from elastic_ext.cli import checkpoints as checkpoint_commands
from elastic_ext.failures import case, user_rules
from elastic_ext.failures.classify import classify, root_cause
from elastic_ext.failures.policy import EXIT_CODES, decide
from elastic_ext.failures.user_rules import UserRule

SHOWN = 300  # characters of an error


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0; 78 for wrong usage or input, with one line on stderr for each fault; 1 where
    `checkpoints verify` or `cp` has found damage, 75 where `checkpoints save` has got no save."""
    log_records.install()
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except UsageError as error:
        _complain(str(error))
        return EX_CONFIG
    except BrokenPipeError:  # the reader of our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    options = _Parser(prog="elastic-ext", description="Tools of elastic_ext.")
    commands = options.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    explain = commands.add_parser("explain", help="say what a failure means and what would be done about it")
    explain.description = (
        "Read evidence of failures and print one JSON object per case: id, kind, decision, exit_code (null where the agent "
        "goes on), reason, rule. A bad case is told in one line on stderr, the others are printed; the exit code is 78 then. So "
        "are records of a job that cannot be read."
    )
    explain.add_argument("files", nargs="*", metavar="FILE", help="one JSON object, or in a .jsonl file one on each line")
    explain.add_argument("--rdzv-endpoint", metavar="HOST:PORT[,...]", help="instead of files: the etcd servers of a job")
    explain.add_argument("--rdzv-id", metavar="ID", help="the job: what happened, when, where, what was decided and why")
    explain.add_argument("--rules", metavar="FILE", help="TOML file of rules of your own, as in the setting `rules`")
    explain.add_argument("--exit-codes", choices=sorted(EXIT_CODES), default="design", help="which exit codes to tell")
    explain.set_defaults(run=_explain)
    checkpoint_commands.add(commands)
    examine = commands.add_parser("doctor", help="say whether a job could run here, and what it would know of its failures")
    examine.description = (
        "Look at torch, the entry point, the agent, standbys, etcd, checkpoint_dir, the metrics port, evidence and limits. "
        "Starts no job and leaves nothing behind. The exit code is 78 where a check has failed, else 0."
    )
    examine.add_argument("--rdzv-endpoint", metavar="HOST:PORT[,...]", default="", help="etcd servers to look at, too")
    examine.add_argument("--rdzv-conf", metavar="KEY=VALUE[,...]", default="", help="settings, as torchrun gets them")
    examine.add_argument("--json", action="store_true", help="JSON instead of a screen")
    examine.set_defaults(run=_doctor)
    return options


class _Parser(argparse.ArgumentParser):
    """Wrong usage is 78 in this project, not argparse's 2."""

    def error(self, message: str) -> Any:
        self.exit(EX_CONFIG, shown(f"{self.prog}: {message}; see {self.prog} --help") + "\n")


def _doctor(args: argparse.Namespace) -> int:
    from elastic_ext.cli import doctor

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that others gave
    checks = doctor.examine(args.rdzv_conf, args.rdzv_endpoint, os.environ)
    print(doctor.as_json(checks) if args.json else doctor.rendered(checks), flush=True)
    return doctor.exit_code(checks)


def _explain(args: argparse.Namespace) -> int:
    job = (args.rdzv_endpoint, args.rdzv_id)
    if any(job) == bool(args.files) or any(job) != all(job):
        raise UsageError("explain: expected files, or a job by --rdzv-endpoint and --rdzv-id")
    return _explain_job(*job) if all(job) else _explain_files(args)


def _explain_job(endpoint: str, run_id: str) -> int:
    """TLS and user come from the settings, as for an agent: ELASTIC_EXT_ETCD_CA and so on."""
    from elastic_ext.rendezvous.etcd import job_status
    from elastic_ext.rendezvous.etcd.connect import connect

    with connect(endpoint, settings.read({}, os.environ)) as client:
        found = job_status.read(client, run_id)
    print("\n".join(job_status.lines(found)), flush=True)
    for fault in found.faults:
        _complain(fault)
    return EX_CONFIG if found.faults else 0


def _explain_files(args: argparse.Namespace) -> int:
    rules = user_rules.load(args.rules)
    faults = 0
    for path in args.files:
        for where, text in _texts(path):
            try:
                print(json.dumps(explained(_parsed(text), rules, args.exit_codes)), flush=True)
            except UsageError as error:
                faults += 1
                _complain(f"{where}: {error}")
    return EX_CONFIG if faults else 0


def explained(value: Any, rules: Sequence[UserRule] = (), exit_codes: str = "design") -> dict[str, Any]:
    """What `explain` prints for one case. Raises UsageError for what is no evidence."""
    diagnosis = root_cause([classify(case.evidence(value), rules)])
    decision = decide(diagnosis, exit_codes=exit_codes)
    assert decision.response is not None
    return {
        "id": value.get("id"),
        "kind": decision.kind,
        "decision": decision.response.value,
        "exit_code": decision.exit_code,
        "reason": decision.reason,
        "rule": decision.rule,
    }


def _texts(path: str) -> Iterator[tuple[str, str | UsageError]]:
    """The JSON texts of a file, each with its place for an error message."""
    try:
        content = user_files.text(path)
    except (OSError, ValueError) as error:
        yield path, UsageError(f"cannot be read: {error}")
        return
    if not path.endswith(".jsonl"):
        yield path, content
        return
    for number, line in enumerate(content.split("\n"), 1):  # not splitlines(): a JSON text may hold other line ends
        if line.strip():
            yield f"{path}:{number}", line


def _parsed(text: str | UsageError) -> Any:
    if isinstance(text, UsageError):
        raise text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}") from error


def _complain(text: str) -> None:
    print(f"elastic-ext: {shown(' '.join(text.split()))[:SHOWN]}", file=sys.stderr)
