"""`elastic-ext doctor`: checks, before a job starts, whether it could run here and what it would know about its failures.

The checks (`doctor_checks`) run in parallel, each in a thread with a deadline.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from elastic_ext.base.errors import EX_CONFIG, ElasticExtError
from elastic_ext.base.printable import printable
from elastic_ext.base.settings import Settings
from elastic_ext.cli.doctor_checks import CHECKS, FAIL, WARN, Finding, Inputs, check_settings, one_line

SETTINGS_S = 10.0  # the settings file may be on a file server that does not answer


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 78 if a check failed, else 0."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names from outside
    findings = examine(args.rdzv_conf, args.rdzv_endpoint, os.environ)
    print(as_json(findings) if args.json else rendered(findings), flush=True)
    return exit_code(findings)


def examine(rdzv_conf: str, endpoint: str, environ: Mapping[str, str]) -> list[Finding]:
    """Run all checks, within PROBE_S. Never raises, whatever it finds.

    Args:
        rdzv_conf: as torchrun's option.
        endpoint: etcd's endpoint; "" to not check etcd.
    """
    read: list[Settings] = []
    first = _RunningCheck("settings", lambda: [check_settings(rdzv_conf, environ, read)], SETTINGS_S).result()
    inputs = Inputs(read[0] if read else Settings(), endpoint, environ)
    running = [_RunningCheck(name, functools.partial(check, inputs), deadline_s) for name, check, deadline_s in CHECKS]
    return [*first, *(finding for each in running for finding in each.result())]


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 78 if a check failed, else 0."""
    return EX_CONFIG if any(finding.state == FAIL for finding in findings) else 0


def rendered(findings: Sequence[Finding]) -> str:
    """Return the text to print: one line per finding, and one more for its advice."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:4}  {finding.name:{width}}  {printable(finding.detail)}")
        if finding.advice:
            lines.append(f"{'':4}  {'':{width}}  -> {printable(finding.advice)}")
    counts = {state: sum(finding.state == state for finding in findings) for state in (FAIL, WARN)}
    lines.append(f"\n{len(findings)} checks: {counts[FAIL]} failed, {counts[WARN]} with a warning")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """Return {"ok": ..., "checks": [...]} as JSON; each check has the fields of a Finding."""
    return json.dumps({"ok": exit_code(findings) == 0, "checks": [asdict(finding) for finding in findings]}, indent=2)


class _RunningCheck:
    """A check in its own thread, which is abandoned if it does not end in time."""

    def __init__(self, name: str, check: Callable[[], list[Finding]], deadline_s: float) -> None:
        self._name, self._check = name, check
        self._limit_s, self._deadline = deadline_s, time.monotonic() + deadline_s
        self._found: list[Finding] | None = None
        self._thread = threading.Thread(target=self._run, name=f"elastic_ext-doctor-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._check()
        except (ElasticExtError, OSError) as error:
            self._found = [Finding(self._name, FAIL, one_line(error))]
        except Exception as error:  # noqa: BLE001 - the top of a thread; the finding reports it
            self._found = [Finding(self._name, FAIL, f"{type(error).__name__}: {one_line(error)}")]

    def result(self) -> list[Finding]:
        """Wait for the check, until its deadline at most; return its findings."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        found = self._found
        return [Finding(self._name, FAIL, f"no answer within {self._limit_s:g} s")] if found is None else found
