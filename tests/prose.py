"""What the prose of a page is like: how long its sentences are, and how it speaks to its reader."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Prose:
    """longest: the sentences of more than MOST_WORDS words. of, you: how often each comes in a thousand words."""

    words: int
    per_sentence: float
    longest: tuple[str, ...]
    of: float
    you: float


MOST_WORDS = 25  # of a sentence


def measure(page: str) -> Prose:
    """Measure a page of Markdown without its blocks of code, tables, headings and targets of links."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)  # each point begins a sentence
    sentences = [each for part in re.split(r"\n\s*\n", text) for each in re.split(r"(?<=[.!?:;])\s+", part) if _words(each)]
    counts = [len(_words(each)) for each in sentences]
    words = [word.lower() for each in sentences for word in _words(each)]
    thousand = 1000 / max(1, len(words))
    return Prose(
        words=len(words),
        per_sentence=len(words) / max(1, len(counts)),
        longest=tuple(" ".join(each.split()) for each, count in zip(sentences, counts, strict=True) if count > MOST_WORDS),
        of=words.count("of") * thousand,
        you=sum(word in ("you", "your", "yours") for word in words) * thousand,
    )


def _words(sentence: str) -> list[str]:
    """Code in backquotes is one word."""
    return re.findall(r"[A-Za-z0-9][\w'’-]*", re.sub(r"`[^`]*`", "code", sentence))


if __name__ == "__main__":
    import sys
    from pathlib import Path

    for name in sys.argv[1:]:
        found = measure(Path(name).read_text())
        print(f"{name}: {found.words} words, {found.per_sentence:.1f} in a sentence, of {found.of:.1f}, you {found.you:.1f}")
        for sentence in found.longest:
            print(f"  {sentence}")
