"""What others wrote, fit for a terminal or a log: no escape sequences, no forged lines. Standard library only."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/\s]*@|[^/\s,@:]+:[^/\s,@]+@")
_PARAMETER = re.compile(r"([?&][^=&\s]+=)[^&\s]+")


def printable(text: str) -> str:
    """Return `text` as one line in which whatever is not printable (controls, lone surrogates, marks that turn the direction of
    writing) stands as Python would write it in a literal.
    """
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def redacted(address: str) -> str:
    """Return a path, URL or endpoint without what may be a secret in it: user and password, the values of parameters."""
    return _PARAMETER.sub(r"\1***", _USER.sub("***@", address))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
