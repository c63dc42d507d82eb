"""A real target in miniature: a Llama of 8 layers with random weights, and sequences that it wrote itself."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_ray.prompts import Prompt
from eagle3_ray.rendering import Renderer
from eagle3_ray.target.files import resolve
from tests.runs import make_run, sequence
from tests.tiny_target import END_OF_TEXT, IM_END, VOCAB_SIZE, make_tiny_target

HIDDEN = 32


def make_tiny_model(folder: Path) -> Path:
    """Writes tokenizer, config and weights; the logits are spread enough that answers are no noise."""
    make_tiny_target(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=8,
        max_position_embeddings=512,
        eos_token_id=IM_END,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return folder


@torch.inference_mode()
def written_by(folder: Path, count: int, seed: int = 0, answer_tokens: int = 24) -> list[dict[str, Any]]:
    """`count` greedy answers of the model to random prompts, with its own log-probabilities, as rows of a run."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        prompt = torch.randint(5, VOCAB_SIZE, (6 + i % 9,), generator=generator)
        output, logprobs = answer(model, prompt.tolist(), answer_tokens + i % 5)
        rows.append(sequence(f"q{seed}-{i}", prompt.tolist(), output, logprobs, partition=f"part{i % 2}"))
    return rows


@torch.inference_mode()
def answer(
    model: LlamaForCausalLM, prompt_ids: Sequence[int], tokens: int, stops: Collection[int] = ()
) -> tuple[list[int], list[float]]:
    """The model's greedy answer of so many tokens, or to the first of `stops`, and its log-probabilities."""
    ids = torch.tensor([prompt_ids])
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        if int(ids[0, -1]) in stops:
            break
    output = ids[0, len(prompt_ids) :]
    logprobs = model(ids).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
    return output.tolist(), logprobs.gather(1, output[:, None])[:, 0].tolist()


def make_tiny_run(path: Path, folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A complete generate stage of these rows, made with that model."""
    make_run(path, rows, {"generate.temperature": 0.0, **resolve(str(folder)).fingerprint()})
    return path


def answer_all(folder: Path, questions: list[Path], tokens: int, answers: Path) -> None:
    """Writes what the model answers to all these questions, as `fake_model.real_answers` reads it."""
    model, renderer = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), Renderer(folder)
    with answers.open("w") as file:
        for line in (line for path in questions for line in path.read_text().splitlines()):
            prompt_ids = renderer.prompt_ids(Prompt("", None, [json.loads(line)["messages"]], None, {}))
            output, logprobs = answer(model, prompt_ids, tokens, stops=(IM_END, END_OF_TEXT))
            last, length = output[-1], len(output)
            stopped = last in (IM_END, END_OF_TEXT)
            finish = {"type": "stop", "matched": last} if stopped else {"type": "length", "length": length}
            file.write(json.dumps([prompt_ids, output, logprobs, finish]) + "\n")
