"""What others wrote, fit for a terminal or a log: no escape sequences, no forged lines, no credentials. Standard library only.

All logs of this package pass `observe/log_records.py`, all its errors `ElasticExtError.__str__`; what the commands print, and
what torch prints for us, is made fit where it is printed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# user:password@ of a URL. An access key's secret may hold slashes, which people leave as they are; the bound keeps it linear.
_USERINFO = re.compile(r"://(?:[^\s/]{1,512}|[^\s/@:]{1,512}:[^\s@]{1,512})@")
# Of an endpoint without a scheme; what it is put in (quotes, "endpoint=") stays.
_BARE_USERINFO = re.compile(r"""(?<![^\s,'"=(\[])[^\s/,@:'"=(\[]{1,512}:[^\s/,@]{1,512}@""")
_SECRET_OPTION = re.compile(
    r"([?&][\w-]{0,40}(?:key|secret|token|passw(?:or)?d|signature|sig|credentials?)[\w-]{0,40}=)[^\s&#'\"\\]+", re.IGNORECASE
)

_SECRET_VARIABLE = re.compile(r"KEY|SECRET|TOKEN|PASSW|CREDENTIAL", re.IGNORECASE)
SECRET_CHARACTERS = 6  # a shorter value is in too many texts that are none of it


def printable(text: str) -> str:
    """Return `text` as one line in which whatever is not printable (controls, lone surrogates, marks that turn the direction of
    writing) stands as Python would write it in a literal.
    """
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def literal(value: object, most: int) -> str:
    """A value that somebody else gave, as Python would write it, up to `most` characters; a number or a nesting that Python
    refuses to write is only named.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__}, too large to show>"
    return text if len(text) <= most else f"{text[:most]}..."


def redacted(text: str) -> str:
    """`text` without the credentials of URLs and endpoints: what is before the @, and options that are named like a secret."""
    if "@" in text:
        text = _BARE_USERINFO.sub("***@", _USERINFO.sub("://***@", text))
    return _SECRET_OPTION.sub(r"\1***", text) if "://" in text else text


def masked(text: str, environ: Mapping[str, str]) -> str:
    """`text` without the values of variables that are named like a secret."""
    for name, value in environ.items():
        if len(value) >= SECRET_CHARACTERS and _SECRET_VARIABLE.search(name):
            text = text.replace(value, "***")
    return text


def shown(text: str) -> str:
    """One line for people: `printable` and `redacted`."""
    return printable(redacted(text))


class Block(str):
    """Text of several lines that a log shows as such; any other text is shown as one line."""


def shown_lines(text: str) -> str:
    """Several lines for people, for who indents them."""
    return "\n".join(printable(line.expandtabs()) for line in redacted(text).splitlines())


def shown_block(text: str) -> Block:
    """Several lines for people. All but the first are indented: none can be taken for a line of the log itself."""
    first, *others = shown_lines(text).split("\n")
    return Block("\n".join([first, *(line if line[:1] in ("", " ") else f"  {line}" for line in others)]))
