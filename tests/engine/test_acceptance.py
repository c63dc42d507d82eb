"""The evaluate stage in a real SGLang: engine, reference decoder and replay agree, and a wrong launch is named."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from eagle3_ray.acceptance.kept import Kept
from eagle3_ray.acceptance.lossless import token_gap
from eagle3_ray.acceptance.questions import load_questions
from eagle3_ray.acceptance.reference import CachedTransformers, decode, decode_plainly
from eagle3_ray.acceptance.replay import replay
from eagle3_ray.acceptance.tally import pool
from eagle3_ray.config import Evaluate, Target
from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.export import speculative_arguments
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.propose import propose
from eagle3_ray.evaluate import EvaluateSettings, evaluate
from eagle3_ray.rendering import Renderer
from eagle3_ray.sglang_cpu import Server
from eagle3_ray.target.protocol import States, TokenSequence

TOKENS, STEPS, LAYERS = 20, 3, (2, 15, 27)
FIRST_ID, DRAFT_VOCAB = 17, 4096  # 17 control tokens come first


def wired_drafter(folder: Path) -> Eagle3Drafter:
    """Random weights around one wire: the last captured layer, read by the target's own head.

    That layer knows the token which the drafter has just been given, so it is proposed once more: right where the
    target repeats itself, wrong elsewhere. The wire is crossed twice, in fc and in norm: with the older algorithm
    sglang 0.5.23 passes fc and lm_head by (`set_embed_and_head`), and so proposes the least likely token.
    """
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    drafter = Eagle3Drafter(DrafterConfig.from_target(config, LAYERS, DRAFT_VOCAB))
    hidden = config["hidden_size"]
    for name, parameter in drafter.named_parameters():
        if name.startswith("midlayer") and parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.01)
    drafter.fc.weight.data.copy_(torch.cat([torch.zeros(hidden, 2 * hidden), -torch.eye(hidden)], dim=1))
    drafter.norm.weight.data.copy_(-weights["model.norm.weight"])
    drafter.lm_head.weight.data.copy_(weights["model.embed_tokens.weight"][FIRST_ID : FIRST_ID + DRAFT_VOCAB])
    drafter.d2t.fill_(FIRST_ID)
    drafter.t2d.zero_()[FIRST_ID : FIRST_ID + DRAFT_VOCAB] = True
    return drafter.eval()


@pytest.fixture(scope="module")
def drafter(cpu_model: Path) -> Eagle3Drafter:
    return wired_drafter(cpu_model)


@pytest.fixture(scope="module")
def drafter_folder(drafter: Eagle3Drafter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wired") / "drafter"
    folder.mkdir()
    save_file(
        {n: t.contiguous() for n, t in drafter.state_dict().items() if n != "aux_scale"}, folder / "m.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(drafter.config.to_json()))
    return folder


@pytest.fixture(scope="module")
def prompt_set(cpu_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    chat = {"id": "c", "category": "short", "turns": ["Count from one to five.", "And back again?"]}
    (folder / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    zeros = AutoTokenizer.from_pretrained(cpu_model)("1" + "0" * 40).input_ids
    (folder / "zeros.jsonl").write_text(json.dumps({"id": "z", "input_ids": zeros}) + "\n")
    return folder


def settings(model: Path, prompts: Path, drafter: Path, *endpoints: tuple[str, str]) -> EvaluateSettings:
    section = Evaluate(
        drafters=[str(drafter)], prompts=[str(prompts)], max_new_tokens=TOKENS, steps=STEPS, concurrencies=[1, 3]
    )
    return EvaluateSettings(section, Target(model=str(model)), endpoints=endpoints)


def test_engine_reference_decoder_and_replay_count_the_same_verify_steps(
    cpu_server: Server, cpu_model: Path, prompt_set: Path, drafter: Eagle3Drafter, drafter_folder: Path, tmp_path: Path
) -> None:
    summary = evaluate(settings(cpu_model, prompt_set, drafter_folder, ("none", cpu_server.url)), Kept(tmp_path))
    assert (summary["status"], summary["stopped_by"], summary["warnings"]) == ("complete", None, [])
    engine = summary["engines"][str(drafter_folder)]
    assert engine["lossless"] == {"answers": 3, "equal": 3, "unexplained": 0, "mismatches": []}
    assert set(engine["acceptance"]) == {"all", "without loops", "chat", "chat/short", "zeros"}
    assert engine["acceptance"]["zeros"]["acceptance_length"] > 3
    assert engine["acceptance"]["chat"]["answers"] == 2
    assert engine["acceptance"]["chat"]["acceptance_length"] < 2
    assert set(engine["speed"]) == set(engine["speedup"]) == set(summary["engines"]["none"]["speed"]) == {"1", "3"}
    assert (engine["engine"]["algorithm"], engine["engine"]["steps"]) == ("EAGLE3", STEPS)

    target, renderer = CachedTransformers(cpu_model, LAYERS), Renderer(cpu_model)
    embed = target.model.get_input_embeddings().weight.detach()
    chat, zeros = load_questions([str(prompt_set)])
    decoded, recorded = [], []
    answers: list[list[int]] = []
    for question, turn in ((chat, 0), (chat, 1), (zeros, 0)):
        prompt = renderer.prompt_ids(question.prompt, answers[:turn])
        one = decode(
            target, partial(propose, drafter, embed), drafter.target_ids(), prompt,
            steps=STEPS, max_new_tokens=TOKENS, stop_ids=[2],
        )  # fmt: skip
        assert one.output_ids == decode_plainly(target, prompt, max_new_tokens=TOKENS, stop_ids=[2])
        answers.append(one.output_ids)
        decoded.append(one.acceptance)
        target.forget(0)
        ids = [*prompt, *one.output_ids]
        _, aux_hidden = target.read(ids)
        sequence = TokenSequence(str(len(recorded)), np.array(ids, dtype=np.int32), len(prompt))
        recorded.append((sequence, States(sequence.sequence_id, aux_hidden, aux_hidden)))
    assert pool(decoded).as_json() == engine["acceptance"]["all"]
    replayed = replay(drafter, embed, recorded, STEPS)
    assert (replayed.tokens, replayed.verify_steps) == (pool(decoded).tokens, pool(decoded).verify_steps)


def test_a_server_with_the_older_algorithm_gives_exactly_one_and_is_named(
    cpu_server: Server, cpu_model: Path, prompt_set: Path, drafter_folder: Path, tmp_path: Path
) -> None:
    with Server(
        cpu_model, args=[*speculative_arguments(drafter_folder, 3), "--speculative-algorithm", "EAGLE"]
    ) as server:
        summary = evaluate(
            settings(
                cpu_model,
                prompt_set / "zeros.jsonl",
                drafter_folder,
                ("none", cpu_server.url),
                (str(drafter_folder), server.url),
            ),
            Kept(tmp_path),
        )
    engine = summary["engines"][str(drafter_folder)]
    assert engine["acceptance"]["all"]["acceptance_length"] == 1.0
    assert [finding["cause"] for finding in engine["diagnosis"]] == ["algorithm"]
    assert "runs --speculative-algorithm EAGLE;" in summary["warnings"][0]


def test_the_gap_between_two_tokens_is_the_targets_own(cpu_server: Server, cpu_model: Path) -> None:
    prefix = AutoTokenizer.from_pretrained(cpu_model)("The capital of France is").input_ids
    logits, _ = CachedTransformers(cpu_model, LAYERS).read(prefix)
    (first, second), (a, b) = (pair.tolist() for pair in logits[-1].topk(2))
    assert token_gap(cpu_server.url, prefix, a, b) == pytest.approx(first - second, abs=1e-3)
