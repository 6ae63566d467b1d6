"""Which part of a prefix comes from which of the nodes that hold it equally well.

    a  |------ stripe ------|                              then b stands in for it
    b                       |---- stripe ----|             then a
       first              by load           shared        last of the longest run

Whoever has the shorter queue and the faster link gets more. Stripes are whole runs, so each holder is asked once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .prefix_index import Run

#: A smaller part is not worth a message to another node: at 1 GB/s it comes within a millisecond.
STRIPE_BYTES = 1 << 20
#: Holders that send at once. All of them fill the one link of who receives; more would only be more to wait for.
HOLDERS = 4
#: Parts in which a run is dealt out: finer than this nobody sees.
PARTS = 64


def spread(
    run: Run,
    shared: Mapping[str, int],
    block_bytes: int,
    queue: Callable[[str], float],
    block_seconds: Callable[[str], float],
) -> tuple[list[Run], list[Run]]:
    """The stripes of a run, in its order, and who else could send what of it.

    shared: nodes that hold its blocks from the first on as well as run.node does, and up to which. queue: seconds until
    a node has sent what it was asked for; block_seconds: how long it takes for one more block.
    """
    least = -(-STRIPE_BYTES // block_bytes)
    last = max(shared.values(), default=run.first)
    if last - run.first < 2 * least:
        return [run], []
    others = sorted((node for node in shared if shared[node] == last), key=lambda node: (queue(node), node))
    nodes = [run.node, *others[: HOLDERS - 1]]
    ends = {node: queue(node) for node in nodes}
    counts = dict.fromkeys(nodes, 0)
    left, part = last - run.first, max(least, (last - run.first) // PARTS)
    while left:
        node = min(nodes, key=lambda node: ends[node] + part * block_seconds(node))
        # Less than a part is left for nobody.
        count = part if left >= 2 * part else left
        counts[node] += count
        ends[node] += count * block_seconds(node)
        left -= count
    stripes: list[Run] = []
    at = run.first
    for node in sorted(nodes, key=lambda node: (queue(node), nodes.index(node))):
        if counts[node]:
            stripes.append(run._replace(node=node, first=at, last=at + counts[node]))
            at += counts[node]
    if last < run.last:
        stripes.append(run._replace(first=last))
    return stripes, [run, *(run._replace(node=node, last=last) for node in nodes[1:])]
