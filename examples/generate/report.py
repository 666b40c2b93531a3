# SPDX-License-Identifier: Apache-2.0
"""Numbers of a finished run: one dict for --json, and lines made from the same dict for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .compare import Comparison
from .engine import Engine


def summarise(engine: Engine, seconds: float, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """Return what happened; times in milliseconds unless the key says seconds, memory in bytes."""
    steps = engine.steps
    sequences = sorted(engine.finished, key=lambda s: (s.request.id, s.sample))
    first = [s for s in sequences if s.sample == 0]
    fullest = max(steps, key=lambda s: s.unshared)
    total = sum(s.seconds for s in steps)
    tokens = sum(s.tokens for s in steps)
    guessed = sum(s.guessed for s in steps)
    accepted = sum(s.accepted for s in steps)
    decode_rows = sum(s.decode_rows for s in steps)
    return {
        "requests": [
            {
                "id": s.request.id,
                "sample": s.sample,
                "prompt_tokens": len(s.request.prompt),
                "reused_tokens": s.hits,
                "generated_tokens": len(s.generated),
                "finish": s.finish,
                "text": decode(s.generated),
                "ids": s.generated,
            }
            for s in sequences
        ],
        "speed": {
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "steps": len(steps),
            "rows": sum(s.decode_rows + s.prefill_rows for s in steps),
            "most_sequences_in_a_step": max(s.running for s in steps),
            "mixed_steps": sum(1 for s in steps if s.decode_rows and s.prefill_rows),
            "step_ms": _spread([s.seconds for s in steps]),
        },
        "attention": {
            "plan_ms": _spread([s.plan_seconds for s in steps]),
            "run_ms": _spread([s.run_seconds for s in steps]),
            "runs": engine.attention.num_runs,
            "share_of_time": sum(s.plan_seconds + s.run_seconds for s in steps) / total,
        },
        "memory": {
            "page_size": engine.options.page_size,
            "page_bytes": engine.pool.page_bytes,
            "pages": max(s.held for s in steps),
            "pages_fullest_step": fullest.held,
            "pages_unshared": fullest.unshared,
            "pages_dense": fullest.dense,
            "pages_of_pool": engine.pool.num_pages,
            "pages_kept_for_reuse": engine.tree.num_pages(),
        },
        "prefix": {
            "prompt_tokens": sum(len(s.request.prompt) for s in first),
            "hit_tokens": sum(s.hits for s in first),
            "hits": sum(1 for s in first if s.hits),
            "forked_tokens": sum(s.hits for s in sequences if s.sample),
            "copied_pages": engine.pool.copies,
        },
        "draft": {
            "guessed": guessed,
            "accepted": accepted,
            "tokens_per_decode_row": (tokens - len(sequences)) / max(decode_rows - guessed, 1),
        },
    }


def comparison_dict(result: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    return {
        "sequences": result.sequences,
        "tokens": result.tokens,
        "max_logit_difference": result.max_logit_difference,
        "equal": not result.mismatches,
        "mismatches": [list(m) for m in result.mismatches],
        "ties": [list(m) for m in result.ties],
    }


def lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (what, figures) pairs for the end of a run."""
    speed, attention = summary["speed"], summary["attention"]
    memory, prefix, draft = summary["memory"], summary["prefix"], summary["draft"]
    megabytes = memory["page_bytes"] / 1e6
    out = [
        (
            "speed",
            f"{speed['tokens']} tokens in {speed['seconds']:.1f} s = {speed['tokens_per_second']:.1f} tokens/s;"
            f" {speed['steps']} steps, {speed['mixed_steps']} of them mixed prefill and decode",
        ),
        (
            "attention",
            f"plan {attention['plan_ms']['mean']:.2f} ms and run {attention['run_ms']['mean']:.1f} ms"
            f" (all {summary['num_layers']} layers) per step of {speed['step_ms']['mean']:.0f} ms;"
            f" backend {summary['backend']} on {summary['device']}, arrays {summary['arrays']}, scheduler {summary['scheduler']}",
        ),
        (
            "memory",
            f"{memory['pages_fullest_step']} pages of {memory['page_size']} tokens"
            f" ({memory['pages_fullest_step'] * megabytes:.1f} MB) in the fullest step;"
            f" {memory['pages_unshared']} without sharing, {memory['pages_dense']} with dense buffers"
            f" ({memory['pages_dense'] * megabytes:.1f} MB)",
        ),
        (
            "prefixes",
            f"{prefix['hit_tokens']} of {prefix['prompt_tokens']} prompt tokens found stored, in {prefix['hits']} prompts;"
            f" {prefix['forked_tokens']} shared between samples; {prefix['copied_pages']} pages copied on write",
        ),
    ]
    if draft["guessed"]:
        out.append(
            (
                "draft",
                f"{draft['accepted']} of {draft['guessed']} guesses right:"
                f" {draft['tokens_per_decode_row']:.2f} tokens per sequence and step",
            )
        )
    if "compare" in summary:
        found = summary["compare"]
        verdict = "all tokens equal" if found["equal"] else f"{len(found['mismatches'])} TOKENS DIFFER"
        if found["ties"]:
            verdict += f" but for {len(found['ties'])} near-ties that the rounded cache decides"
        out.append(
            (
                "compare",
                f"{verdict} ({found['tokens']} tokens of {found['sequences']} sequences, each alone with dense attention);"
                f" largest logit difference {found['max_logit_difference']:.2g}",
            )
        )
    return out


def _spread(seconds: list[float]) -> dict[str, float]:
    ms = np.asarray(seconds) * 1e3
    return {"mean": float(ms.mean()), "median": float(np.median(ms)), "max": float(ms.max())}
