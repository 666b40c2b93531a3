# SPDX-License-Identifier: Apache-2.0
"""Draft trees: what is proposed, and that verification yields the chosen tokens whatever was proposed."""

import numpy as np
import pytest

from attnrt.examples.generate.draft import propose, verify
from attnrt.examples.generate.sampling import Sampler


def test_proposes_what_followed_the_same_words():
    #              0  1  2  3  4  5  6  7  8  9
    tree = propose([5, 6, 7, 8, 9, 5, 6, 7, 1, 5, 6, 7], max_guesses=6, max_depth=3)
    paths = {(1, 5, 6), (8, 9, 5)}  # after the two earlier "5 6 7"
    found = set()
    for leaf in range(1, len(tree.tokens)):
        path, row = (), leaf
        while row:
            path, row = (tree.tokens[row], *path), tree.parents[row]
        found.add(path)
    assert paths <= found and len(tree.tokens) == 7
    assert tree.tokens[0] == 7 and tree.parents[0] == -1
    assert all(p < i for i, p in enumerate(tree.parents))
    assert tree.depth == (0, 1, 2, 3, 1, 2, 3)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [3, 3, 3, 3], list(range(20))])
@pytest.mark.parametrize("guesses, depth", [(0, 4), (3, 0), (1, 1), (8, 4)])
def test_respects_its_limits(tokens, guesses, depth):
    tree = propose(tokens, guesses, depth)
    assert len(tree.tokens) <= guesses + 1 and max(tree.depth) <= depth
    assert len({(p, t) for p, t in zip(tree.parents, tree.tokens, strict=True)}) == len(tree.tokens)


def test_verification_is_plain_decoding():
    """With a fixed rule for the next token, accepted tokens are those of one-by-one decoding, for random histories."""
    rng = np.random.default_rng(0)
    table = rng.integers(0, 4, (4, 4))
    accepted = 0
    for _ in range(200):
        tokens = rng.integers(0, 4, 2).tolist()
        for _ in range(rng.integers(0, 40)):  # a history that keeps to the rule four times in five
            tokens.append(int(table[tokens[-2], tokens[-1]] if rng.random() < 0.8 else rng.integers(4)))
        tree = propose(tokens, 7, 4)

        def follow(row, tree=tree, tokens=tokens):
            parent = tokens[-2] if tree.parents[row] < 0 else tree.tokens[tree.parents[row]]
            return int(table[parent, tree.tokens[row]])

        path, new = verify(tree, lambda row, depth, follow=follow: follow(row))
        plain = list(tokens)
        for _ in new:
            plain.append(int(table[plain[-2], plain[-1]]))
        assert plain[len(tokens) :] == new and len(path) == len(new)
        accepted += len(new) - 1
    assert accepted > 100


def test_sampler_depends_on_seed_sample_and_position_only():
    logits = np.random.default_rng(1).standard_normal(50).astype(np.float32)
    make = lambda **kw: Sampler(temperature=0.9, **kw)  # noqa: E731
    draws = [make(seed=1, stream=(2, 0)).choose(logits, p) for p in range(200)]
    assert draws == [make(seed=1, stream=(2, 0)).choose(logits.copy(), p) for p in range(200)]
    assert draws != [make(seed=1, stream=(2, 1)).choose(logits, p) for p in range(200)]
    assert draws != [make(seed=2, stream=(2, 0)).choose(logits, p) for p in range(200)]
    assert {Sampler().choose(logits, p) for p in range(5)} == {int(logits.argmax())}


def test_sampler_draws_from_the_softmax():
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    draws = [Sampler(temperature=1.0, seed=4).choose(logits, p) for p in range(4000)]
    np.testing.assert_allclose(np.bincount(draws, minlength=3) / 4000, [0.5, 0.3, 0.2], atol=0.03)
