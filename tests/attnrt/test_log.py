# SPDX-License-Identifier: Apache-2.0
"""The logger "attnrt": what ATTNRT_LOG writes to stderr, what an application hears, silence otherwise."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import attnrt as at
from attnrt.log import logger

ROOT = str(Path(at.__file__).parents[1])
PROGRAM = """
import numpy as np, attnrt as at
v = at.variants
@v.logits
def bent(score, ctx, gain=0.5):
    return score + gain * v.tanh(score)
spec = at.AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=8, q_dtype="float32", variant=bent)
kv = np.ones((2, 1, 4, 1, 8), np.float32)
for _ in range(2):
    at.attention(np.ones((1, 1, 8), np.float32), (kv[0], kv[1]), at.formats.paged([0, 1], [0, 1], [0], [3], 4), spec)
"""


def said(tmp_path, level):
    env = {name: value for name, value in os.environ.items() if name != "ATTNRT_LOG"}
    env |= {"ATTNRT_CACHE_DIR": str(tmp_path)} | ({"ATTNRT_LOG": level} if level else {})
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, env.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()


def test_levels(tmp_path):
    info = said(tmp_path, "info")
    assert sum("compiled in" in line for line in info) == 1, info
    assert any("backend='auto' takes" in line for line in info)
    again = said(tmp_path, "DEBUG")  # from disk
    assert any("found at" in line for line in again) and not any("compiled in" in line for line in again)
    assert said(tmp_path, "warning") == []
    assert said(tmp_path, None) == []


def test_an_application_hears(caplog, monkeypatch):
    """Its own handlers, with the setting or without."""
    monkeypatch.setattr(logger(), "propagate", True)
    spec = at.AttentionSpec(
        num_qo_heads=1, num_kv_heads=1, head_dim=8, q_dtype="float32", variant=at.variants.full()
    )
    kv = np.ones((2, 1, 4, 1, 8), np.float32)
    index = at.formats.paged([0, 1], [0, 1], [0], [3], 4)
    with caplog.at_level(logging.INFO, "attnrt"):
        at.Attention(spec).plan(index)
        at.attention(np.ones((1, 1, 8), np.float32), (kv[0], kv[1]), index, spec)
    assert any("takes" in record.message for record in caplog.records if record.name == "attnrt")
