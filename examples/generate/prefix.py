# SPDX-License-Identifier: Apache-2.0
"""A prefix tree over prompts, one node per full page, so that a common prefix is stored and computed once.

A node is put in when its prompt is admitted, before its K and V exist, so that two prompts that arrive together share
as well. `filled` says when a reader may follow: every layer appends the step's K and V before it attends, so a reader
may compute the tokens behind a page in the very step that writes the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .pool import PagePool


@dataclass(slots=True, eq=False)
class Node:
    """One stored page: the `page_size` tokens it holds after those of its ancestors.

    `filled` is the step in which its last token is written, None while that is not scheduled. `used` orders eviction.
    """

    tokens: tuple[int, ...]
    page: int
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    filled: int | None = None
    used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What of a prompt is stored: whole pages in order, then perhaps `partial_tokens` first tokens of one more page."""

    nodes: tuple[Node, ...]
    partial: Node | None = None
    partial_tokens: int = 0


class PrefixTree:
    """The tree; it holds every page in it once, for itself."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._root = Node(tokens=(), page=-1, parent=None, filled=-1)
        self._clock = 0

    def match(self, tokens: Sequence[int], step: int) -> Match:
        """Find the longest stored prefix of `tokens`; the pages are not retained.

        The last token is never matched: its row must run, for its logits. A partial page counts only if it was filled
        before `step`, since it is copied before the step runs.
        """
        size = self._pool.page_size
        self._clock += 1
        node = self._root
        nodes: list[Node] = []
        while (len(nodes) + 1) * size < len(tokens):
            child = node.children.get(tuple(tokens[len(nodes) * size : (len(nodes) + 1) * size]))
            if child is None:
                break
            child.used = self._clock
            nodes.append(child)
            node = child
        rest = tuple(tokens[len(nodes) * size : len(tokens) - 1])
        best, length = None, 0
        for child in node.children.values():
            common = _common(child.tokens, rest)
            if common > length and child.filled is not None and child.filled < step:
                best, length = child, common
        if best is not None:
            best.used = self._clock
        return Match(nodes=tuple(nodes), partial=best, partial_tokens=length)

    def store(
        self, tokens: Sequence[int], pages: Sequence[int], filled: int | None
    ) -> list[tuple[int, Node]]:
        """Put in the full pages of `tokens` that are missing, and retain each of them.

        Returns
        -------
        list of (int, Node)
            The new nodes, each with the number of tokens that fills it.
        """
        size, node, new = self._pool.page_size, self._root, []
        for i in range(len(tokens) // size):
            key = tuple(tokens[i * size : (i + 1) * size])
            child = node.children.get(key)
            if child is None:
                page = self._pool.retain(pages[i])
                child = Node(tokens=key, page=page, parent=node, filled=filled, used=self._clock)
                node.children[key] = child
                new.append(((i + 1) * size, child))
            node = child
        return new

    def remove(self, node: Node) -> None:
        """Take a leaf out and let go of its page."""
        assert node.parent is not None and not node.children, "only a leaf can go"
        del node.parent.children[node.tokens]
        self._pool.release(node.page)

    def evict_one(self) -> bool:
        """Free the least recently used leaf that only the tree holds; return whether there was one."""
        leaves = [n for n in self._walk() if not n.children and self._pool.refs(n.page) == 1]
        if leaves:
            self.remove(min(leaves, key=lambda n: n.used))
        return bool(leaves)

    def num_evictable(self) -> int:
        """Pages that repeated evict_one() could free: those held by the tree alone, with all that hangs below."""
        free: set[Node] = set()
        for node in reversed(list(self._walk())):  # children before their parents
            if self._pool.refs(node.page) == 1 and all(c in free for c in node.children.values()):
                free.add(node)
        return len(free)

    def num_pages(self) -> int:
        """Pages in the tree."""
        return sum(1 for _ in self._walk())

    def _walk(self) -> Iterator[Node]:
        """All nodes, parents before their children."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
