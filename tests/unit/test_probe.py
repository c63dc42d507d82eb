"""The probe passes a fit server, and names what is wrong with every other kind."""

import asyncio
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle3_ray.sglang.probe import ProbeMaterial, ServerFacts, Unfit, compare, probe
from eagle3_ray.sglang.protocol import Sampling, Transient
from eagle3_ray.sglang.transport import open_session
from tests.fakes.sglang_server import FakeServer, token_logprobs
from tests.stand_in import MATERIAL, SAMPLING, TEXT, right_answer, server
from tests.tiny_target import IM_END, SPECIAL_TOKENS, VOCAB_SIZE, make_tiny_target


def probed(
    url: str, material: ProbeMaterial = MATERIAL, sampling: Sampling = SAMPLING, api_key: str | None = None
) -> ServerFacts:
    async def run() -> ServerFacts:
        async with open_session(api_key, 10) as session:
            return await probe(session, url, material, sampling)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with server() as one:
        yield one


@pytest.fixture
def one(shared: FakeServer) -> Iterator[FakeServer]:
    fit = dict(shared.options.__dict__)
    yield shared
    assert shared.running, "a probe must never kill a server"
    shared.set(**fit)


# ---- fit


def test_a_fit_server_passes_and_its_facts_are_measured(one: FakeServer) -> None:
    one.set(max_running=48, max_total_tokens=5000, context_length=4000, weight_version="v7")
    facts = probed(one.url)
    assert facts.warnings == []
    assert (facts.url, facts.weight_version) == (one.url, "v7")
    assert (facts.capacity_tokens, facts.max_running, facts.context) == (5000, 48, 4000)
    assert facts.longest_input == 4000 - 6
    assert facts.settings == {
        "engine.version": "0.5.23",
        "engine.dtype": "auto",
        "engine.quantization": None,
        "engine.kv_cache_dtype": "auto",
        "engine.json_model_override_args": None,
        "engine.weight_version": "v7",
    }
    prompt = list(MATERIAL.prompt_ids)
    assert list(facts.prompt_logprobs) == token_logprobs(prompt, 1, model_seed=0)
    assert list(facts.greedy_ids) == right_answer(prompt, replace(SAMPLING, max_new_tokens=16))


def test_a_probe_is_a_dozen_requests_at_most_and_each_is_marked_as_one(one: FakeServer) -> None:
    before = len(one.requests())
    probed(one.url)
    seen = one.requests()[before:]
    assert len(seen) <= 12
    assert all(request["rid"].startswith("probe-") for request in seen)
    assert len({request["rid"] for request in seen}) == len(seen)


def test_the_longest_prompt_leaves_room_for_a_full_answer_that_the_server_does_not_cut(one: FakeServer) -> None:
    for sizes in ({"context_length": 300, "max_total_tokens": 5000}, {"context_length": 5000, "max_total_tokens": 300}):
        one.set(mean_tokens=10_000, **sizes)
        longest = probed(one.url).longest_prompt(SAMPLING.max_new_tokens)
        assert longest == (274 if sizes["context_length"] == 300 else 276)


@pytest.mark.parametrize(("field", "parser"), [("reasoning_parser", "kimi_k2"), ("tool_call_parser", "hermes")])
def test_a_parser_that_does_no_harm_is_a_warning_only(one: FakeServer, field: str, parser: str) -> None:
    one.set(model_info={field: parser})
    [warning] = probed(one.url).warnings
    assert warning.startswith(f"the server has {field}={parser}")


def test_a_target_under_another_folder_or_a_declared_name_is_the_same_model(one: FakeServer) -> None:
    one.set(model_path="/mnt/weights/model")
    probed(one.url)
    one.set(model_path="/mnt/weights/snapshot-81")
    probed(one.url, replace(MATERIAL, served_as="/mnt/weights/snapshot-81"))


def test_sampling_settings_of_the_run_do_not_reach_the_greedy_probe(one: FakeServer) -> None:
    hot = replace(SAMPLING, temperature=1.5, logprobs=False, max_new_tokens=100)
    assert probed(one.url, sampling=hot).greedy_ids == probed(one.url).greedy_ids


# ---- unfit


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        ({"model_path": "other/llama"}, r"serves 'other/llama', not 'models/fake/model'.*target\.served_as"),
        ({"model_info": {"architectures": ["QwenForCausalLM"]}}, "QwenForCausalLM.*LlamaForCausalLM"),
        ({"vocab_size": 32000}, "vocabulary has 49152 tokens, the server's is smaller.*31999"),
        ({"vocab_size": 49153}, "vocabulary has 49152 tokens, the server's is larger"),
        ({"context_length": 30}, r"max_new_tokens=24 leaves no room for a prompt in its 30 tokens"),
        ({"max_total_tokens": 31}, r"max_new_tokens=24 leaves no room for a prompt in its 31 tokens"),
        ({"server_info": {"max_req_input_len": None}}, "server_info or /v1/models lacks"),
        ({"api_key": "secret"}, r"lets nobody in: HTTP 401.*generate\.api_key_env"),
    ],
)
def test_another_model_vocabulary_or_room_is_named(one: FakeServer, sabotage: dict[str, Any], words: str) -> None:
    one.set(**sabotage)
    with pytest.raises(Unfit, match=words):
        probed(one.url)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("extra_bos", r"turns a text into \[1, 74"),
        ("drop_token", "completion_tokens is .*, but there are"),
        ("drop_token_consistent", r"token \d+ was forced|finish reason length after|ends in"),
        ("drop_eos", r"stop matched 2, but the answer ends in|output_ids is empty"),
        ("invent_eos", "finish reason length after"),
        ("empty_output", "output_ids is empty"),
        ("wrong_count", "completion_tokens is .*, but there are"),
        ("wrong_prompt_tokens", "prompt tokens that are not the 5 sent"),
        ("swapped_answer", "turns a text into"),
        ("swapped_ids_only", r"finish reason length after|token \d+ was forced"),
        ("id_out_of_range", "outside the vocabulary of 49152"),
        ("negative_id", "output id -1 is outside the vocabulary"),
        ("null_output", "output_ids is not a list of whole numbers"),
        ("unknown_finish", "unknown finish reason 'mystery'"),
        ("logprob_mismatch", "the ids in output_token_logprobs are not the output ids"),
        ("nan_logprob", "a log-probability is not a number"),
        ("speculative", "decodes speculatively; start it without --speculative-algorithm"),
    ],
)
def test_a_server_that_alters_prompts_or_answers_is_caught(one: FakeServer, fault: str, words: str) -> None:
    one.set(faults={fault: 1.0}, faults_hit_probe=True)
    with pytest.raises(Unfit, match=words):
        probed(one.url)


@pytest.mark.parametrize("token", MATERIAL.forced_ids)
def test_a_server_that_filters_one_special_token_is_caught_with_that_token(one: FakeServer, token: int) -> None:
    one.set(faults={"strip_token": 1.0}, faults_hit_probe=True, strip_ids=[token], mean_tokens=1000)
    words = rf"token {token} was forced and \[\] came back instead of \[{token}.*output_ids is empty"
    with pytest.raises(Unfit, match=words):
        probed(one.url)


@pytest.mark.parametrize("fault", ["http_503", "http_429", "reset", "abort", "partial_json", "not_json"])
def test_a_server_that_is_not_ready_is_worth_another_try(one: FakeServer, fault: str) -> None:
    one.set(faults={fault: 1.0}, faults_hit_probe=True)
    with pytest.raises(Transient):
        probed(one.url)


# ---- tokenizers


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def tiny_material(tiny: Path) -> ProbeMaterial:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = f"{TEXT}{''.join(SPECIAL_TOKENS)} the capital of France"
    return ProbeMaterial(
        model=str(tiny),
        served_as=None,
        architectures=("LlamaForCausalLM",),
        text=text,
        text_ids=tuple(tokenizer.encode(text).ids),
        prompt_ids=(1, 40, 41, 42, 2),
        forced_ids=(0, 1, IM_END, 3, 4),
    )


TINY_SAMPLING = replace(SAMPLING, vocab_size=VOCAB_SIZE, stop_ids=frozenset({0, IM_END}))


def served(folder: Path, tiny: Path, **options: Any) -> FakeServer:
    defaults = {"tokenizer_dir": str(folder), "model_path": str(tiny), "vocab_size": VOCAB_SIZE, "eos_id": IM_END}
    return server(**(defaults | options))


def test_the_targets_own_tokenizer_passes(tiny: Path, tiny_material: ProbeMaterial) -> None:
    with served(tiny, tiny) as one:
        assert probed(one.url, tiny_material, TINY_SAMPLING).warnings == []


def test_a_stop_token_of_the_server_alone_is_caught(tiny: Path, tiny_material: ProbeMaterial) -> None:
    with served(tiny, tiny, eos_id=3) as one, pytest.raises(Unfit, match=r"token 3 was forced and \[3\] came back"):
        probed(one.url, tiny_material, TINY_SAMPLING)


@contextmanager
def another_tokenizer(folder: Path, specials: list[str]) -> Iterator[Path]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["nothing but other words"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    yield folder


@pytest.mark.parametrize("specials", [list(SPECIAL_TOKENS), list(SPECIAL_TOKENS[:3]), ["<s>", *SPECIAL_TOKENS]])
def test_another_tokenizer_is_caught_by_what_it_makes_of_a_text(
    tiny: Path, tiny_material: ProbeMaterial, tmp_path: Path, specials: list[str]
) -> None:
    with another_tokenizer(tmp_path, specials) as folder, served(folder, tiny) as one:
        before = len(one.requests())
        with pytest.raises(Unfit, match=r"tokenizer turns a text into \[.*\.\.\., the one in target\.model into \["):
            probed(one.url, tiny_material, TINY_SAMPLING)
        assert len(one.requests()) - before <= 3, "no ids are sent to a server whose tokenizer is another one"


def test_a_smaller_vocabulary_under_the_same_tokenizer_is_caught_before_an_id_kills_the_server(
    tiny: Path, tiny_material: ProbeMaterial
) -> None:
    with served(tiny, tiny, vocab_size=60) as one:
        with pytest.raises(Unfit, match="vocabulary has 400 tokens, the server's is smaller"):
            probed(one.url, tiny_material, TINY_SAMPLING)
        assert one.running


# ---- siblings


def facts_of_two(first: FakeServer, **options: Any) -> list[ServerFacts]:
    with server(**options) as second:
        return [probed(first.url), probed(second.url)]


def test_siblings_of_one_kind_agree(one: FakeServer) -> None:
    assert compare(facts_of_two(one)) == []


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ({"weight_version": "v2"}, "has weight_version 'default', .* has 'v2'; a run needs servers of one kind"),
        ({"model_seed": 1}, "do not serve the same model: the log-probabilities of one prompt differ by"),
        ({"server_info": {"quantization": "fp8"}}, "has quantization None, .* has 'fp8'"),
        ({"server_info": {"version": "0.5.9"}}, "has version '0.5.23', .* has '0.5.9'"),
    ],
)
def test_a_sibling_of_another_kind_is_named(one: FakeServer, difference: dict[str, Any], words: str) -> None:
    with pytest.raises(Unfit, match=words):
        compare(facts_of_two(one, **difference))


def test_another_greedy_answer_of_the_same_model_is_a_warning(one: FakeServer) -> None:
    first = probed(one.url)
    [warning] = compare([first, replace(first, greedy_ids=(*first.greedy_ids[:-1], 77))])
    assert "answer a greedy probe differently" in warning


# ---- no SGLang


class _Plain(http.server.BaseHTTPRequestHandler):
    status, body = 404, b"not here"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def plain_server(status: int, body: bytes) -> Iterator[str]:
    handler = type("Handler", (_Plain,), {"status": status, "body": body})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as plain:
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{plain.server_port}"
        plain.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"not here", "lacks a path of SGLang: HTTP 404: not here"),
        (403, b"\xff\xfe not text", "lets nobody in: HTTP 403"),
        (400, b"what?", "refuses a probe request: HTTP 400: what"),
        (200, b"[]", r"/model_info answers '\[\]', which no SGLang does"),
        (200, b'"hello"', "/model_info answers 'hello', which no SGLang does"),
        (200, b"{}", "serves '', not 'models/fake/model'"),
        (200, json.dumps({"model_path": "fake/model"}).encode(), "server_info or /v1/models lacks"),
    ],
)
def test_what_is_no_sglang_is_unfit(status: int, body: bytes, words: str) -> None:
    with plain_server(status, body) as url, pytest.raises(Unfit, match=words):
        probed(url)


def test_a_server_that_nobody_runs_is_worth_another_try() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(Transient, match="connection lost"):
            probed(f"http://127.0.0.1:{unused.getsockname()[1]}")
