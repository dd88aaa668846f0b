"""The commands of `elastic-ext`, and how they print lines, errors, and the findings of checks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from elastic_ext.base.errors import EX_CONFIG
from elastic_ext.base.printable import cut, printable, redacted, shown

MAX_CHARACTERS = 300  # of an error
Commands: TypeAlias = "argparse._SubParsersAction[Any]"
OK, WARN, FAIL = "ok", "warn", "fail"


def print_line(line: str) -> None:
    """Print a line. It may hold names and content of files that anyone may have written."""
    print(shown(line), flush=True)


def print_error(text: str) -> None:
    print(f"elastic-ext: {printable(one_line(text))}", file=sys.stderr)


def one_line(error: object) -> str:
    """Return the text of an error as one line without credentials."""
    return cut(redacted(" ".join(str(error).split())), MAX_CHARACTERS)


@dataclass(frozen=True)
class Finding:
    """The result of a check. state: OK, WARN (jobs run, but something is missing) or FAIL (no job can run). advice: or ""."""

    name: str
    state: str
    detail: str
    advice: str = ""


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


def as_json(findings: Sequence[Finding], more: Mapping[str, object] | None = None) -> str:
    """Return {"ok": ..., "checks": [...]} and `more` as JSON; each check has the fields of a Finding."""
    checks = [asdict(finding) for finding in findings]
    return json.dumps({"ok": exit_code(findings) == 0, "checks": checks, **(more or {})}, indent=2)
