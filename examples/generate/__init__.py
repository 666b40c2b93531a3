# SPDX-License-Identifier: Apache-2.0
"""`attnrt generate`: a small language model served by continuous batching, all its attention run by attnrt.

From the command line to the runtime: command -> engine -> (pool, prefix, sequence, draft, batch) -> attention -> attnrt;
model, weights, gguf_file and tokenizer know nothing of serving; dense and compare know nothing of the runtime. arrays is the
only file that knows whose arrays they all compute with (NumPy, PyTorch, CuPy) and where K and V lie.
"""

from .command import add_arguments, main, run

__all__ = ["add_arguments", "main", "run"]
