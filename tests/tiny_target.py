"""A target model's folder without weights, made in a moment: a byte-level tokenizer, a chat template, the configs."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 400  # rows of the embedding; the tokenizer has fewer, as those of real models do
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
END_OF_TEXT, IM_START, IM_END, THINK, END_THINK = range(5)

CHAT_TEMPLATE = (
    "{%- if messages[0].role == 'tool' %}{{ raise_exception('a tool result without a call') }}{% endif -%}"
    "{%- if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif -%}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{%- if message.content %}{{ message.content }}{% endif %}"
    "{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking %}{{ '<think>' }}{% endif %}{% endif -%}"
)
"""Ends in `<think>` where the row asks for `enable_thinking`."""

_SENTENCES = (
    "What is the capital of France? Paris is the capital of France.",
    "Write a function that adds two numbers, and say why it is right.",
    "user assistant system developer tool tools",
    "How many apples are left when three of seven are eaten?",
)


def make_tiny_target(folder: Path) -> Path:
    """Writes the model folder and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _SENTENCES,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - 40,
            special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "additional_special_tokens": list(SPECIAL_TOKENS),
            "model_max_length": 4096,
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 8,
            "eos_token_id": END_OF_TEXT,
        },
        "generation_config.json": {"eos_token_id": [IM_END, END_OF_TEXT]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
