# SPDX-License-Identifier: Apache-2.0
"""Threaded products are products."""

import numpy as np
import pytest

from attnrt.examples.generate.product import product


@pytest.mark.parametrize("rows", [1, 2, 9, 64])
@pytest.mark.parametrize("shape", [(576, 576), (576, 3072), (37, 20001)])
@pytest.mark.parametrize("transposed", [False, True])
def test_equals_float64(rows, shape, transposed):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, shape[0])).astype(np.float32)
    w = rng.standard_normal(shape).astype(np.float32)
    w = np.ascontiguousarray(w.T).T if transposed else w
    np.testing.assert_allclose(product(x, w), x.astype(np.float64) @ w.astype(np.float64), atol=2e-3)
