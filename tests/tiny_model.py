"""Small models with random weights, in moments."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from eagle3_ray.target.protocol import TokenSequence

SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny_llama(folder: Path, tied: bool = False, shard: str = "1GB") -> Path:
    """A Llama whose layers move the state enough to tell neighbours apart."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied, initializer_range=0.2))
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def tiny_gemma(folder: Path) -> Path:
    """A model with a sliding window of 16 tokens in most layers."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=16, initializer_range=0.2)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def model_with_code(folder: Path) -> Path:
    """The tiny Llama under a name that only the Python file beside it knows."""
    tiny_llama(folder)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "odd_model.OddConfig", "AutoModelForCausalLM": "odd_model.OddForCausalLM"}
    odd = {"model_type": "odd", "architectures": ["OddForCausalLM"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config | odd))
    (folder / "odd_model.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n"
        "class OddConfig(LlamaConfig):\n    model_type = 'odd'\n\n"
        "class OddForCausalLM(LlamaForCausalLM):\n    config_class = OddConfig\n"
    )
    return folder


def sequences(lengths: list[int], seed: int = 0) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    return [
        TokenSequence(f"s{number}", rng.integers(400, size=length, dtype=np.int32), length // 2)
        for number, length in enumerate(lengths)
    ]
