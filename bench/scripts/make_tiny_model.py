"""Writes a small random Qwen3 model with a tokenizer and chat template of its own, for engines on CPUs.

    python make_tiny_model.py DIRECTORY [--layers 4 --hidden 256]

Run it with an interpreter that has torch, transformers and tokenizers (vLLM's has). Embeddings are not tied, so that
the next token depends on the whole context, and a wrong KV cache shows in the logits.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 4096
POSITIONS = 32768
HEAD_DIM = 64


def make_tokenizer(out: Path) -> tuple[int, int]:
    """A byte-level BPE tokenizer trained on the standard library's sources; returns (vocabulary size, EOS id)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train(sources, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    return len(fast), fast.eos_token_id


def make_model(out: Path, layers: int, hidden: int, vocabulary: int, eos: int) -> int:
    """Random weights, seeded; returns the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = hidden // HEAD_DIM
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS, tie_word_embeddings=False, eos_token_id=eos, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help=f"a multiple of {HEAD_DIM}")
    arguments = parser.parse_args()
    if arguments.hidden % HEAD_DIM or arguments.hidden < HEAD_DIM or arguments.layers < 1:
        parser.error(f"--hidden must be a multiple of {HEAD_DIM}, --layers at least 1")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    vocabulary, eos = make_tokenizer(arguments.directory)
    parameters = make_model(arguments.directory, arguments.layers, arguments.hidden, vocabulary, eos)
    print(f"{arguments.directory}: {parameters / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
