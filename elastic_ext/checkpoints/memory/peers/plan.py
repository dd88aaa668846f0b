"""Which node keeps whose parts. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def keepers(domains: Sequence[str]) -> tuple[int, ...]:
    """Return, for each node, the node that keeps its parts; nothing for less than two nodes.

    Each node keeps the parts of exactly one other. In the order of their domains, it is the node half a circle on: that is in
    another domain wherever such an assignment exists, and in as many cases as possible if one domain has more than half the
    nodes.

    domains: each node's failure domain (the setting `topology`); "": not known, taken for one of its own.
    """
    count = len(domains)
    if count < 2:
        return ()
    order = sorted(range(count), key=lambda node: (domains[node], node))
    after = {node: order[(place + count // 2) % count] for place, node in enumerate(order)}
    return tuple(after[node] for node in range(count))
