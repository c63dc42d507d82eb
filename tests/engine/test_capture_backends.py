"""Hidden states of a real model from a real SGLang and from transformers, and what is found when they are spoiled."""

import json
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoTokenizer

from eagle3_ray.sglang import capture_plugin
from eagle3_ray.sglang.processes import group_members
from eagle3_ray.target.on_policy import OnPolicyLimits, Score, label_logprobs, on_policy
from eagle3_ray.target.parts import load_parts
from eagle3_ray.target.proof import SelfCheckFailed, second_route, self_check
from eagle3_ray.target.protocol import States, TargetDead, TargetParts, TokenSequence
from eagle3_ray.target.sglang_backend import SGLangTarget
from eagle3_ray.target.sglang_server import SHARED_MEMORY
from eagle3_ray.target.transformers_backend import TransformersTarget
from tests import sabotage
from tests.corruptions import Generated, corruptions

BOS, END = 1, 2
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that adds two numbers.",
    "Tom has 12 apples and eats 5 of them. How many are left?",
    "Name three animals that live in the sea.",
    "Explain in one sentence why the sky is blue.",
    "Translate 'good morning' into Spanish and French.",
    "What should I pack for a weekend in the mountains?",
    "Who wrote Romeo and Juliet, and when?",
)


@pytest.fixture(scope="module")
def server_target(cpu_model: Path) -> Iterator[SGLangTarget]:
    target = SGLangTarget.start(cpu_model)
    yield target
    target.close()


@pytest.fixture(scope="module")
def transformers_target(cpu_model: Path) -> TransformersTarget:
    return TransformersTarget(cpu_model, dtype="float32", device="cpu", batch_tokens=1024)


class ByFloat32(TorchFunctionMode):
    """Products of bfloat16 inputs by way of float32: the same sums and the same rounding of the result.

    A CPU without bfloat16 instructions takes a hundred times as long for its own products of bfloat16.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and args[0].dtype == torch.bfloat16:
            return func(*(None if one is None else one.float() for one in args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def rounding_target(cpu_model: Path) -> TransformersTarget:
    """In bfloat16; for `capture` under ByFloat32."""
    with ByFloat32():
        return TransformersTarget(cpu_model, dtype="bfloat16", device="cpu", batch_tokens=1024)


@pytest.fixture(scope="module")
def parts(cpu_model: Path) -> TargetParts:
    return load_parts(cpu_model, torch.float32)


def logprobs(url: str, sequence: TokenSequence) -> list[float]:
    """The engine's own log-probability of each token but the first, at temperature 1."""
    asked = {"input_ids": sequence.ids.tolist(), "return_logprob": True, "logprob_start_len": 0}
    body = json.dumps(asked | {"sampling_params": {"max_new_tokens": 1, "temperature": 0}}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        said = json.load(answer)["meta_info"]["input_token_logprobs"][1:]  # [logprob, id, text] of each token
    assert [token for _, token, _ in said] == sequence.ids[1:].tolist()
    return [logprob for logprob, _, _ in said]


def generate(url: str, prompt: list[int], temperature: float) -> Generated:
    sampling = {"max_new_tokens": 24, "temperature": temperature, "top_p": 0.9, "stop_token_ids": [END]}
    body = json.dumps({"input_ids": prompt, "return_logprob": True, "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.load(answer)
    logprobs = [entry[0] for entry in found["meta_info"]["output_token_logprobs"]]
    return Generated(prompt, found["output_ids"], logprobs, temperature)


@pytest.fixture(scope="module")
def generated(server_target: SGLangTarget, cpu_model: Path) -> list[Generated]:
    """Of every question a greedy answer and two drawn with top-p."""
    tokenizer = AutoTokenizer.from_pretrained(cpu_model)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in QUESTIONS
    ]
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(generate, server_target.url, prompt, temperature)
            for temperature in (0.0, 0.7, 1.0)
            for prompt in prompts
        ]
    return [row for row in (answer.result() for answer in asked) if len(row.answer) >= 12]


@pytest.fixture(scope="module")
def asked(generated: list[Generated]) -> list[TokenSequence]:
    return [row.sequence(str(number)) for number, row in enumerate(generated)]


@pytest.fixture(scope="module")
def from_server(server_target: SGLangTarget, asked: list[TokenSequence]) -> list[States]:
    return server_target.capture(asked)


def errors_by_layer(found: list[States], expected: list[States]) -> list[float]:
    """The worst row's relative error of the three layers and the last state."""
    a, b = (
        torch.cat([torch.cat([s.aux_hidden, s.last_hidden], dim=1) for s in states]).float().unflatten(1, (4, -1))
        for states in (found, expected)
    )
    errors: list[float] = ((a - b).norm(dim=2) / b.norm(dim=2)).amax(dim=0).tolist()
    return errors


def choices(states: list[States], parts: TargetParts) -> torch.Tensor:
    """The target's likeliest next token behind every state."""
    last = torch.cat([s.last_hidden for s in states])
    return label_logprobs(last, torch.zeros(len(last), dtype=torch.long), parts)[1]


def test_sglang_and_transformers_give_the_same_states_in_float32(
    from_server: list[States], transformers_target: TransformersTarget, asked: list[TokenSequence], parts: TargetParts
) -> None:
    expected = transformers_target.capture(asked)
    errors = errors_by_layer(from_server, expected)
    print("relative errors of layers 2, 15, 27 and the last state:", errors)
    assert max(errors) < 1e-3
    assert torch.equal(choices(from_server, parts), choices(expected, parts))


def test_bfloat16_keeps_nearly_every_choice_and_raises_no_alarm(
    from_server: list[States],
    asked: list[TokenSequence],
    generated: list[Generated],
    rounding_target: TransformersTarget,
    parts: TargetParts,
) -> None:
    with ByFloat32():
        found = rounding_target.capture(asked)
    print("relative errors of bfloat16:", errors_by_layer(found, from_server))
    assert found[0].last_hidden.dtype == torch.bfloat16
    assert float((choices(found, parts) == choices(from_server, parts)).float().mean()) >= 0.97
    for states, row in zip(found, generated, strict=True):
        assert OnPolicyLimits().reason(score(states, row, parts)) is None


def own_folders(target: SGLangTarget) -> list[Path]:
    """Where the target's scheduler writes: the folders' names begin with its process id."""
    assert target.server is not None
    members = {str(pid) for pid in group_members(target.server.pid)}
    return [folder for folder in SHARED_MEMORY.iterdir() if folder.name.split("-")[0] in members]


def test_nothing_stays_in_shared_memory(server_target: SGLangTarget, from_server: list[States]) -> None:
    assert from_server
    [folder] = own_folders(server_target)
    assert [path.name for path in folder.iterdir()] == ["owner.lock"]


def test_a_running_server_can_be_used_and_its_flags_are_read(
    server_target: SGLangTarget, cpu_model: Path, asked: list[TokenSequence], from_server: list[States]
) -> None:
    target = SGLangTarget.connect(server_target.url, cpu_model, dtype="float32")
    [states] = target.capture(asked[:1])
    assert errors_by_layer([states], from_server[:1])[3] < 1e-3
    with pytest.raises(ValueError, match="start it with --return-aux-hidden-state-layer-ids"):
        SGLangTarget.connect(server_target.url, cpu_model, layers=(3, 15, 27), dtype="float32")


def test_a_server_that_does_not_answer_is_a_dead_target(cpu_model: Path) -> None:
    with pytest.raises(TargetDead, match="does not answer"):
        SGLangTarget.connect("http://127.0.0.1:9", cpu_model)


def test_the_self_check_passes_sglang_with_the_engines_own_words(
    server_target: SGLangTarget, cpu_model: Path, asked: list[TokenSequence], parts: TargetParts
) -> None:
    reference = second_route(cpu_model, server_target.layers, asked[0], torch.float32)
    self_check(server_target, parts, asked[0], logprobs(server_target.url, asked[0]), reference=reference)


def test_every_sabotage_of_a_real_capture_is_found(
    server_target: SGLangTarget, cpu_model: Path, asked: list[TokenSequence], parts: TargetParts
) -> None:
    probe = TokenSequence("probe", asked[0].ids[:36].copy(), 1)
    said = logprobs(server_target.url, probe)
    reference = second_route(cpu_model, server_target.layers, probe, torch.float32)
    broken = {name: sabotage.Sabotaged(server_target, change()) for name, change in sabotage.CHANGES.items()} | {
        "before the norm": sabotage.before_the_norm(cpu_model, server_target.layers, "float32")
    }
    for number in range(3):
        for by in (-1, 1):
            target = sabotage.off_by_one(cpu_model, server_target.layers, number, by, "float32")
            broken[f"layer {number} off by {by}"] = target
    missed = []
    for name, target in broken.items():
        try:
            self_check(target, parts, probe, said, reference=reference)
            missed.append(name)
        except SelfCheckFailed as error:
            print(f"{name}: {error}")
    assert missed == []
    with pytest.raises(SelfCheckFailed, match="different models"):
        self_check(server_target, sabotage.other_head(parts), probe, said)


def score(states: States, row: Generated, parts: TargetParts) -> Score:
    return on_policy(states, row.sequence(states.sequence_id), row.logprobs, parts, temperature=row.temperature)


def kinds(cpu_model: Path) -> dict[str, Callable[[Generated, Generated], Generated]]:
    """All corruptions, for this model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(cpu_model)
    think = tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False).input_ids

    def pieces(token: int) -> list[int]:
        text = tokenizer.decode([token])
        return [i for part in (text[:2], text[2:]) for i in tokenizer(part, add_special_tokens=False).input_ids]

    return corruptions(BOS, END, think, pieces)


def test_clean_answers_raise_no_alarm_and_every_corruption_does(
    from_server: list[States],
    generated: list[Generated],
    transformers_target: TransformersTarget,
    cpu_model: Path,
    parts: TargetParts,
) -> None:
    for states, row in zip(from_server, generated, strict=True):
        assert OnPolicyLimits().reason(score(states, row, parts)) is None
    missed = []
    for name, corrupt in kinds(cpu_model).items():
        bad = [corrupt(generated[0], generated[1]), corrupt(generated[1], generated[2])]
        found = transformers_target.capture([row.sequence(name) for row in bad])
        missed += [name for s, row in zip(found, bad, strict=True) if not OnPolicyLimits().reason(score(s, row, parts))]
    assert missed == []


@contextmanager
def noise_in(target: TransformersTarget, share: float) -> Iterator[None]:
    """The target is a sister checkpoint for the block: this share of noise in every matrix."""
    torch.manual_seed(0)
    named = target._decoder.named_parameters()
    matrices = [weight.detach() for name, weight in named if weight.ndim == 2 and "embed" not in name]
    held = [weight.clone() for weight in matrices]
    for weight in matrices:
        weight += share * weight.std() * torch.randn_like(weight)
    try:
        yield
    finally:
        for weight, before in zip(matrices, held, strict=True):
            weight.copy_(before)


def test_answers_of_a_sister_checkpoint_are_found(
    asked: list[TokenSequence],
    generated: list[Generated],
    transformers_target: TransformersTarget,
    parts: TargetParts,
) -> None:
    with noise_in(transformers_target, 0.01):
        found = transformers_target.capture(asked)
    for states, row in zip(found, generated, strict=True):
        assert OnPolicyLimits().reason(score(states, row, parts)) is not None


def test_what_hides_in_the_rounding_of_one_bfloat16_answer_shows_in_all_of_them(
    generated: list[Generated], rounding_target: TransformersTarget, cpu_model: Path, parts: TargetParts
) -> None:
    def reason(rows: list[Generated]) -> str | None:
        with ByFloat32():
            found = rounding_target.capture([row.sequence(str(number)) for number, row in enumerate(rows)])
        scores = [score(states, row, parts) for states, row in zip(found, rows, strict=True)]
        print(statistics.median(s.relative_difference or 0 for s in scores))
        return OnPolicyLimits().reason_for_all(scores)

    assert len(generated) >= 16
    assert reason(generated) is None
    for name in ("second BOS", "prompt cut on the left", "system message left out"):
        corrupt = kinds(cpu_model)[name]
        assert reason([corrupt(row, row) for row in generated]) is not None, name
    with noise_in(rounding_target, 0.02):
        assert reason(generated) is not None


def test_a_killed_server_is_a_dead_target_and_leaves_no_states(
    server_target: SGLangTarget, asked: list[TokenSequence]
) -> None:
    server_target.capture(asked[:1])
    [folder] = own_folders(server_target)
    assert server_target.server is not None
    server_target.server.kill()
    with pytest.raises(TargetDead, match="is gone"):
        server_target.capture(asked[:2])
    deadline = time.monotonic() + 20  # a zombie's last threads may hold the lock for a moment
    while folder.exists():
        assert time.monotonic() < deadline, f"{folder} is still held"
        capture_plugin.sweep(SHARED_MEMORY)
        time.sleep(0.1)
