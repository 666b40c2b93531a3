# SPDX-License-Identifier: Apache-2.0
"""Time until a variant that nobody has seen gives its first checked result: ours, FlashInfer's, FlexAttention's.

    python benchmarks/compile_time.py [--provider TEXT] [--seconds S] [--out FOLDER]

The variant is s + c * s * s with a constant c that is new in every run, so that no cache holds it. Ours and FlashInfer's are
decode over pages (FlashInfer's own JIT with its smallest kernel, and all cores for its compilers), FlexAttention's is prefill,
and so is a second one of ours. Ours begin with an empty cache: "first" is the first variant of all, the other reading that of a
second one, which finds there what variants share.
Each reading is one compilation; the library is loaded, and FlexAttention has compiled another variant before. Writes
compile_time.jsonl and .md.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cases import Case
from harness import TOLERANCE, chosen, parser, setting
from shapes import Shape

PAGED = Shape(name="decode", kv=(200,) * 4, heads=8, kv_heads=8)
SQUARE = Shape(name="prefill", kv=(1024,) * 2, qo=(1024,) * 2, heads=8, kv_heads=8, page=0)
#: Target, in ms.
MOST = 1000.0


def error_with(case: Case, out: torch.Tensor, c: float, rows: int = 16) -> float:
    """Relative error of some rows of head 0 against float64, for the bent logits."""
    wrong = right = 0.0
    for row in np.linspace(0, len(case.q) - 1, rows).astype(int).tolist():
        request = int(np.searchsorted(case.qo_indptr, row, "right")) - 1
        seen = int(case.lens[request] - case.qo_lens[request]) + row - int(case.qo_indptr[request]) + 1
        slots = case.tokens(request)[:seen]
        k, v = (x.reshape(-1, *x.shape[-2:])[slots, 0].double() for x in (case.k, case.v))
        s = k @ case.q[row, 0].double() / math.sqrt(case.head_dim)
        answer = torch.softmax(s + c * s * s, 0) @ v
        wrong += float((out[row, 0].double() - answer).square().sum())
        right += float(answer.square().sum())
    return math.sqrt(wrong / right)


def ours(c: float, shape: Shape = PAGED) -> Callable[[], tuple[Case, torch.Tensor, float]]:
    """A traced hook, NVRTC."""
    from ours import flat_index

    import attnrt as at

    case = Case(shape)

    def run() -> tuple[Case, torch.Tensor, float]:
        @at.variants.logits
        def bent(score: Any, ctx: Any) -> Any:
            return score + c * score * score

        spec = at.AttentionSpec(
            num_qo_heads=8, num_kv_heads=8, head_dim=128, variant=(at.variants.causal(), bent)
        )
        attn = at.Attention(spec, backend="nvrtc", device="cuda")
        attn.plan(flat_index(case))
        return case, attn.run(case.q, (case.k, case.v)), c

    return run


def flashinfer_args(c: float) -> list[Any]:
    """What FlashInfer's JIT is given: names, types and the variant's text."""
    name = f"Bent{abs(hash(c)) % 10**9}"
    text = f"""
struct {name} : AttentionVariantBase {{
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;
  template <typename Params>
  __device__ __host__ {name}(const Params& params, uint32_t batch, uint8_t* smem) {{
    qo_len = params.get_qo_len(batch);
    kv_len = window_left = params.get_kv_len(batch);
    sm_scale_log2 = math::log2e;
  }}
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {{
    const float s = float(logits) * params.sm_scale;
    return s + {c!r}f * s * s;
  }})
}};
"""
    types = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    text = "#include <flashinfer/attention/variants.cuh>\n" + text
    return [f"bent_{name.lower()}", *types, 128, 128, [], [], ["sm_scale"], ["double"], name, text]


def flashinfer(c: float) -> Callable[[], tuple[Case, torch.Tensor, float]]:
    """Its decode wrapper with a variant of one's own."""
    import flashinfer as fi
    from peers import last_lens, workspace

    case = Case(PAGED)
    scratch = workspace()

    def run() -> tuple[Case, torch.Tensor, float]:
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", jit_args=flashinfer_args(c))
        wrapper.plan(
            torch.from_numpy(case.indptr),
            torch.from_numpy(case.pages).cuda(),
            last_lens(case.lens, case.page),
            8,
            8,
            128,
            case.page,
            q_data_type=case.q.dtype,
            kv_data_type=case.k.dtype,
        )
        return case, wrapper.run(case.q, (case.k, case.v), 1 / math.sqrt(case.head_dim)), c

    return run


def flex(c: float) -> Callable[[], tuple[Case, torch.Tensor, float]]:
    """torch.compile(flex_attention), after another variant of it has been compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = Case(SQUARE)
    q, k, v = (x.view(2, 1024, 8, 128).transpose(1, 2) for x in (case.q, case.k, case.v))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 1024, 1024, device="cuda")
    call = torch.compile(flex_attention, dynamic=False)
    call(q, k, v, score_mod=lambda s, b, h, i, j: s * 1.5, block_mask=mask)

    def run() -> tuple[Case, torch.Tensor, float]:
        out = call(q, k, v, score_mod=lambda s, b, h, i, j: s + c * s * s, block_mask=mask)
        return case, out.transpose(1, 2).flatten(0, 1), c

    return run


def reading(make: Callable[[float], Any], c: float) -> tuple[float, float]:
    """ms until the result is there, and its error."""
    run = make(c)
    torch.cuda.synchronize()
    start = time.perf_counter()
    case, out, used = run()
    torch.cuda.synchronize()
    ms = (time.perf_counter() - start) * 1e3
    return ms, error_with(case, out, used)


def main(argv: list[str] | None = None) -> int:
    args = parser(__doc__, 60).parse_args(argv)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["ATTNRT_CACHE_DIR"] = cache
        rows = readings(args.provider)
    about = {"title": "Compiling a variant that nobody has seen", **setting()}
    args.out.mkdir(parents=True, exist_ok=True)
    text = [json.dumps(about), *(json.dumps(row) for row in rows)]
    (args.out / "compile_time.jsonl").write_text("\n".join(text) + "\n")
    (args.out / "compile_time.md").write_text(markdown(rows, about))
    print(markdown(rows, about))
    return 0 if any(row["provider"] == "attnrt" for row in rows) else 1


def readings(provider: str | None) -> list[dict[str, Any]]:
    """A row for each reading of the libraries that were asked for."""
    from importlib.metadata import version

    import attnrt as at

    def prefill(c: float) -> Callable[[], Any]:
        return ours(c / 2, SQUARE)

    c = round(0.005 + time.time_ns() % 10**9 * 1e-12, 15)
    rows = []
    for name, make, by, library in (
        ("attnrt (first)", ours, 3, None),
        ("attnrt", ours, 1, None),
        ("attnrt (prefill, first)", prefill, 3, None),
        ("attnrt (prefill)", prefill, 1, None),
        ("flex", flex, 1, "torch"),  # its make() compiles another first
        ("flashinfer", flashinfer, 1, "flashinfer-python"),
    ):
        if not chosen(name, provider):
            continue
        try:
            ms, error = reading(make, c / by)
        except Exception as failure:
            print(f"{name}: {type(failure).__name__} {str(failure)[:300]}", flush=True)
            continue
        assert error < TOLERANCE, f"{name}: error {error:.2e}"
        number = at.__version__ if library is None else version(library)
        rows.append({"provider": name, "version": number, "ms": round(ms, 1), "error": error})
        print(rows[-1], flush=True)
    return rows


def markdown(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """One line per library, and whether our target is met."""
    text = [f"# {about['title']}", "", *(f"- {k}: {v}" for k, v in about.items() if k != "title"), ""]
    text += ["| library | version | ms | error against float64 |", "|---" * 4 + "|"]
    text += [f"| {r['provider']} | {r['version']} | {r['ms']:.0f} | {r['error']:.1e} |" for r in rows]
    mine = {r["provider"]: r["ms"] for r in rows if r["provider"].startswith("attnrt")}
    for name in ("attnrt", "attnrt (prefill)"):
        verdict = "not measured" if name not in mine else "met" if mine[name] <= MOST else "missed"
        text += ["", f"Target: {name} <= {MOST:.0f} ms, {verdict}."]
    return "\n".join([*text, ""])


if __name__ == "__main__":
    sys.exit(main())
