"""The baseline: what anybody would write with asyncio and aiohttp. Nothing is checked, repeated or resumed.

python benchmarks/plain_client.py URL PROMPTS.jsonl ANSWERS.jsonl
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp


async def generate_all(url: str, rows: list[dict[str, Any]], in_flight: int, answers: Path) -> float:
    """Writes an answer a line; returns the seconds from the first request to the last answer."""
    room = asyncio.Semaphore(in_flight)
    connector = aiohttp.TCPConnector(limit=0)

    async with aiohttp.ClientSession(connector=connector) as session:
        with answers.open("w") as file:

            async def one(row: dict[str, Any]) -> None:
                body = {
                    "rid": row["id"],
                    "input_ids": row["input_ids"],
                    "sampling_params": {"max_new_tokens": 200, "temperature": 0.7, "stop_token_ids": [0, 2]},
                    "return_logprob": True,
                }
                async with room, session.post(f"{url}/generate", json=body) as response:
                    answer = await response.json()
                file.write(json.dumps({"id": row["id"], "output_ids": answer["output_ids"]}) + "\n")

            started = time.monotonic()
            await asyncio.gather(*(one(row) for row in rows))
            return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--in-flight", type=int, default=150)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.prompts.open()]
    seconds = asyncio.run(generate_all(arguments.url, rows, arguments.in_flight, arguments.answers))
    print(json.dumps({"first_to_last_s": seconds}))


if __name__ == "__main__":
    main()
