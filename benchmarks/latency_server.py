"""A server that speaks SGLang's native protocol and takes 0.1 to 3 s for a request, as the request itself decides.

What it costs is almost nothing, so a client's rate against it is the client's own. Clients that send the same prompts
wait for the same times. Answers pass every check of the probe and of `eagle3_ray.sglang.protocol.check`. It ends with
the process that started it.

    python benchmarks/latency_server.py --model FOLDER      # prints {"url": ...}
"""

import argparse
import asyncio
import json
import os
import random
import sys
import threading
import time
import zlib
from array import array
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

CONTEXT, KV_TOKENS = 8192, 1 << 20
SHORTEST_S, LONGEST_S = 0.1, 3.0
TOKENS_PER_SECOND = 50  # of one answer; the longest has 151 tokens


class LatencyServer:
    """The routes. At most `max_running` requests are served at once; the others wait, and `/v1/loads` says so."""

    def __init__(self, folder: Path, max_running: int, seconds: float) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.folder = folder
        self.seconds = seconds
        self.architectures: list[str] = config["architectures"]
        self.vocab_size: int = config["vocab_size"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.max_running = max_running
        self.seats = asyncio.Semaphore(max_running)
        self.arrived = self.running = self.most = 0
        self.first = self.last = 0.0
        self.answered = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_get("/stats", self.stats)
        app.router.add_post("/generate", self.generate)
        return app

    async def model_info(self, request: web.Request) -> web.Response:
        info = {"model_path": str(self.folder), "weight_version": "default", "architectures": self.architectures}
        return web.json_response(info | {"reasoning_parser": None, "tool_call_parser": None})

    async def server_info(self, request: web.Request) -> web.Response:
        info: dict[str, Any] = {"version": "0.5.23", "dtype": "auto", "quantization": None, "kv_cache_dtype": "auto"}
        info |= {"max_total_num_tokens": KV_TOKENS, "max_req_input_len": CONTEXT - 6}
        info |= {"internal_states": [{"effective_max_running_requests_per_dp": self.max_running}]}
        return web.json_response(info)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": str(self.folder), "max_model_len": CONTEXT}]})

    async def loads(self, request: web.Request) -> web.Response:
        rank = {"num_running_reqs": self.running, "num_waiting_reqs": self.arrived - self.running}
        rate = self.running * TOKENS_PER_SECOND
        return web.json_response({"loads": [rank | {"token_usage": 0.1, "gen_throughput": float(rate)}]})

    async def stats(self, request: web.Request) -> web.Response:
        """First arrival to last answer, answers and most in flight since the last look, less the probe's requests."""
        stats = {"first_request": self.first, "last_answer": self.last}  # of the clock that all processes here share
        stats |= {"first_to_last_s": self.last - self.first, "answers": self.answered, "most_in_flight": self.most}
        self.answered, self.most = 0, 0
        return web.json_response(stats)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = body["sampling_params"]
        bias = {int(token): value for token, value in sampling.get("logit_bias", {}).items()}
        if any(token >= self.vocab_size for token in bias):
            return web.json_response({"error": {"message": "logit_bias is outside the vocabulary"}}, status=400)
        probing = str(body["rid"]).startswith("probe")
        if not probing and self.answered == 0 and self.arrived == 0:
            self.first = time.monotonic()
        self.arrived += 1
        self.most = max(self.most, self.arrived)
        try:
            async with self.seats:
                self.running += 1
                try:
                    reply = await self.answer(body, sampling, bias, probing)
                finally:
                    self.running -= 1
        finally:
            self.arrived -= 1
        if not probing:
            self.answered, self.last = self.answered + 1, time.monotonic()
        return web.json_response(reply)

    async def answer(
        self, body: dict[str, Any], sampling: dict[str, Any], bias: dict[int, float], probing: bool
    ) -> dict[str, Any]:
        prompt_ids: list[int] = body.get("input_ids") or self.tokenizer.encode(body["text"]).ids
        chance = random.Random(zlib.crc32(array("q", prompt_ids).tobytes()))
        latency_s = SHORTEST_S + (LONGEST_S - SHORTEST_S) * chance.random()
        if not probing:
            await asyncio.sleep(latency_s * self.seconds)
        limit, stops = sampling["max_new_tokens"], set(sampling.get("stop_token_ids", ()))
        forced = [token for token, value in bias.items() if value > 0]
        ordinary = chance.choices(range(10, min(300, self.vocab_size)), k=int(TOKENS_PER_SECOND * latency_s))
        ids = (forced * limit if forced else [*ordinary, *sorted(stops)[-1:]])[:limit]
        ids = ids[: next((n for n, token in enumerate(ids, 1) if token in stops), limit)]
        stopped = ids[-1] in stops
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": ids[-1]}
            if stopped
            else {"type": "length", "length": len(ids)},
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(ids),
            "weight_version": "default",
            "e2e_latency": latency_s,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
            if body.get("logprob_start_len") == 0:
                meta["input_token_logprobs"] = [[-1.0 if n else None, t, None] for n, t in enumerate(prompt_ids)]
        return {"text": "", "output_ids": ids, "prompt_token_ids": prompt_ids, "meta_info": meta}


async def serve(folder: Path, max_running: int, seconds: float) -> None:
    runner = web.AppRunner(LatencyServer(folder, max_running, seconds).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(json.dumps({"url": "http://{}:{}".format(*runner.addresses[0][:2])}), flush=True)
    await asyncio.Event().wait()


def end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and tokenizer.json")
    parser.add_argument("--max-running", type=int, default=256, help="requests served at once")
    parser.add_argument("--seconds", type=float, default=1.0, help="factor on the latencies")
    arguments = parser.parse_args()
    threading.Thread(target=end_with_parent, daemon=True).start()
    asyncio.run(serve(arguments.model, arguments.max_running, arguments.seconds))


if __name__ == "__main__":
    main()
