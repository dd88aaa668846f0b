"""The lines that a library is known to write as it ends the process, out of all that was printed.

Scripts print much and go on: warnings, samples, the errors of a tracker. So a line counts here only if its form shows who wrote
it: torch's C++ log, NCCL, the C++ runtime, glibc, a GPU's driver, Slurm. Pure.

To add a writer: one row of LINE_WRITERS, and one in `tests/failures/test_abort_lines.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic_ext.failures.evidence import SearchText
from elastic_ext.failures.torch_texts import LAST_ERROR, OWN_LINES
from elastic_ext.failures.traceback_forms import HEADER
from elastic_ext.failures.tracebacks import QUIET_STARTS, QUIET_TEXTS

MAX_THROWN = 8  # lines of what an exception of C++ says


@dataclass(frozen=True)
class LineWriter:
    """Whose line it is, and how it begins, in lower case."""

    name: str
    begins: str  # a regular expression


LINE_WRITERS = (
    LineWriter("torch's log, at the levels error and fatal", r"\[[ef][\d ][^\]\n]{0,80}\.(?:cpp|hpp|cc|cu|h):\d"),
    LineWriter("a process group of torch, nccl2's", r"\[tc\]"),
    LineWriter("glog", r"[ef]\d{4} \d\d:\d\d:\d\d\.\d{1,9} {1,9}\d{1,9} [\w./-]{1,200}:\d{1,9}\] "),
    LineWriter("NCCL", r"[\w.-]{1,255}:\d{1,9}:\d{1,9} \[\d{1,9}\] [\w/.:-]{0,80} ?nccl warn "),
    LineWriter("NCCL, without its host", r"nccl warn "),
    LineWriter("the C++ runtime", r"terminate called |libc\+\+abi: "),
    LineWriter("Python's fault handler", r"fatal python error: "),
    LineWriter("LLVM", r"llvm error: "),
    LineWriter(
        "glibc, its heap", r"double free or corruption|(?:free|malloc|realloc|munmap_chunk)\(\): |corrupted (?:size|double)"
    ),
    LineWriter("glibc, its stack", r"\*\*\* .{1,80} \*\*\*: terminated"),
    LineWriter("an assertion of C", r"[\w./-]{1,255}: [\w./-]{1,255}\.(?:c|cc|cpp|cu|h):\d{1,9}: .{1,300}assertion "),
    LineWriter("an assertion on a GPU", r"[\w./-]{1,255}\.cu:\d{1,9}: .{1,300}assertion "),
    LineWriter("ROCm", r":\d:[\w.]{1,80}\.cpp {0,40}:\d{1,9}"),
    LineWriter("ROCm's driver", r"(?:memory access fault|hw exception) by gpu node-\d|\"hiperror"),
    LineWriter(
        "UCX",
        r"(?:\[\d{1,12}\.\d{1,9}\] )?\[[\w.-]{1,80}:\d{1,9} {0,5}:\d{1,5}(?::\d{1,9})?\] {1,9}\w{1,80}\.c:\d{1,9} ",
    ),
    LineWriter("Slurm", r"slurmstepd: error: "),
)
# What launchers put before a line: "[rank3]:" is torch's, "[default3]:" torchrun's, and "3: " that of srun.
_PREFIX = re.compile(r"\[(?:rank|default)\d{1,9}\]: ?|\d{1,9}: ")
MAX_PREFIXES = 3
_BAR = re.compile(r"(?:it/s|s/it)[^\]\n]{0,40}\]")
_WRITTEN = re.compile("|".join(f"(?:{each.begins})" for each in LINE_WRITERS))
_FIRST = frozenset('[eftl dmrc*:"shn')  # letters with which these lines begin, but those of assertions and of NCCL
_QUIET_STARTS, _QUIET_TEXTS = (tuple(map(str.lower, texts)) for texts in (QUIET_STARTS, QUIET_TEXTS))
_LOGGED = re.compile(r"\[[wi][\d ][^\]\n]{0,80}\.(?:cpp|hpp|cc|cu|h):\d")  # torch's log, at the levels warning and info
_GOES_ON = ("last error", LAST_ERROR.strip())  # before NCCL's own words, on the next line


@dataclass(frozen=True)
class AbortLines:
    """What libraries have written, as text with their lines only. "": nothing."""

    libraries: str = ""
    # Of these, the lines by which nccl2, and torch's watchdog in Python, say that they fail, and why. Other threads go on for up
    # to 15 s after the last of them, so nothing else that was printed says why.
    backend: str = ""
    at_the_end: bool = False  # whether nothing but a traceback follows them, so that the process went no further


def abort_lines(tail: str) -> AbortLines:
    """Return the lines of known writers. tail: the end of stderr. Linear in its length."""
    lines, plain = tail.split("\n"), SearchText(tail).ascii.split("\n")  # as many
    written = _written(plain)
    own = {number for number in written if any(all(part in plain[number] for part in parts) for parts in OWN_LINES)}
    own |= {number + 1 for number in own if LAST_ERROR in "".join(plain[number + 1 : number + 2])}
    return AbortLines(
        "\n".join(lines[number] for number in written),
        "\n".join(lines[number] for number in sorted(own)),
        bool(written) and _ends_there(plain[written[-1] + 1 :]),
    )


def _ends_there(behind: list[str]) -> bool:
    """Return whether these lines, up to a traceback, may stand behind the last words of a process."""
    for whole in behind:
        line = _without_prefixes(whole)
        if HEADER.lower() in line:
            break
        quiet = line.startswith((" ", *_QUIET_STARTS)) or any(text in line for text in _QUIET_TEXTS) or not line.strip()
        if not quiet and not _LOGGED.match(line):
            return False
    return True


def _written(plain: list[str]) -> list[int]:
    """Return the numbers of the lines that known writers have written, with the lines that go on with them."""
    found: list[int] = []
    thrown = 0  # how many more lines belong to an exception of C++
    inside = False  # whether the line before belongs to a writer
    before = ""  # that line
    for number, whole in enumerate(plain):
        line = _without_prefixes(whole)
        may = line[:1] in _FIRST or "assertion" in line or "nccl warn" in line
        written = may and _WRITTEN.match(line) is not None
        if written and line.startswith(("terminate called", "libc++abi")):
            thrown = MAX_THROWN
        goes_on = inside and (thrown > 0 or line.startswith(_GOES_ON) or before.startswith(_GOES_ON))
        inside, before = bool(line.strip()) and (written or goes_on), line
        thrown = thrown - 1 if inside else 0
        if inside:
            found.append(number)
    return found


def _without_prefixes(line: str) -> str:
    line = line[line.rfind("\r") + 1 :]
    if bars := list(_BAR.finditer(line)):  # its own line begins where a progress bar ends
        line = line[bars[-1].end() :]
    for _ in range(MAX_PREFIXES):
        if not (prefix := _PREFIX.match(line)):
            break
        line = line[prefix.end() :]
    return line
