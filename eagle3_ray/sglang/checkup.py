"""Probes all servers of a run at its start: the fit ones, the silent ones, and an error for any other."""

import asyncio
from collections.abc import Sequence

from eagle3_ray.run_log import say
from eagle3_ray.sglang.probe import ProbeMaterial, ServerFacts, Unfit, compare, probe
from eagle3_ray.sglang.protocol import Sampling, Transient
from eagle3_ray.sglang.transport import open_session


def check_up(
    urls: Sequence[str], material: ProbeMaterial, sampling: Sampling, api_key: str | None, timeout_s: float
) -> tuple[list[ServerFacts], list[str]]:
    """The facts of every server that answers, and the URLs of those that do not; says on stderr what it finds.

    Raises:
        Unfit: a server answers and is not what the run needs, or none answers.
    """
    found = asyncio.run(_probe_all(urls, material, sampling, api_key, timeout_s))
    facts, silent = [], []
    for url, result in zip(urls, found, strict=True):
        if isinstance(result, ServerFacts):
            facts.append(result)
            say(
                f"{url} is fit: SGLang {result.settings['engine.version']}, {result.capacity_tokens} tokens of KV cache"
            )
        elif isinstance(result, Transient):
            silent.append(url)
            say(f"WARNING: {url} does not answer ({result}); it is probed again while the job runs")
        elif isinstance(result, Unfit):
            raise Unfit(f"{url}: {result}")
        else:
            raise result
    if not facts:
        raise Unfit(f"No server answers at {', '.join(silent)}. Start one, or correct generate.endpoints.")
    for warning in [f"{fact.url}: {w}" for fact in facts for w in fact.warnings] + compare(facts):
        say(f"WARNING: {warning}")
    return facts, silent


async def _probe_all(
    urls: Sequence[str], material: ProbeMaterial, sampling: Sampling, api_key: str | None, timeout_s: float
) -> list[ServerFacts | BaseException]:
    async with open_session(api_key, timeout_s) as session:
        work = (probe(session, url, material, sampling) for url in urls)
        return await asyncio.gather(*work, return_exceptions=True)
