"""`elastic-ext explain`: explains a failure from a file with evidence or from the records of a job in etcd."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from elastic_ext.base import files
from elastic_ext.base.errors import EX_CONFIG, UsageError
from elastic_ext.cli import Commands, job_source, print_error
from elastic_ext.failures import case, user_rules
from elastic_ext.failures.classify import classify, root_cause
from elastic_ext.failures.policy import EXIT_CODES, decide


def add_command(commands: Commands) -> None:
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
    explain.add_argument("--exit-codes", choices=sorted(EXIT_CODES), default="design", help="which set of exit codes to print")
    explain.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain files or a job; return 0, or 78 if something could not be read. Raises UsageError."""
    job = (args.rdzv_endpoint, args.rdzv_id)
    if any(job) == bool(args.files) or any(job) != all(job):
        raise UsageError("explain: expected files, or a job with --rdzv-endpoint and --rdzv-id")
    return _explain_job(*job) if all(job) else _explain_files(args)


def _explain_job(endpoint: str, run_id: str) -> int:
    from elastic_ext.rendezvous import job_status

    with job_source.job_client(endpoint, run_id) as client:
        found = job_status.read(client, run_id)
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
        for where, text in cases:
            try:
                print(json.dumps(explained(_parsed(text), rules, args.exit_codes)), flush=True)
            except UsageError as error:
                faults += 1
                print_error(f"{where}: {error}")
    return EX_CONFIG if faults else 0


def explained(value: Any, rules: Sequence[user_rules.UserRule] = (), exit_codes: str = "design") -> dict[str, Any]:
    """Return the object that `explain` prints for one case. Raises UsageError if the case is not evidence."""
    diagnosis = root_cause([classify(case.parse_evidence(value), rules)])
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


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}") from error
