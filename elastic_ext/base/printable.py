"""Makes text from outside safe for a terminal or a log: no escape sequences, no forged lines, no credentials.

`base/log_records.py` cleans all logs of this package, and `ElasticExtError.__str__` all its errors. Code that prints text, or
passes text to torch to print, cleans it itself. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

# user:password@ in a URL. An access key's secret may hold unescaped slashes. The bounds keep the search linear.
_USERINFO = re.compile(r"://(?:[^\s/]{1,512}|[^\s/@:]{1,512}:[^\s@]{1,512})@")
# user:password@ in an endpoint without a scheme; text around it (quotes, "endpoint=") stays.
_BARE_USERINFO = re.compile(r"""(?<![^\s,'"=(\[])[^\s/,@:'"=(\[]{1,512}:[^\s/,@]{1,512}@""")
_SECRET_OPTION = re.compile(
    r"([?&][\w-]{0,40}(?:key|secret|token|passw(?:or)?d|signature|sig|credentials?)[\w-]{0,40}=)[^\s&#'\"\\]+", re.IGNORECASE
)

_SECRET_VARIABLE = re.compile(r"KEY|SECRET|TOKEN|PASSW|CREDENTIAL", re.IGNORECASE)
SECRET_CHARACTERS = 6  # shorter values occur by chance in too many texts
NO_RUN_IDS = ("", "none")  # of a job that got no `--rdzv-id`: torch calls it "none"
MOST_RANKS = 8  # and runs of them, that a text names


def printable(text: str) -> str:
    """Return `text` as one line. Unprintable characters (controls, lone surrogates, marks of writing direction) are escaped as in
    a Python literal.
    """
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def counted(number: int, what: str) -> str:
    """Return e.g. "1 node" or "2 nodes"; what: the singular, whose first word gets the s."""
    first, *rest = what.split(" ")
    return " ".join((str(number), first if number == 1 else f"{first}s", *rest))


def named_job(run_id: str) -> str:
    """Return e.g. "job j1"."""
    return "job without --rdzv-id" if run_id in NO_RUN_IDS else f"job {run_id}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return e.g. "rank 3" or "ranks 0 to 3, 7"; of many, the first, and how many more there are."""
    ordered = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), lambda item: item[1] - item[0])]
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:MOST_RANKS]]
    more = sum(map(len, runs[MOST_RANKS:]))
    return f"rank{'s' * (len(ordered) != 1)} {', '.join(words)}{f' and {more} more' * bool(more)}"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def literal(value: object, most: int) -> str:
    """Return repr() of a value from outside, up to `most` characters.

    For a value that Python cannot format (a huge number, deep nesting), return only the name of its type.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__}, too large to show>"
    return text if len(text) <= most else f"{text[:most]}..."


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters: a longer one ends at a word, with an ellipsis."""
    if len(text) <= most:
        return text
    whole = text[:most].rpartition(" ")[0].rstrip(" .,;:(") if " " in text[most // 2 : most] else text[: most - 1]
    return f"{whole}…"


def beginnings(texts: Sequence[str], most: int, least: int = 0) -> str:
    """Join the beginnings of texts, in equal shares of `most` characters; what a short one leaves goes to the longer ones.

    least: characters of each; if they are too many, the last texts are left out.
    """
    left, shares = most - max(0, len(texts) - 1), [0] * len(texts)
    for done, number in enumerate(sorted(range(len(texts)), key=lambda each: len(texts[each]))):
        shares[number] = min(len(texts[number]), max(least, left // (len(texts) - done)))
        left -= shares[number]
    return "\n".join(text[:share] for text, share in zip(texts, shares, strict=True))[:most]


def redacted(text: str) -> str:
    """Return `text` without credentials in URLs and endpoints: the part before the @, and options whose names look secret."""
    if "@" in text:
        text = _BARE_USERINFO.sub("***@", _USERINFO.sub("://***@", text))
    return _SECRET_OPTION.sub(r"\1***", text) if "://" in text else text


def masked(text: str, environ: Mapping[str, str]) -> str:
    """Return `text` without the values of variables whose names look like those of secrets."""
    for name, value in environ.items():
        if len(value) >= SECRET_CHARACTERS and _SECRET_VARIABLE.search(name):
            text = text.replace(value, "***")
    return text


def shown(text: str) -> str:
    """Return one line for people to read: `printable` and `redacted`."""
    return printable(redacted(text))


class Block(str):
    """Text that a log shows on several lines; it shows any other text on one line."""


def shown_lines(text: str) -> str:
    """Return several lines for people to read; the caller indents them."""
    return "\n".join(printable(line.expandtabs()) for line in redacted(text).splitlines())


def shown_block(text: str) -> Block:
    """Return several lines for people to read. All but the first are indented, so none looks like a log record of its own."""
    first, *others = shown_lines(text).split("\n")
    return Block("\n".join([first, *(line if line[:1] in ("", " ") else f"  {line}" for line in others)]))
