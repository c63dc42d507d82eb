"""What the client takes for granted holds on a real SGLang and on the stand-in alike."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from tokenizers import Tokenizer

from eagle3_ray.sglang.probe import ProbeMaterial, Unfit, compare, probe
from eagle3_ray.sglang.protocol import Refused, Sampling, check, request_body
from eagle3_ray.sglang.transport import get, open_session, post
from tests.engine.conftest import PARSER, SHORT_CONTEXT
from tests.fakes.sglang_server import FakeServer

EOS, VOCABULARY, CONTEXT = 2, 49152, 8192
SAMPLING = Sampling(
    max_new_tokens=12, temperature=0.0, top_p=1.0, logprobs=True, vocab_size=VOCABULARY, stop_ids=frozenset({EOS})
)
ONE_TOKEN = replace(SAMPLING, max_new_tokens=1)
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Say <think> and nothing else.")

T = TypeVar("T")


@dataclass(frozen=True)
class Engine:
    """A plain server, and one with a reasoning parser and a short context."""

    plain: str
    parsing: str


@pytest.fixture(scope="module", params=["stand-in", "sglang"])
def engine(request: pytest.FixtureRequest, cpu_model: Path) -> Iterator[Engine]:
    if request.param == "sglang":
        plain, parsing = (request.getfixturevalue(name) for name in ("cpu_server", "parsing_server"))
        yield Engine(plain.url, parsing.url)
        return
    fit = {"model_path": str(cpu_model), "tokenizer_dir": str(cpu_model), "vocab_size": VOCABULARY, "eos_id": EOS}
    fit |= {"mean_tokens": 30, "token_latency_s": 0.002}
    short = {"context_length": SHORT_CONTEXT, "model_info": {"reasoning_parser": PARSER}}
    with FakeServer(**fit, context_length=CONTEXT) as stand_in, FakeServer(**fit, **short) as parsing_stand_in:
        yield Engine(stand_in.url, parsing_stand_in.url)


@pytest.fixture(scope="module")
def tokenizer(cpu_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(cpu_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Chat prompts; the last ends in an open <think>, as those of a reasoning model do."""
    texts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return [tokenizer.encode(text).ids for text in [*texts, texts[0] + "<think>\n"]]


@pytest.fixture(scope="module")
def material(cpu_model: Path, tokenizer: Tokenizer, prompts: list[list[int]]) -> ProbeMaterial:
    text = "Grüße, 世界! 3.14 <|im_start|><|im_end|><|endoftext|>\n\tdone"
    return ProbeMaterial(
        model=str(cpu_model),
        served_as=None,
        architectures=("LlamaForCausalLM",),
        text=text,
        text_ids=tuple(tokenizer.encode(text).ids),
        prompt_ids=tuple(prompts[0]),
        forced_ids=(EOS, 0, 1, VOCABULARY - 1),
    )


def ask(work: Callable[[aiohttp.ClientSession], Awaitable[T]]) -> T:
    async def run() -> T:
        async with open_session(None, 120) as session:
            return await work(session)

    return asyncio.run(run())


def answers(url: str, prompts: Sequence[list[int]], sampling: Sampling = SAMPLING, **fields: Any) -> list[Any]:
    """The raw bodies, each of which passed every check; requested all at once."""

    async def one(session: aiohttp.ClientSession, row: int, prompt_ids: list[int]) -> Any:
        body = await post(session, f"{url}/generate", request_body(f"row{row}", prompt_ids, sampling) | fields)
        checked = check(body, f"row{row}", prompt_ids, sampling)
        assert checked.output_ids == body["output_ids"]
        return body

    return ask(lambda session: asyncio.gather(*(one(session, n, ids) for n, ids in enumerate(prompts))))


def ids_of(bodies: Sequence[Any]) -> list[list[int]]:
    return [body["output_ids"] for body in bodies]


def test_the_probe_passes_with_no_warning(engine: Engine, material: ProbeMaterial) -> None:
    facts = ask(lambda session: probe(session, engine.plain, material, SAMPLING))
    assert facts.warnings == []
    assert facts.context == CONTEXT
    assert facts.capacity_tokens >= CONTEXT
    assert facts.max_running >= 1
    assert len(facts.prompt_logprobs) == len(material.prompt_ids) - 1


def test_a_reasoning_parser_is_a_warning_and_changes_no_id(
    engine: Engine, material: ProbeMaterial, prompts: list[list[int]]
) -> None:
    plain = ask(lambda session: probe(session, engine.plain, material, SAMPLING))
    parsing = ask(lambda session: probe(session, engine.parsing, material, SAMPLING))
    [warning] = parsing.warnings
    assert warning.startswith(f"the server has reasoning_parser={PARSER}")
    assert compare([plain, parsing]) == []
    assert ids_of(answers(engine.parsing, prompts)) == ids_of(answers(engine.plain, prompts))


@pytest.mark.parametrize(("size", "words"), [(VOCABULARY - 1, "larger"), (VOCABULARY + 1, "smaller")])
def test_another_vocabulary_is_told_without_harm(
    engine: Engine, material: ProbeMaterial, size: int, words: str
) -> None:
    with pytest.raises(Unfit, match=f"the server's is {words}"):
        ask(lambda session: probe(session, engine.plain, material, replace(SAMPLING, vocab_size=size)))
    answers(engine.plain, [[5, 6, 7]], ONE_TOKEN)


def test_answers_end_by_a_stop_token_or_by_the_limit_and_pass_every_check(
    engine: Engine, prompts: list[list[int]]
) -> None:
    bodies = answers(engine.plain, [*prompts, prompts[0]])
    assert bodies[-1]["output_ids"] == bodies[0]["output_ids"], "greedy answers repeat"
    for body in answers(engine.plain, prompts[:2], ONE_TOKEN):
        assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    [forced] = answers(engine.plain, prompts[:1], sampling_params=forcing(EOS))
    assert forced["output_ids"] == [EOS]
    assert forced["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


def forcing(token: int) -> dict[str, Any]:
    return SAMPLING.params() | {"logit_bias": {str(token): 1e4}}


@pytest.mark.parametrize("token", [0, 1, 17, VOCABULARY - 1])
def test_a_forced_token_comes_back_in_ids_and_in_log_probabilities(
    engine: Engine, prompts: list[list[int]], token: int
) -> None:
    [body] = answers(engine.plain, prompts[:1], sampling_params=forcing(token))
    assert body["output_ids"] == [token] * SAMPLING.max_new_tokens
    assert [entry[1] for entry in body["meta_info"]["output_token_logprobs"]] == body["output_ids"]


def test_the_prompts_own_log_probabilities_carry_its_ids(engine: Engine, prompts: list[list[int]]) -> None:
    [body] = answers(engine.plain, prompts[:1], logprob_start_len=0)
    entries = body["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == prompts[0]
    assert entries[0][0] is None
    assert all(entry[0] <= 0 for entry in entries[1:])


@pytest.mark.parametrize(
    ("length", "changes", "words"),
    [
        (0, {}, "empty"),
        (CONTEXT + 1, {}, "longer than the model's context length"),
        (CONTEXT - 5, {}, "exceeds the model's maximum context length|exceeds the maximum allowed length"),
        (5, {"temperature": -1.0}, "temperature must be"),
        (5, {"max_new_tokenz": 3}, "unknown field|max_new_tokenz"),
    ],
)
def test_a_request_at_fault_is_a_400_and_hurts_nobody(
    engine: Engine, length: int, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(Refused, match=rf"HTTP 400: (.|\n)*({words})"):
        answers(engine.plain, [[9] * length], sampling_params=SAMPLING.params() | changes)
    answers(engine.plain, [[5, 6, 7]], ONE_TOKEN)


def test_the_longest_prompt_gets_its_full_answer(engine: Engine, material: ProbeMaterial) -> None:
    facts = ask(lambda session: probe(session, engine.parsing, material, SAMPLING))
    assert facts.context == SHORT_CONTEXT
    longest = facts.longest_prompt(SAMPLING.max_new_tokens)
    [body] = answers(engine.parsing, [[9] * longest], sampling_params=forcing(17))
    assert body["output_ids"] == [17] * SAMPLING.max_new_tokens


def test_the_load_has_what_admission_reads(engine: Engine) -> None:
    [rank] = ask(lambda session: get(session, f"{engine.plain}/v1/loads?include=core,queues"))["loads"]
    for name in ("num_running_reqs", "num_waiting_reqs", "token_usage", "gen_throughput"):
        assert isinstance(rank[name], int | float), name


def test_a_client_that_leaves_frees_its_request(engine: Engine, prompts: list[list[int]]) -> None:
    async def leave(session: aiohttp.ClientSession) -> None:
        async def running() -> int:
            loads = await get(session, f"{engine.plain}/v1/loads?include=core,queues")
            return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in loads["loads"])

        async def until(count: int) -> None:
            while await running() != count:
                await asyncio.sleep(0.1)

        endless = request_body("leaves", prompts[0], replace(SAMPLING, max_new_tokens=5000))
        endless["sampling_params"]["ignore_eos"] = True
        request = asyncio.get_running_loop().create_task(post(session, f"{engine.plain}/generate", endless))
        async with asyncio.timeout(20):
            await until(1)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        async with asyncio.timeout(8):  # 5000 tokens would take far longer
            await until(0)

    ask(leave)
    answers(engine.plain, prompts[:1], ONE_TOKEN)
