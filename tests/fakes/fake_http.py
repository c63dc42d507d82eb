"""The routes of the stand-in SGLang 0.5.23 server, and the faults that live on the wire.

Messages and shapes were copied from a running server; paths in docstrings are under `sglang/srt`.
"""

import asyncio
import json
import os
import socket
import struct
import time
import uuid
from dataclasses import asdict, replace
from typing import Any, NoReturn, cast

from aiohttp import web

from tests.fakes import fake_model
from tests.fakes.fake_engine import (
    HTTP_FAULTS,
    Job,
    Options,
    Refused,
    Scheduler,
    accept,
    bad_request,
    error_response,
    tokenizer,
)
from tests.fakes.fake_model import BODY_FAULTS, CONSISTENT_FAULTS, Generation, JsonObject, Vocabulary

VERSION = "0.5.23"


class FakeSglang:
    """The routes. State that must outlive a kill (the request log) goes to a descriptor of the parent's."""

    def __init__(self, options: Options, log_fd: int | None) -> None:
        self.options = options
        self.log_fd = log_fd
        self.boot = f"{os.getpid()}-{time.time_ns()}"
        self.scheduler = Scheduler(options)
        self.jobs: dict[str, Job] = {}  # by rid, in flight
        self.previous: Job | None = None
        self.arrivals = 0
        self.fault_index = 0  # counts the requests that faults may hit
        self.max_in_flight = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.check_key], client_max_size=1 << 28)
        for path, handler in {
            "/health": self.health,
            "/health_generate": self.health,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/v1/models": self.models,
            "/v1/loads": self.loads,
            "/fake/stats": self.stats,
        }.items():
            app.router.add_get(path, handler)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/fake/set", self.set_options)
        return app

    @web.middleware
    async def check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """`utils/auth.py: decide_request_auth`: health stays open."""
        key = self.options.api_key
        if key and not request.path.startswith(("/health", "/fake/")):
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or token != key:
                return reply({"error": "Unauthorized"}, 401)
        return cast(web.StreamResponse, await handler(request))

    # ---- information

    async def health(self, request: web.Request) -> web.Response:
        """The real one sleeps a second and runs a token, on both paths."""
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        """`entrypoints/http_server.py: model_info`, less its `embedding` block."""
        options, null = self.options, None
        info: JsonObject = {"model_path": options.model_path, "served_model_name": options.model_path}
        info |= {"tokenizer_path": options.tokenizer_dir or options.model_path, "is_generation": True}
        info |= {"preferred_sampling_params": null, "weight_version": options.weight_version, "load_format": "auto"}
        info |= {"reasoning_parser": null, "tool_call_parser": null, "disaggregation_mode": "null"}
        info |= {"has_image_understanding": False, "has_audio_understanding": False}
        info |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        return reply(info | options.model_info)

    async def server_info(self, request: web.Request) -> web.Response:
        """The arguments (550 of them in the real one), what the scheduler made of them, and both again for each rank.

        `context_length` and `max_running_requests` are arguments: null unless given. What holds is in `/v1/models`, in
        `effective_max_running_requests_per_dp` and in `/v1/loads`.
        """
        options, null = self.options, None
        arguments: JsonObject = {"model_path": options.model_path, "served_model_name": options.model_path}
        arguments |= {"tokenizer_path": options.tokenizer_dir or options.model_path, "skip_tokenizer_init": False}
        arguments |= {"weight_version": options.weight_version, "load_format": "auto", "context_length": null}
        arguments |= {"dtype": "auto", "quantization": null, "kv_cache_dtype": "auto", "max_running_requests": null}
        arguments |= {"max_total_tokens": null, "chunked_prefill_size": 4096, "disable_radix_cache": False}
        arguments |= {"reasoning_parser": null, "tool_call_parser": null, "enable_strict_thinking": False}
        arguments |= {"speculative_algorithm": null, "speculative_num_draft_tokens": null, "device": "cpu"}
        arguments |= {"enable_deterministic_inference": False, "random_seed": 1, "sampling_defaults": "model"}
        arguments |= {"allow_auto_truncate": False, "tp_size": 1, "dp_size": 1, "pp_size": 1, "api_key": null}
        arguments |= {"enable_return_aux_hidden_states": False, "return_aux_hidden_state_layer_ids": null}
        rank = arguments | {
            "world_size": 1,
            "effective_max_running_requests_per_dp": options.max_running,
            "last_gen_throughput": self.scheduler.load()["gen_throughput"],
            "memory_usage": {"weight": 0.5, "kvcache": 0.7, "token_capacity": options.max_total_tokens},
        }
        info = arguments | {
            "status": "ready",
            "max_total_num_tokens": options.max_total_tokens,
            "max_req_input_len": options.max_req_len - 5,
            "kv_events": null,
            "internal_states": [rank],
            "version": VERSION,
            "frontend": "python",
        }
        return reply(info | options.server_info)

    async def models(self, request: web.Request) -> web.Response:
        path = self.options.model_path
        card: JsonObject = {
            "id": path,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang",
            "root": path,
        }
        card |= {"parent": None, "max_model_len": self.options.context_length}
        return reply({"object": "list", "data": [card]})

    async def loads(self, request: web.Request) -> web.Response:
        head = {"timestamp": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), "version": VERSION}
        return reply(head | {"accelerator": None, "num_accelerators": 1, "loads": [self.scheduler.load()]})

    async def stats(self, request: web.Request) -> web.Response:
        return reply({"in_flight": len(self.jobs), "max_in_flight": self.max_in_flight})

    async def set_options(self, request: web.Request) -> web.Response:
        """Naming `faults` starts their request count again: index 0 is the next request."""
        changes = await request.json()
        self.options.__dict__.update(asdict(Options(**(asdict(self.options) | changes))))
        if "faults" in changes:
            self.fault_index = 0
        self.scheduler.pump()
        return reply({})

    # ---- generation

    async def generate(self, request: web.Request) -> web.StreamResponse:
        entry: JsonObject = {"boot": self.boot, "index": self.arrivals, "start": time.time(), "outcome": "in flight"}
        self.arrivals += 1
        try:
            body = await read_body(request)
            rid: str = body.get("rid") or uuid.uuid4().hex
            received = body.get("input_ids") or body.get("text") or ()
            entry |= {"rid": rid, "prompt_length": len(received) if isinstance(received, list | str) else 0}
            may_fail = self.options.faults_hit_probe or not rid.startswith("probe")
            fault = self.options.fault_for(self.fault_index) if may_fail else None
            self.log(entry)
            if rid in self.jobs:
                raise Refused(f"Duplicate request ID detected: {rid}")
            job = accept(body, rid, self.options, fault)
        except Refused as refusal:
            self.log(entry | {"outcome": "refused: 400"})
            return reply(refusal.body, 400)
        self.fault_index += may_fail
        self.jobs[rid] = job
        self.max_in_flight = max(self.max_in_flight, len(self.jobs))
        linger_s, outcome = 0.0, "aborted by client"
        try:
            response = await self.serve(request, job, fault)
            outcome = "answered"
            return response
        except asyncio.CancelledError:  # aiohttp cancels the handler when the connection is lost
            linger_s = self.options.linger_s
            raise
        finally:
            self.log(entry | {"outcome": f"fault:{fault}" if fault else outcome})
            if linger_s:
                asyncio.get_running_loop().call_later(linger_s, self.jobs.pop, rid)
            else:
                del self.jobs[rid]

    async def serve(self, request: web.Request, job: Job, fault: str | None) -> web.StreamResponse:
        if fault == "reset":
            await reset(request)
        if fault and fault in HTTP_FAULTS:
            return http_fault(fault, self.options.retry_after_s)
        if fault == "timeout":
            await asyncio.Event().wait()
        if fault == "slow":
            await asyncio.sleep(self.options.slow_s)
        await self.scheduler.run(job)
        body = json.dumps(self.answer(job, fault), separators=(",", ":")).encode()
        if fault is None:
            self.previous = job
        if fault == "reset_midway":
            response = web.StreamResponse(headers={"Content-Length": str(len(body))})
            response.content_type = "application/json"
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            await asyncio.sleep(0.01)  # else the reset overtakes the bytes
            await reset(request)
        if fault == "not_json":
            return web.Response(text="<html><body>upstream says hello</body></html>", content_type="text/html")
        return web.Response(
            body=body[: len(body) // 2] if fault == "partial_json" else body, content_type="application/json"
        )

    def answer(self, job: Job, fault: str | None) -> JsonObject:
        if fault == "swapped_answer":
            return self.render(self.other_than(job))
        if spoil := CONSISTENT_FAULTS.get(fault or ""):
            options = self.options
            spoil(job.generation, Vocabulary(options.vocab_size, options.eos_id, tuple(options.strip_ids)))
        out = self.render(job)
        if fault == "swapped_ids_only":
            theirs = self.render(self.other_than(job))
            out |= {"text": theirs["text"], "output_ids": theirs["output_ids"]}
            foreign: tuple[str, ...] = ("finish_reason", "completion_tokens", "weight_versions")
            foreign += ("output_token_logprobs", "output_token_logprobs_length") if job.return_logprob else ()
            out["meta_info"] |= {name: theirs["meta_info"][name] for name in foreign}
        if disturb := BODY_FAULTS.get(fault or ""):
            disturb(out)
        return out

    def other_than(self, job: Job) -> Job:
        """Another request in flight, else the previous one, else one nobody sent; with what this one asked for."""
        other = next((peer for peer in self.jobs.values() if peer is not job), self.previous)
        source = other.generation if other else None
        prompt_ids = source.prompt_ids if source else [*job.generation.prompt_ids[::-1], self.options.eos_id + 1]
        ids = source.ids if source else fake_model.ordinary_range(self.options.vocab_size)[:3]
        scores = fake_model.token_logprobs([*prompt_ids, *ids], len(prompt_ids), model_seed=self.options.model_seed)
        finish = source.finish if source else {"type": "length", "length": 3}
        generation = Generation(prompt_ids, list(ids), finish, scores if job.return_logprob else [])
        return replace(job, rid=other.rid if other else "somebody-else", generation=generation)

    def render(self, job: Job) -> JsonObject:
        options, generation = self.options, job.generation
        shown = [token for token in generation.ids if 0 <= token < options.vocab_size and token != options.eos_id]
        spelled = tokenizer(options.tokenizer_dir).decode(shown) if options.tokenizer_dir else ""
        return fake_model.render(
            generation,
            rid=job.rid,
            text=spelled or " ".join(f"<{token}>" for token in shown),
            weight_version=options.weight_version,
            model_seed=options.model_seed,
            return_logprob=job.return_logprob,
            logprob_start_len=job.logprob_start_len,
            echo_prompt=job.echo_prompt,
            e2e_latency=time.monotonic() - job.arrived,
            now=time.time(),
        )

    def log(self, entry: JsonObject) -> None:
        if self.log_fd is not None:
            os.write(self.log_fd, json.dumps(entry).encode() + b"\n")


# ---- wire level


def reply(content: object, status: int = 200) -> web.Response:
    return web.json_response(content, status=status)


async def read_body(request: web.Request) -> JsonObject:
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        raise bad_request(f"JSON decode error: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body should be an object")
    if not isinstance(body.get("rid") or "", str):
        raise bad_request("rid should be a valid string (this stand-in takes no batches)")
    return body


def http_fault(fault: str, retry_after_s: int) -> web.Response:
    """`abort_503` is an abort with a status code (full queue, waiting timeout), which SGLang raises as an HTTP error:
    `tokenizer_manager: _handle_abort_finish_reason`. The others are what proxies and crashes send."""
    status = HTTP_FAULTS[fault]
    if fault == "abort_503":
        return reply(error_response(status, "The request queue is full.", str(status)), status)
    headers = {"Retry-After": str(retry_after_s)} if status == 429 else {}
    return web.Response(status=status, text="Internal Server Error" if status == 500 else "", headers=headers)


async def reset(request: web.Request) -> NoReturn:
    """A TCP reset rather than an orderly end; aiohttp then cancels the handler."""
    assert request.transport is not None
    connection = request.transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError("unreachable")
