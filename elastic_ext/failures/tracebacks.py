"""Reads the exception out of a traceback that was printed, for scripts whose exception nothing recorded. Pure.

`FORMS` of `traceback_forms` names what it reads; a new form is a row there. Colours (ANSI escapes) are removed first. Each line
may have a prefix, as torch and torchrun put one before the lines of a rank.

A class name is never a part of one: one that ends the text, without a newline or a colon, may be cut, so only Python's own count.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base.log_records import MARK
from elastic_ext.failures import traceback_forms as forms
from elastic_ext.failures.evidence import RaisedException, Wrapped
from elastic_ext.failures.traceback_forms import CAUSE, CUT, FORMS, MAX_LINE, TITLE, PrintedTraceback, TracebackForm

HEADER = forms.HEADER
IGNORED = "Exception ignored "  # of a destructor, say: the line above its traceback, and the script goes on
# What stands above or before tracebacks that end no script: of a thread, at the exit, and of a Ray task that no call waits for.
SURVIVED = (IGNORED, "Exception in thread ", "Error in atexit._run_exitfuncs:", "Unhandled error (suppress with")
CONTEXT = "During handling of the above exception, another exception occurred:"
MAX_TEXT = 256 * 1024  # characters; the last ones are read
MAX_CAUSES = 4
MAX_SKIPPED = 200  # tracebacks that ended no script, and lines that only seem to start one
MAX_BARS = 2
MAX_BETWEEN = 12  # lines from a traceback up to the sentence that joins it to the one above

# What may follow the exception that ended a script. First how a line begins, then what it holds anywhere.
QUIET_STARTS = (
    "Set the environment variable HYDRA_FULL_ERROR=1",  # hydra
    *SURVIVED, "sys:1: ", "  warnings.warn(", "nanobind: ", "terminate called without an active exception",  # at the exit
    "make: *** ", "srun: ", "slurmstepd: ", "wandb: ",  # what started the script; wandb's summary
    # lines without an indent of messages: of CUDA, NCCL, torch.compile, Hugging Face and Ray; and how rich marks notes
    "CUDA kernel errors might be asynchronously", "For debugging consider passing CUDA", "Compile with `TORCH_USE_CUDA_DSA`",
    "Device-side assertion tracking was not", "Search for `cuda", "Exception raised from ", "frame #", "<omitting python",
    "Last error:", "nccl", "from user code:", "Set TORCHDYNAMO_VERBOSE=1", "Set TORCH_LOGS=", "You can suppress this exception",
    "Checkout your internet connection", "Check your internet connection", "The actor is dead because ", "[NOTE] ",
)  # fmt: skip
QUIET_TEXTS = (
    MARK, "torch/distributed/elastic/", "torch/distributed/run.py", "torch.distributed.elastic.",  # this package, torchrun
    "destroy_process_group() was not called", "process group has NOT been destroyed", "resource_tracker", "conda.cli.main_run",
)  # fmt: skip
_QUIET = re.compile(
    r"[^\s:]{1,200}: line \d{1,9}: |\+{1,9} |"  # a shell, also with -x
    r"(?:\[rank\d{1,6}\]: ?)?\[[WI]\d{4} [^\]\n]{1,200}\.cpp:\d{1,6}\] "  # a warning of a thread in torch's C++
)

# Python's own names. "Exception" is left out: it begins others.
_OWN_NAMES = frozenset(
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
) - {"Exception", "BaseException"}
_ANSI = re.compile(r"\x1b(?:\[[0-?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,2000}(?:\x07|\x1b\\))")


@dataclass(frozen=True)
class _Block:
    read: PrintedTraceback | None  # None: it is cut
    first: int
    end: int  # number of the line where what follows it ends
    above: str  # the line above it and those that it is joined to, and the first line of these


def last_exception(text: str) -> RaisedException | None:
    """Return the exception of the last traceback in `text`, or None. Never raises.

    What it was raised from, and the members of a group, are in `wrapped`. What was handled when it was raised is not.
    """
    return _last(_lines(text))


def ended_with(text: str) -> RaisedException | None:
    """Return the exception of a complete traceback that ends `text`, or None: then the script may have gone on. Never raises.

    These may follow it: lines of `QUIET_STARTS` and `QUIET_TEXTS`, a shell's, warnings of torch's C++, and `MAX_BARS` lines that
    show one state of a tqdm bar. So may other ranks' and Ray workers' lines, tracebacks of `SURVIVED`, and the rest of its
    message: lines with an indent, or below one that ends with a colon, a comma or a bracket. It may also be lines with torch's
    "[rank0]: ", those in the margin of a group or in the column of a log record by rich, and those that rich has wrapped.

    Any other line without an indent may be output. So a note hides the end, in Python's own form without a prefix.
    The traceback of a Ray worker, which its driver prints, is another process's. A child's counts: a parent that goes on prints.
    """
    lines = _of_this_process(_lines(text))
    for block in _blocks(lines):
        if block.read is None or not block.read.whole or not _is_quiet(lines, block.read, block.end):
            return None
        if not any(text in block.above for text in SURVIVED):
            return _with_causes(lines, block.read, block.first).exception
    return None


def _lines(text: str) -> list[str]:
    text = text[-MAX_TEXT:]
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    lines = text.split("\n")
    is_whole = next(reversed(lines[-1][-100:].split()), "") in _OWN_NAMES
    return lines if is_whole or not lines[-1] else [*lines[:-1], lines[-1] + CUT]


def _of_this_process(lines: list[str]) -> list[str]:
    if (found := _start(lines, len(lines))) and (process := forms.PROCESS.match(lines[found[1]])):
        lines = [line[process.end() :] for line in lines if line.startswith(process[0])]
    return [line for line in lines if not (line.startswith("(") and forms.ACTOR.match(line))]


def _is_quiet(lines: Sequence[str], read: PrintedTraceback, end: int) -> bool:
    """Whether nothing of the script's stands behind the exception, see `ended_with`."""
    is_ranks = bool(forms.RANK.search(read.prefix))
    before, bars = lines[read.last], 0
    for line in lines[read.last + 1 : end]:
        bare = (row := line.removeprefix(read.prefix)[:MAX_LINE].removesuffix(CUT)).strip()
        is_bar = bare.count("%|") == 1 and ("it/s" in bare or "s/it" in bare)
        bars += is_bar
        if not (
            not bare
            or (is_ranks and line.startswith(read.prefix))
            or row.startswith(QUIET_STARTS)
            or any(text in row for text in QUIET_TEXTS)
            or _QUIET.match(row)
            or (is_bar and bars <= MAX_BARS)
            or before.rstrip().endswith((":", ",", "(", "[", "{"))
            or (before.strip() and row[0] in " \t" and not is_bar)
            or (IGNORED in before and forms.raised_in(bare))
        ):
            return False
        before = row
    return True


def _last(lines: Sequence[str]) -> RaisedException | None:
    for block in _blocks(lines):
        if IGNORED not in block.above:
            return _with_causes(lines, block.read, block.first).exception if block.read else None
    return None


def _blocks(lines: Sequence[str]) -> Iterator[_Block]:
    """Yield the tracebacks from the last one up; of those that a sentence joins, the last one only."""
    end = until = len(lines)
    for _ in range(MAX_SKIPPED):
        if (found := _start(lines, until)) is None:
            return
        form, first = found
        read = form.read(lines, first, end)
        until = first
        if read is None and not form.sure:
            continue
        top, sentence = first, _joined(lines, first)[0]
        while sentence and (upper := _start(lines, top)):
            top = upper[1]
            sentence = _joined(lines, top)[0]
        yield _Block(read, first, end, f"{_joined(lines, top)[1]}\n{lines[top]}")
        end = until = top


def _start(lines: Sequence[str], end: int) -> tuple[TracebackForm, int] | None:
    """Return the last traceback before a line: its form, and the number of its first line."""
    for number in range(end - 1, -1, -1):
        for form in FORMS if lines[number] else ():
            if form.sign in lines[number] and (first := form.start(lines, number)) is not None:
                return form, first
    return None


def _joined(lines: Sequence[str], first: int) -> tuple[str, str]:
    """Return the sentence that joins a traceback to the one above it, or "", and the line above it."""
    before = lines[first].partition(TITLE)[0].removesuffix("Exception Group ").rstrip("─- +╭┌") if TITLE in lines[first] else ""
    window = [line[:MAX_LINE] for line in lines[max(0, first - MAX_BETWEEN) : first]]
    window = [line for line in window if line.startswith(before)] or window
    nearest, joined = "".join(window[-1:]), ""
    for line in reversed(window):
        if TITLE in line:
            break
        if bare := line.removeprefix(before).strip():
            joined = f"{bare[:200]} {joined}"[:400]
        for sentence in (CAUSE, CONTEXT):
            if sentence in joined:  # rich wraps it
                return sentence, nearest
    return "", nearest


def _with_causes(lines: Sequence[str], read: PrintedTraceback, first: int) -> PrintedTraceback:
    causes: list[Wrapped] = []
    while len(causes) <= MAX_CAUSES and _joined(lines, first)[0] == CAUSE and (upper := _start(lines, first)):
        form, top = upper
        if (above := form.read(lines, top, first)) is None:
            break
        causes += [Wrapped(above.exception.type, above.exception.message), *above.exception.wrapped]
        first = top
    return replace(read, exception=replace(read.exception, wrapped=(*causes, *read.exception.wrapped)))
