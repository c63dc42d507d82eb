"""A folder with Kimi-K2.5's conventions and none of its contents: its special ids, its nested config, its sizes.

The ids are those of the published tokenizer_config.json (Kimi-K2 and K2.5 share them), the sizes those of the published
config.json. The ordinary tokens are the 256 bytes: what text becomes is not what Kimi makes of it.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, IM_END, IM_USER, IM_ASSISTANT = 163584, 163585, 163586, 163587, 163588
IM_SYSTEM, IM_MIDDLE, THINK, END_THINK, PAD = 163594, 163601, 163606, 163607, 163839
VOCAB_SIZE = 163840
SPECIAL_TOKENS = {
    "[BOS]": BOS,
    "[EOS]": EOS,
    "<|im_end|>": IM_END,
    "<|im_user|>": IM_USER,
    "<|im_assistant|>": IM_ASSISTANT,
    "<|im_system|>": IM_SYSTEM,
    "<|im_middle|>": IM_MIDDLE,
    "[PAD]": PAD,
}
ORDINARY_TOKENS = {"<think>": THINK, "</think>": END_THINK}
"""Tokens of their own that the published tokenizer does not call special."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}"
    "{%- if message.role == 'assistant' %}{{ '<think>' + (message.reasoning_content or '') + '</think>' }}{% endif -%}"
    "{{ message.content + '<|im_end|>' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|><think>' }}"
    "{%- if thinking is defined and not thinking %}{{ '</think>' }}{% endif %}{% endif -%}"
)
"""The layout of a prompt: thinking unless the row says `thinking: false`, and then a block that is closed at once."""

TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": IM_END,
    "pad_token_id": PAD,
}
CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": TEXT_CONFIG,
    "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27},
    "pad_token_id": PAD,
}


def make_kimi_target(folder: Path) -> Path:
    """Writes the model folder, without weights, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet | SPECIAL_TOKENS | ORDINARY_TOKENS, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ORDINARY_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "additional_special_tokens": list(SPECIAL_TOKENS),
            "model_max_length": 262144,
        },
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": IM_END, "max_length": 262144},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
