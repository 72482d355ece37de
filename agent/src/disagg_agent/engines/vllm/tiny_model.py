"""A model of random weights that a real engine serves: no download, a few megabytes, the same bytes for the same seed.

`python -m disagg_agent.engines.vllm.tiny_model FOLDER` writes config.json, weights and a tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    # Wide enough that greedy choices differ from token to token, so that a wrong cache shows at once.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, seed: int = 0) -> None:
    """Write the model; needs torch, transformers and tokenizers, which an engine brings."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.float32).save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", unk_token="w0").save_pretrained(
        folder
    )


if __name__ == "__main__":
    write_tiny_model(Path(sys.argv[1]))
