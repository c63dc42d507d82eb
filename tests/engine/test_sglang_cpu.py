"""A real SGLang on the CPU: it answers, it speculates, and it leaves nothing behind."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_ray.drafter.export import speculative_arguments
from eagle3_ray.sglang.processes import group_members
from eagle3_ray.sglang_cpu import Server, ServerFailed

QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea.", "Count from one to five."]


def chat_ids(model: Path, question: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def prompts(model: Path) -> list[list[int]]:
    """Chat questions, and a number of zeros to which the model adds zeros."""
    zeros: list[int] = AutoTokenizer.from_pretrained(model)("1" + "0" * 40).input_ids
    return [chat_ids(model, question) for question in QUESTIONS] + [zeros]


def greedy(server: Server, input_ids: list[int], tokens: int = 24) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens}
    body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        result: dict[str, Any] = json.load(answer)
        return result


def all_at_once(server: Server, inputs: list[list[int]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(inputs)) as pool:
        return list(pool.map(partial(greedy, server), inputs))


@contextmanager
def serve_command(model: Path) -> Iterator[subprocess.Popen[str]]:
    """`serve` as a user runs it, up to the line that names the log."""
    command = [sys.executable, "-m", "eagle3_ray.sglang_cpu", "serve", "--model", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert "starting SGLang" in line_of(process)
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="module")
def repeating_drafter(cpu_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 checkpoint of random weights around one wire: the last captured layer, read by the target's own head.

    That layer already knows the token which the drafter has just been given, so the drafter proposes it once more:
    right where the target repeats itself, wrong elsewhere. Both outcomes of verification are so exercised.
    """
    target = json.loads((cpu_model / "config.json").read_text())
    weights = load_file(cpu_model / "model.safetensors")
    hidden, width, head_dim = target["hidden_size"], 256, target["head_dim"]
    q_rows, kv_rows = target["num_attention_heads"] * head_dim, target["num_key_value_heads"] * head_dim
    draft_vocab, first_id = 4096, 17  # 17 control tokens come first
    generator = torch.Generator().manual_seed(0)

    def noise(rows: int, columns: int) -> torch.Tensor:
        return 0.01 * torch.randn(rows, columns, generator=generator)

    in_draft_vocab = torch.zeros(target["vocab_size"], dtype=torch.bool)
    in_draft_vocab[first_id : first_id + draft_vocab] = True
    checkpoint = {
        "fc.weight": torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1),
        "midlayer.self_attn.q_proj.weight": noise(q_rows, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": noise(kv_rows, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": noise(kv_rows, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": noise(hidden, q_rows),
        "midlayer.mlp.gate_proj.weight": noise(width, hidden),
        "midlayer.mlp.up_proj.weight": noise(width, hidden),
        "midlayer.mlp.down_proj.weight": noise(hidden, width),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "norm.weight": weights["model.norm.weight"].float(),
        "lm_head.weight": weights["model.embed_tokens.weight"][in_draft_vocab].float(),
        "d2t": torch.full((draft_vocab,), first_id),
        "t2d": in_draft_vocab,
    }
    layers = target["num_hidden_layers"]
    config = target | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "intermediate_size": width,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3],
            "use_aux_hidden_state": True,
        },
    }
    folder = tmp_path_factory.mktemp("drafter")
    save_file(checkpoint, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_model_answers_a_chat_question_in_english_and_stops(cpu_server: Server, cpu_model: Path) -> None:
    answer = greedy(cpu_server, chat_ids(cpu_model, QUESTIONS[0]))
    assert cpu_server.healthy()
    assert answer["text"] == "The capital of France is Paris."
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


def test_the_chat_template_carries_the_default_system_prompt_and_its_ids_go_round(cpu_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(cpu_model)
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{QUESTIONS[0]}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = chat_ids(cpu_model, QUESTIONS[0])
    assert tokenizer.decode(ids) == text
    assert tokenizer(text).input_ids == ids
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id == 2
    # SmolLM2 sets digits apart before it looks at spaces: two newlines before a number stay one token
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n10").input_ids) == ["ĊĊ", "1", "0"]


def test_requests_in_one_batch_get_what_transformers_computes_for_each_alone(
    cpu_server: Server, cpu_model: Path
) -> None:
    target = AutoModelForCausalLM.from_pretrained(cpu_model, dtype=torch.float32)
    inputs = [chat_ids(cpu_model, f"{question} {'Be brief. ' * n}") for n in range(6) for question in QUESTIONS]
    for input_ids, answer in zip(inputs, all_at_once(cpu_server, inputs), strict=True):
        output_ids = answer["output_ids"]
        with torch.inference_mode():
            logits = target(torch.tensor([input_ids + output_ids])).logits[0, len(input_ids) - 1 : -1]
        greedy_logprobs, greedy_ids = logits.log_softmax(-1).max(-1)
        assert output_ids == greedy_ids.tolist()
        logprobs = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
        assert logprobs == pytest.approx(greedy_logprobs.tolist(), abs=1e-3)


def test_eagle3_decoding_repeats_plain_greedy_decoding_token_for_token(
    cpu_server: Server, cpu_model: Path, repeating_drafter: Path
) -> None:
    inputs = prompts(cpu_model)
    plain = [greedy(cpu_server, ids)["output_ids"] for ids in inputs]
    with Server(cpu_model, args=speculative_arguments(repeating_drafter, 3)) as server:
        answers = [greedy(server, ids) for ids in inputs]
        together = all_at_once(server, inputs * 3)
        assert len(group_members(server.pid)) > 1, "SGLang is several processes"
    assert group_members(server.pid) == []

    assert [answer["output_ids"] for answer in answers] == plain
    assert [answer["output_ids"] for answer in together] == plain * 3
    *chats, zeros = [answer["meta_info"] for answer in answers]
    # sglang 0.5.23: spec_accept_length is completion_tokens / spec_verify_ct, so the prefill's token counts in it
    assert zeros["spec_accept_length"] > 3
    assert zeros["spec_num_correct_drafts"] > 0
    assert all(chat["spec_accept_length"] < 2 for chat in chats)


def test_sigterm_ends_the_serve_command_and_all_of_sglang(cpu_model: Path) -> None:
    with serve_command(cpu_model) as process:
        url = line_of(process)
        assert urllib.request.urlopen(f"{url}/health").status == 200
        [server_pid] = children_of(process.pid)
        process.terminate()
        assert line_of(process) == "stopped"
        assert process.wait(10) == 0
        assert group_members(server_pid) == []


def test_killing_the_owner_of_a_starting_server_ends_all_of_sglang(cpu_model: Path) -> None:
    with serve_command(cpu_model) as process:
        assert eventually(lambda: len(children_of(process.pid)) == 1, within_s=10)
        [server_pid] = children_of(process.pid)
        # The server, its watch, multiprocessing's tracker, and the scheduler that has just been spawned: it still
        # imports torch and has not asked the kernel for anything.
        assert eventually(lambda: len(group_members(server_pid)) >= 4, within_s=60)
        process.kill()
        assert eventually(lambda: group_members(server_pid) == [], within_s=15)


def test_an_argument_that_sglang_refuses_is_a_failure_with_its_own_words(cpu_model: Path) -> None:
    server = Server(cpu_model, args=["--no-such-argument"])
    with pytest.raises(ServerFailed, match=r"ended while starting(.|\n)*unrecognized arguments: --no-such-argument"):
        server.start()
    assert group_members(server.pid) == []
