"""What a job would hand to the probe and the fleet, for stand-in servers: material, sampling, a started fleet."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from eagle3_ray.sglang.fleet import Fleet
from eagle3_ray.sglang.probe import ProbeMaterial, probe
from eagle3_ray.sglang.protocol import Sampling
from eagle3_ray.sglang.transport import open_session
from tests.fakes.sglang_server import FakeServer, answer

EOS = 2
TEXT = "Grüße, 世界! 3.14"
SAMPLING = Sampling(
    max_new_tokens=24, temperature=0.0, top_p=1.0, logprobs=True, vocab_size=49152, stop_ids=frozenset({EOS})
)
MATERIAL = ProbeMaterial(
    model="models/fake/model",
    served_as=None,
    architectures=("LlamaForCausalLM",),
    text=TEXT,
    text_ids=tuple(byte + 3 for byte in TEXT.encode()),  # a stand-in without a tokenizer spells text so
    prompt_ids=(1, 500, 600, 700, 800),
    forced_ids=(EOS, 0, 1, 49151),
)


def server(**options: Any) -> FakeServer:
    return FakeServer(**({"mean_tokens": 12, "retry_after_s": 0} | options))


def prompts(count: int, length: int = 6) -> list[list[int]]:
    return [[1, *(1000 + (7 * row + 13 * column) % 9000 for column in range(length - 2)), row] for row in range(count)]


def right_answer(prompt_ids: Sequence[int], sampling: Sampling = SAMPLING, mean_tokens: float = 12) -> list[int]:
    """What a fit stand-in answers greedily."""
    ids, _ = answer(
        prompt_ids,
        vocab_size=sampling.vocab_size,
        eos_id=EOS,
        max_new_tokens=sampling.max_new_tokens,
        mean_tokens=mean_tokens,
    )
    return ids


@asynccontextmanager
async def started_fleet(
    *servers: FakeServer,
    sampling: Sampling = SAMPLING,
    api_key: str | None = None,
    timeout_s: float = 10,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    """A fleet of probed servers, closed at the end."""
    open_: Callable[[], Any] = lambda: open_session(api_key, timeout_s)  # noqa: E731
    async with open_() as session:
        facts = [await probe(session, one.url, MATERIAL, sampling) for one in servers]
    defaults = {"max_in_flight": 64, "share": 1.0, "attempts": 12, "outage_limit_s": 60}
    fleet = Fleet(facts, open_, MATERIAL, sampling, **(defaults | settings))
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()


def row_requests(*servers: FakeServer) -> list[dict[str, Any]]:
    """The requests that were not the probe's."""
    return [seen for one in servers for seen in one.requests() if not str(seen.get("rid")).startswith("probe")]
