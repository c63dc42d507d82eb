"""The generate job on a real SGLang, with real prompts: what is stored is what the engine says."""

import asyncio
import collections
import json
from pathlib import Path
from typing import Any

import aiohttp

from eagle3_ray.sglang_cpu import Server
from tests.jobs import Jobs, rows

TOKENS = 16
PER_PARTITION = 100
CONVERSATIONS = 12


def words(run: Path, prompts: Path, url: str, *more: str) -> list[str]:
    return [
        f"run.dir={run}",
        f"prompts.path={prompts}",
        f"generate.endpoints={url}",
        f"generate.max_new_tokens={TOKENS}",
        *more,
    ]


async def ask(url: str, prompts: list[list[int]]) -> list[list[int]]:
    """Output ids of plain greedy requests."""
    room = asyncio.Semaphore(48)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session:

        async def one(prompt_ids: list[int]) -> list[int]:
            body = {"input_ids": prompt_ids, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS}}
            async with room, session.post(f"{url}/generate", json=body) as response:
                ids: list[int] = (await response.json())["output_ids"]
                return ids

        return await asyncio.gather(*(one(prompt_ids) for prompt_ids in prompts))


def by_name(found: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[list[int], list[int]]]:
    return {(row["prompt_id"], row["turn"]): (row["prompt_ids"], row["output_ids"]) for row in found}


def test_each_stored_answer_is_what_the_engine_answers_directly(
    cluster: Jobs, cpu_server: Server, parsing_server: Server, shared_data: Path, tmp_path: Path
) -> None:
    prompts, run = tmp_path / "prompts", tmp_path / "run"
    prompts.mkdir()
    for source in (shared_data / "prompts").glob("*.jsonl"):
        (prompts / source.name).write_bytes(source.read_bytes())
    talks = (shared_data / "eval" / "mt_bench.jsonl").read_text().splitlines()[:CONVERSATIONS]
    (prompts / "talks.jsonl").write_text("\n".join(talks))
    arguments = words(run, prompts, cpu_server.url, f"prompts.limit={PER_PARTITION}")
    result = cluster.run(*arguments)
    assert result.code == 0, result.stderr
    turns = sum(len(json.loads(talk)["messages"]) for talk in talks)
    assert result.summary["rows"] + result.summary["rejected"] == 3 * PER_PARTITION + turns
    stored = rows(run, "sequences")
    assert len(stored) >= 300
    per_partition = collections.Counter(row["partition"] for row in stored)
    assert len(per_partition) == 4
    answers = asyncio.run(ask(cpu_server.url, [row["prompt_ids"] for row in stored]))
    wrong = [row["prompt_id"] for row, answer in zip(stored, answers, strict=True) if row["output_ids"] != answer]
    assert wrong == []
    again = cluster.run(*arguments)
    assert (again.code, again.summary) == (0, result.summary)

    few = ["prompts.limit=8", "prompts.partitions=B1_gsm8k,B2_codegen"]
    parsed = cluster.run(*words(tmp_path / "parsed", prompts, parsing_server.url, *few))
    assert parsed.code == 0, parsed.stderr
    assert "reasoning_parser=qwen3" in parsed.stderr
    whole = by_name(stored)
    found = by_name(rows(tmp_path / "parsed", "sequences"))
    assert len(found) >= 14
    assert all(whole[name] == ids for name, ids in found.items())
