"""What the stand-in engine does with a request: options, which fault hits, admission, queue and KV tokens.

Messages were copied from a running SGLang 0.5.23; paths in docstrings are under `sglang/srt`.
"""

import asyncio
import collections
import os
import random
import sys
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from tests.fakes import fake_model
from tests.fakes.fake_model import BODY_FAULTS, CONSISTENT_FAULTS, Generation, JsonObject

HTTP_FAULTS = {"http_500": 500, "http_503": 503, "http_429": 429, "abort_503": 503}
TRANSPORT_FAULTS = ("reset", "reset_midway", "timeout", "slow", "partial_json", "not_json")
PROMPT_FAULTS = ("extra_bos", "swapped_answer", "swapped_ids_only")
FAULTS = (*HTTP_FAULTS, *TRANSPORT_FAULTS, *PROMPT_FAULTS, *CONSISTENT_FAULTS, *BODY_FAULTS)
SAMPLING_PARAMS = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "custom_params",
    "beam_width",
    "watermark",
    "choice",
)


@dataclass
class Options:
    """Everything a test can turn; `FakeServer.set` changes them while the server runs."""

    vocab_size: int = 49152
    bos_id: int = 1
    eos_id: int = 2
    context_length: int = 8192
    mean_tokens: float = 40.0
    model_seed: int = 0  # servers that share it agree on answers and log-probabilities
    model_path: str = "fake/model"
    answers: str | None = None  # see `fake_model.real_answers`
    weight_version: str = "default"
    tokenizer_dir: str | None = None  # without it `text` becomes one id per UTF-8 byte, plus 3
    api_key: str | None = None
    base_latency_s: float = 0.0
    token_latency_s: float = 0.0
    max_running: int = 2048
    max_total_tokens: int = 1 << 20
    linger_s: float = 0.0  # a rid stays taken this long after its client left (the real server: up to 4 s)
    faults: dict[str, float | list[int]] = field(default_factory=dict)  # name: probability, or 0-based request indices
    fault_seed: int = 0
    faults_hit_probe: bool = False  # rids that start with "probe" are spared, and not counted, otherwise
    slow_s: float = 1.0
    retry_after_s: int = 1
    strip_ids: list[int] = field(default_factory=list)
    model_info: JsonObject = field(default_factory=dict)  # these two are merged over the defaults
    server_info: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := set(self.faults) - set(FAULTS):
            raise ValueError(f"unknown faults {sorted(unknown)}; known: {', '.join(FAULTS)}")

    @property
    def max_req_len(self) -> int:
        """`managers/tp_worker.py`: the longest prompt plus output; `max_req_input_len` is 5 less."""
        return min(self.context_length, self.max_total_tokens) - 1

    def fault_for(self, index: int) -> str | None:
        """The same for every run with this seed; the first named fault that hits wins."""
        for name, when in self.faults.items():
            if isinstance(when, list):
                if index in when:
                    return name
            elif random.Random(f"{self.fault_seed} {name} {index}").random() < when:
                return name
        return None


class Refused(Exception):
    """A request that is answered 400, mostly as `http_server: _create_error_response` does."""

    def __init__(self, message: str, error: object = None) -> None:
        super().__init__(message)
        self.body: object = error or {"error": {"message": message}}


@dataclass(eq=False)
class Job:
    """One `/generate` request from its arrival to its answer."""

    rid: str
    generation: Generation
    return_logprob: bool
    logprob_start_len: int
    echo_prompt: bool
    arrived: float
    started: float = 0.0

    @property
    def tokens(self) -> int:
        return len(self.generation.prompt_ids) + len(self.generation.ids)


class Scheduler:
    """The running batch and the waiting queue, first come first served, bounded by seats and by KV tokens."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.running: dict[Job, None] = {}
        self.waiting: dict[Job, asyncio.Future[None]] = {}
        self.finished: collections.deque[tuple[float, int]] = collections.deque(maxlen=100_000)
        self.reserved_tokens = 0

    def pump(self) -> None:
        while self.waiting:
            job, seat = next(iter(self.waiting.items()))
            fits = self.reserved_tokens + job.tokens <= self.options.max_total_tokens or not self.running
            if len(self.running) >= self.options.max_running or not fits:
                return
            del self.waiting[job]
            self.running[job] = None
            self.reserved_tokens += job.tokens
            job.started = time.monotonic()
            if not seat.done():
                seat.set_result(None)

    async def run(self, job: Job) -> None:
        self.waiting[job] = seat = asyncio.get_running_loop().create_future()
        new_tokens, reserved = len(job.generation.ids), job.tokens
        try:
            self.pump()
            await seat
            if (busy_s := self.options.base_latency_s + new_tokens * self.options.token_latency_s) > 0:
                await asyncio.sleep(busy_s)
            self.finished.append((time.monotonic(), new_tokens))
        finally:
            self.waiting.pop(job, None)
            if job in self.running:
                del self.running[job]
                self.reserved_tokens -= reserved
            self.pump()

    def load(self) -> JsonObject:
        """One rank of `/v1/loads` (`scheduler_components/load_inquirer.py`); the real one may lag a second."""
        now, per_token = time.monotonic(), self.options.token_latency_s
        used = 0
        for job in self.running:
            decoding_s = now - job.started - self.options.base_latency_s
            done = decoding_s / per_token if per_token else len(job.generation.ids)
            used += len(job.generation.prompt_ids) + max(0, min(len(job.generation.ids), int(done)))
        recent = sum(tokens for at, tokens in self.finished if now - at < 1.0)
        throughput = len(self.running) / per_token if per_token and self.running else float(recent)
        capacity = self.options.max_total_tokens
        return {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": len(self.running),
            "num_waiting_reqs": len(self.waiting),
            "num_waiting_uncached_tokens": sum(len(job.generation.prompt_ids) for job in self.waiting),
            "num_used_tokens": used,
            "num_total_tokens": used + sum(len(job.generation.prompt_ids) for job in self.waiting),
            "num_active_tokens": used + sum(len(job.generation.prompt_ids) for job in self.waiting),
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": capacity,
            "max_running_requests": self.options.max_running,
            "token_usage": round(used / capacity, 4),
            "gen_throughput": round(throughput, 2),
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
            "total_prefill_uncached_tokens": 0,
            "total_prefill_busy_us": 0,
            "decode_moments": [0.0] * 6,
            "memory": {"weight_gb": 0.5, "kv_cache_gb": 0.7, "graph_gb": 0.0, "token_capacity": capacity},
            "disaggregation": {"mode": "null"} | dict.fromkeys(_DISAGGREGATION_COUNTERS, 0),
            "queues": {"waiting": len(self.waiting), "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
        }


_DISAGGREGATION_COUNTERS = (
    "prefill_bootstrap_queue_reqs",
    "prefill_inflight_queue_reqs",
    "decode_prealloc_queue_reqs",
    "decode_transfer_queue_reqs",
    "decode_retracted_queue_reqs",
    "kv_transfer_speed_gb_s",
    "kv_transfer_latency_ms",
)


# ---- admission


def error_response(status: int, message: str, kind: str) -> JsonObject:
    """`entrypoints/openai/protocol.py: ErrorResponse`, which raised HTTP errors and schema errors get."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def bad_request(message: str) -> Refused:
    return Refused(message, error_response(400, f"1 validation error:\n  {message}", "Bad Request"))


def accept(body: JsonObject, rid: str, options: Options, fault: str | None) -> Job:
    """Validation in the order of `managers/tokenizer_manager.py: _validate_one_request`, then the answer itself."""
    sampling: JsonObject = body.get("sampling_params") or {}
    if unknown := [name for name in sampling if name not in SAMPLING_PARAMS]:
        known = ", ".join(f"`{name}`" for name in SAMPLING_PARAMS)
        message = f"unknown field `{unknown[0]}`, expected one of {known}"
        raise Refused(message, {"error": message})
    prompt_ids = prompt_ids_of(body, options)
    max_new_tokens = output_limit(len(prompt_ids), sampling, options)
    bias = {int(token): value for token, value in (sampling.get("logit_bias") or {}).items()}
    if outside := [token for token in bias if not 0 <= token < options.vocab_size]:
        raise Refused(f"logit_bias must has keys in [0, {options.vocab_size - 1}], got {outside[0]}.")
    if body.get("return_logprob") and (body.get("logprob_start_len") or 0) > len(prompt_ids):
        raise Refused(
            f"req.logprob_start_len={body['logprob_start_len']} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={len(prompt_ids)}. Please use a smaller logprob_start_len."
        )
    if not all(0 <= token < options.vocab_size for token in prompt_ids):
        die("an id outside the vocabulary: the real scheduler raises in the embedding and takes the server along")
    if fault == "extra_bos":
        prompt_ids = [options.bos_id, *prompt_ids]
    forced = [token for token, value in bias.items() if value >= fake_model.BIAS_THAT_FORCES]
    forced_id = max(forced, key=bias.__getitem__, default=None)
    # temperature > 0: seeded by the rid up to "#", so "ROW#2" repeats "ROW#1" and other rids differ.
    sampled = float(1.0 if sampling.get("temperature") is None else sampling["temperature"]) > 0
    ids, finish = fake_model.answer(
        prompt_ids,
        vocab_size=options.vocab_size,
        eos_id=options.eos_id,
        max_new_tokens=max_new_tokens,
        mean_tokens=options.mean_tokens,
        seed=f"{options.model_seed}/{rid.partition('#')[0]}" if sampled else options.model_seed,
        forced_id=forced_id,
        stop_ids=sampling.get("stop_token_ids") or (),
        ignore_eos=bool(sampling.get("ignore_eos")) or fault == "invent_eos",
        min_new_tokens=sampling.get("min_new_tokens") or 0,
    )
    return_logprob = bool(body.get("return_logprob"))
    logprobs: list[float] = []
    if options.answers and (known := fake_model.real_answers(options.answers).get(tuple(prompt_ids))):
        ids, logprobs, finish = known
    elif return_logprob:
        scores = fake_model.token_logprobs([*prompt_ids, *ids], len(prompt_ids), model_seed=options.model_seed)
        logprobs = [0.0 if token == forced_id else score for token, score in zip(ids, scores, strict=True)]
    start = body.get("logprob_start_len")
    return Job(
        rid=rid,
        generation=Generation(prompt_ids, ids, finish, logprobs),
        return_logprob=return_logprob,
        logprob_start_len=-1 if start is None else start,
        echo_prompt=bool(body.get("return_prompt_token_ids")),
        arrived=time.monotonic(),
    )


def prompt_ids_of(body: JsonObject, options: Options) -> list[int]:
    ids = body.get("input_ids")
    if isinstance(text := body.get("text"), str):
        if not text:
            die("an empty text: zero tokens crash the real scheduler of 0.5.23 on a CPU")
        tokenizer_dir = options.tokenizer_dir
        return tokenizer(tokenizer_dir).encode(text).ids if tokenizer_dir else [byte + 3 for byte in text.encode()]
    if ids is None:
        raise Refused("Either text, input_ids or input_embeds should be provided.")
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise bad_request("input_ids must be one list of int (this stand-in takes no batches)")
    if not ids:
        raise Refused("input_ids cannot be empty.")
    return ids


def output_limit(prompt_tokens: int, sampling: JsonObject, options: Options) -> int:
    """The refusals, and a cut that nobody is told of: an output ends two tokens short of the context.

    `tokenizer_manager: _validate_one_request`, `sampling_params: verify`, `managers/utils: validate_input_length`,
    `scheduler: init_req_max_new_tokens`. An unset `max_new_tokens` is 128; null is all that fits.
    """
    context, asked = options.context_length, sampling.get("max_new_tokens", 128)
    if prompt_tokens >= context:
        raise Refused(
            f"The input ({prompt_tokens} tokens) is longer than the model's context length ({context} tokens)."
        )
    if asked is not None and prompt_tokens + asked > context and "max_new_tokens" in sampling:
        raise Refused(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
            f"a total of {prompt_tokens + asked} tokens: {prompt_tokens} tokens from the input messages and "
            f"{asked} tokens for the completion. Please reduce the number of tokens in the input messages or the "
            f"completion to fit within the limit."
        )
    temperature = sampling.get("temperature")
    if temperature is not None and temperature < 0:
        raise Refused(f"temperature must be a non-negative finite number, got {temperature}.")
    if asked is not None and asked < 0:
        raise Refused(f"max_new_tokens must be at least 0, got {asked}.")
    if asked is not None and (least := sampling.get("min_new_tokens") or 0) > asked:
        raise Refused(f"min_new_tokens must be in [0, max_new_tokens({asked})], got {least}.")
    longest = options.max_req_len - 5
    if prompt_tokens >= longest:
        raise Refused(
            f"Input length ({prompt_tokens} tokens) exceeds the maximum allowed length ({longest} tokens). "
            f"Use a shorter input or enable --allow-auto-truncate."
        )
    room = options.max_req_len - prompt_tokens - 1
    return room if asked is None else min(asked, room)


def die(reason: str) -> NoReturn:
    """The real server answers nothing, drops its connections and is gone within 5 s (measured)."""
    print(f"fake sglang dies: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


@lru_cache(maxsize=2)
def tokenizer(folder: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
