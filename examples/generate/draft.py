# SPDX-License-Identifier: Apache-2.0
"""Tree speculation without a draft model: continuations that followed the same words before, merged into a tree.

The idea of drafting from the sequence's own n-grams is prompt lookup decoding; that of verifying a tree of guesses in one
pass is SpecInfer's. A draft changes how many tokens a step yields and never which ones: every accepted token is the one
that the sampler picks from the verified row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_LONGEST, _SHORTEST = 3, 2  # n-gram lengths tried, longest first; single words guess wrong nine times in ten
_WIDTH = 3  # continuations merged into one tree


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """Rows of one step of one sequence. Row 0 is its last, certain token; the others are guesses.

    tokens [rows]; parents [rows], each an earlier row, -1 for row 0; depth [rows], 0 for row 0.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def depth(self) -> tuple[int, ...]:
        """Steps from row 0 to each row."""
        depth: list[int] = []
        for parent in self.parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        return tuple(depth)


def propose(tokens: Sequence[int], max_guesses: int, max_depth: int) -> DraftTree:
    """Guess what follows `tokens`: the continuations of earlier places with the same last 3 or 2 tokens.

    Parameters
    ----------
    max_guesses : int
        Rows besides row 0.
    max_depth : int
        Tokens that one path may guess.
    """
    rows, parents = [tokens[-1]], [-1]
    child: dict[tuple[int, int], int] = {}
    paths = 0
    for place in _places(tokens):
        if paths == _WIDTH or len(rows) > max_guesses:
            break
        at, grew = 0, False
        for token in tokens[place : place + max_depth]:
            if (at, token) not in child:
                if len(rows) > max_guesses:
                    break
                child[at, token] = len(rows)
                rows.append(token)
                parents.append(at)
                grew = True
            at = child[at, token]
        paths += grew
    return DraftTree(tokens=tuple(rows), parents=tuple(parents))


def _places(tokens: Sequence[int]) -> list[int]:
    """Where earlier occurrences of the last n tokens end, longer n first, then the latest first."""
    ids = np.asarray(tokens)
    found: dict[int, None] = {}
    for n in range(min(_LONGEST, len(ids) - 1), _SHORTEST - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], n)
        for start in np.flatnonzero((windows == ids[-n:]).all(axis=1))[::-1]:
            found.setdefault(int(start) + n)
    return list(found)


def verify(tree: DraftTree, choose: Callable[[int, int], int]) -> tuple[list[int], list[int]]:
    """Walk the tree along the tokens that are really chosen.

    Parameters
    ----------
    choose : callable (row, depth) -> token
        The token that follows row `row`, which lies `depth` behind row 0.

    Returns
    -------
    path : list[int]
        Rows whose tokens are right, row 0 first.
    tokens : list[int]
        The new tokens: those of the accepted rows after row 0, and one more, chosen from the last of them.
    """
    child = {(p, t): i for i, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path, tokens = [0], []
    while True:
        tokens.append(choose(path[-1], len(path) - 1))
        row = child.get((path[-1], tokens[-1]))
        if row is None:
            return path, tokens
        path.append(row)
