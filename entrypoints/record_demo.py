"""Record demo.py as an animated picture for the README: text only, each line at the moment when it came.

python entrypoints/record_demo.py entrypoints/demo.svg

Left out, as "...", are the steps before the last ones before the kill, and those between the first ones after it and the end.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

DEMO = Path(__file__).with_name("demo.py")
COLUMNS, ROWS, INDENT = 108, 22, 4 * " "
CHARACTER, LINE, MARGIN = 7.8, 19, 14  # pixels
LONGEST_PAUSE_S = 1.5  # between two lines that are shown; the imports before the first step take longer
STAYS_S = 6.0  # the last picture, before it starts again
COLORS = ((r"^>>>", "#e5534b"), (r" ERROR ", "#e0a030"), (r"resum|The job finished", "#57ab5a"), (r"^\$", "#6cb6ff"))


@dataclass(frozen=True)
class Line:
    """at: seconds from the start."""

    at: float
    text: str


def run() -> list[Line]:
    """Run the demonstration; return what it printed. Raises CalledProcessError if it fails."""
    began, found = time.monotonic(), []
    command = [sys.executable, "-u", str(DEMO)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            found.append(Line(time.monotonic() - began, line.rstrip()))
    if demo.returncode:
        raise subprocess.CalledProcessError(demo.returncode, command)
    return found


def chosen(lines: Sequence[Line]) -> list[Line]:
    """Return the lines around the kill and at the end, with pauses of LONGEST_PAUSE_S at most."""
    kept = [each for each in lines if re.match(r"\s+(epoch|saved|resumed)|>>>|The job| *done|.* (ERROR|resuming) ", each.text)]
    kill = next(at for at, each in enumerate(kept) if each.text.startswith(">>>"))
    again = next(at for at, each in enumerate(kept) if "resumed from" in each.text)
    parts = [[Line(0.0, "$ make demo")], kept[max(0, kill - 7) : again + 7], kept[-3:]]
    shown: list[Line] = []
    now = before = 0.0
    for number, part in enumerate(parts):
        if number:
            shown.append(Line(now, f"{INDENT}..."))
        for each in part:
            now += min(LONGEST_PAUSE_S, max(0.0, each.at - before)) if each.at else 0.0
            before = each.at
            text = re.sub(r"^\d{4}-\d\d-\d\d ([\d:]+),\d+ \S+ ", r"\1 ", each.text).removeprefix(INDENT)
            shown += [Line(now, row) for row in textwrap.wrap(text, COLUMNS, subsequent_indent=INDENT)]
    return shown


def draw(lines: Sequence[Line]) -> str:
    """Return the picture. It shows all at once where animations are off."""
    lasts = lines[-1].at + STAYS_S
    width, height = round(COLUMNS * CHARACTER + 2 * MARGIN), ROWS * LINE + 2 * MARGIN
    styles, texts, scrolls = [], [], ["0%{transform:translateY(0)}"]
    for number, each in enumerate(lines):
        share = 100 * each.at / lasts
        styles.append(f"@keyframes l{number}{{0%{{opacity:0}}{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}")
        color = next((color for pattern, color in COLORS if re.search(pattern, each.text)), "#adbac7")
        texts.append(
            f'<text x="{MARGIN}" y="{MARGIN + LINE * (number + 1) - 5}" fill="{color}" style="animation-name:l{number}">'
            f"{escape(each.text)}</text>"
        )
        if number >= ROWS:
            scrolls.append(f"{share:.2f}%{{transform:translateY(-{LINE * (number - ROWS + 1)}px)}}")
    last = LINE * max(0, len(lines) - ROWS)
    scrolls.append(f"100%{{transform:translateY(-{last}px)}}")
    style = (
        f"text{{font:13px ui-monospace,Menlo,Consolas,monospace;white-space:pre;animation:{lasts:.1f}s step-end infinite}}"
        f"g{{transform:translateY(-{last}px);animation:scroll {lasts:.1f}s step-end infinite}}"
        f"@keyframes scroll{{{''.join(scrolls)}}}{''.join(styles)}"
        "@media(prefers-reduced-motion:reduce){text,g{animation:none}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
        f"<title>make demo: a worker is killed, and training resumes</title><style>{style}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#22272e"/>'
        f'<svg x="0" y="{MARGIN // 2}" width="{width}" height="{height - MARGIN}"><g>{"".join(texts)}</g></svg></svg>\n'
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args(argv)
    args.picture.write_text(draw(chosen(run())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
