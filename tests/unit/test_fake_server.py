"""The stand-in server does what it says: the model is repeatable, each fault is visible, queues and kills are real."""

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.fakes.sglang_server import FAULTS, FakeServer, answer, token_logprobs
from tests.jobs import REPOSITORY

MODEL: dict[str, Any] = {"vocab_size": 49152, "eos_id": 2, "mean_tokens": 12}
PROMPT = [11, 22, 33]
SCORED: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "return_prompt_token_ids": True}


@dataclass
class Reply:
    status: int
    text: str
    headers: Any

    @property
    def json(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.text)
        return body

    @property
    def ids(self) -> list[int]:
        ids: list[int] = self.json["output_ids"]
        return ids

    @property
    def meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = self.json["meta_info"]
        return meta


def get(server: FakeServer, path: str, **headers: str) -> Reply:
    return send(urllib.request.Request(server.url + path, headers=headers))


def send(request: urllib.request.Request, timeout: float = 10) -> Reply:
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return Reply(response.status, response.read().decode(), response.headers)
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read().decode(), error.headers)


def generate(server: FakeServer, ids: list[int] | None = None, *, timeout: float = 10, **fields: Any) -> Reply:
    sampling = {"temperature": 0, "max_new_tokens": 64} | fields.pop("sampling", {})
    body = {"input_ids": PROMPT if ids is None else ids, "sampling_params": sampling} | fields
    return send(urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode()), timeout)


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def load(server: FakeServer) -> dict[str, Any]:
    rank: dict[str, Any] = get(server, "/v1/loads").json["loads"][0]
    return rank


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with FakeServer(mean_tokens=MODEL["mean_tokens"]) as server:
        yield server


@pytest.fixture
def server(shared: FakeServer) -> Iterator[FakeServer]:
    yield shared
    shared.set(faults={}, strip_ids=[])


# ---- the model


def test_an_answer_is_repeatable_and_a_longer_limit_continues_it() -> None:
    whole, finish = answer(PROMPT, max_new_tokens=500, **MODEL)
    assert answer(PROMPT, max_new_tokens=500, **MODEL) == (whole, finish)
    assert finish == {"type": "stop", "matched": 2}
    assert whole[-1] == 2
    assert answer(PROMPT, max_new_tokens=3, **MODEL) == (whole[:3], {"type": "length", "length": 3})
    assert answer(PROMPT, max_new_tokens=500, **MODEL, seed=1) != (whole, finish)


def test_lengths_vary_around_the_mean_and_ids_are_ordinary() -> None:
    answers = [answer([n, 7], max_new_tokens=10_000, **(MODEL | {"mean_tokens": 50}))[0] for n in range(500)]
    lengths = [len(ids) for ids in answers]
    assert 45 < statistics.mean(lengths) < 55
    assert min(lengths) < 20
    assert max(lengths) > 150
    assert all(6144 <= token < 24576 for ids in answers for token in ids[:-1])


def test_log_probabilities_depend_on_prefix_token_and_model_seed_only() -> None:
    scores = token_logprobs([5, 6, 7, 8], 0, model_seed=0)
    assert token_logprobs([5, 6, 7, 9], 2, model_seed=0)[0] == scores[2]
    assert token_logprobs([5, 6, 7, 9], 3, model_seed=0)[0] != scores[3]
    assert token_logprobs([4, 6, 7, 8], 3, model_seed=0)[0] != scores[3]
    assert token_logprobs([5, 6, 7, 8], 0, model_seed=1) != scores


# ---- a healthy server


def test_the_server_answers_what_the_function_says(server: FakeServer) -> None:
    reply = generate(server, rid="row-1", unknown_field=1, **SCORED)
    ids, finish = answer(PROMPT, max_new_tokens=64, **MODEL)
    assert (reply.ids, reply.meta["finish_reason"], reply.meta["id"]) == (ids, finish, "row-1")
    assert (reply.meta["prompt_tokens"], reply.meta["completion_tokens"]) == (3, len(ids))
    assert reply.json["prompt_token_ids"] == PROMPT
    assert [t for _, t, _ in reply.meta["output_token_logprobs"]] == ids
    rescored = generate(server, PROMPT + ids, sampling={"max_new_tokens": 0}, **SCORED)
    assert rescored.meta["input_token_logprobs"][0] == [None, PROMPT[0], None]
    assert rescored.meta["input_token_logprobs"][3:] == reply.meta["output_token_logprobs"]


def test_sampling_parameters_are_honoured(server: FakeServer) -> None:
    assert generate(server, sampling={"logit_bias": {"2": 100}}).ids == [2]
    assert generate(server, sampling={"logit_bias": {"2": 100}, "min_new_tokens": 2}).ids[2:] == [2]
    forced = generate(server, sampling={"logit_bias": {"777": 100}, "max_new_tokens": 3}, return_logprob=True)
    assert forced.meta["output_token_logprobs"] == [[0.0, 777, None]] * 3
    stop = {"logit_bias": {"777": 100}, "stop_token_ids": [777]}
    assert generate(server, sampling=stop).meta["finish_reason"] == {"type": "stop", "matched": 777}
    assert len(generate(server, sampling={"ignore_eos": True}).ids) == 64
    warm = {"temperature": 1.0}
    assert generate(server, rid="a#1", sampling=warm).ids == generate(server, rid="a#2", sampling=warm).ids
    assert generate(server, rid="a", sampling=warm).ids != generate(server, rid="b", sampling=warm).ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"input_ids": [5] * 8192}, "longer than the model's context length (8192 tokens)"),
        ({"input_ids": [5] * 8190}, "maximum context length of 8192 tokens. You requested a total of 8254 tokens"),
        ({"input_ids": [5] * 8187, "sampling": {"max_new_tokens": 1}}, "maximum allowed length (8186 tokens)"),
        ({"sampling": {"misspelt": 1}}, "unknown field `misspelt`, expected one of `max_new_tokens`"),
        ({"sampling": {"temperature": -1}}, "temperature must be a non-negative finite number"),
        ({"sampling": {"logit_bias": {"49152": 100}}}, "logit_bias must has keys in [0, 49151], got 49152."),
        ({"rid": 5}, "rid should be a valid string"),
    ],
)
def test_a_bad_request_gets_the_real_refusal(server: FakeServer, fields: dict[str, Any], message: str) -> None:
    reply = generate(server, **fields)
    assert reply.status == 400
    assert message in reply.text


def test_an_output_ends_two_tokens_short_of_the_context(server: FakeServer) -> None:
    reply = generate(server, [5] * 8180, sampling={"max_new_tokens": 12, "ignore_eos": True})
    assert reply.meta["finish_reason"] == {"type": "length", "length": 10}


def test_text_becomes_bytes_plus_three(server: FakeServer) -> None:
    reply = generate(server, input_ids=None, text="é!", return_prompt_token_ids=True)
    assert reply.json["prompt_token_ids"] == [byte + 3 for byte in "é!".encode()]


def test_an_api_key_guards_all_but_health() -> None:
    with FakeServer(api_key="sesame", model_info={"reasoning_parser": "qwen3"}) as server:
        assert get(server, "/health").status == 200
        assert generate(server).status == get(server, "/model_info").status == 401
        assert get(server, "/model_info", Authorization="Bearer sesame").json["reasoning_parser"] == "qwen3"


# ---- faults

MIDWAY = len(answer(PROMPT, max_new_tokens=64, **MODEL)[0]) // 2


def same_but(reply: Reply, clean: Reply, *changed: str) -> bool:
    """Only the named meta fields (and the request's own) differ, the ids do not."""
    own = {"id", "e2e_latency", "response_sent_to_client_ts", *changed}
    names = (reply.meta.keys() | clean.meta.keys()) - own
    return reply.ids == clean.ids and all(reply.meta.get(n) == clean.meta.get(n) for n in names)


def without(ids: list[int], position: int) -> list[int]:
    return ids[:position] + ids[position + 1 :]


def consistent(reply: Reply) -> bool:
    scored = [token for _, token, _ in reply.meta["output_token_logprobs"]]
    return reply.ids == scored and len(reply.ids) == reply.meta["completion_tokens"]


OBSERVABLE: dict[str, Callable[[Reply, Reply], bool]] = {
    "http_500": lambda r, _: r.status == 500,
    "http_503": lambda r, _: r.status == 503,
    "http_429": lambda r, _: r.status == 429 and r.headers["Retry-After"] == "1",
    "abort_503": lambda r, _: r.status == 503 and r.json["message"] == "The request queue is full.",
    "slow": lambda r, c: same_but(r, c) and r.status == 200,
    "partial_json": lambda r, _: int(r.headers["Content-Length"]) == len(r.text) and r.text[:9] == '{"text":"',
    "not_json": lambda r, _: r.status == 200 and r.text[0] == "<",
    "extra_bos": lambda r, _: r.meta["prompt_tokens"] == 4 and r.json["prompt_token_ids"] == [1, *PROMPT],
    "swapped_answer": lambda r, c: r.meta["id"] == "clean" and r.ids == c.ids,
    "swapped_ids_only": lambda r, c: r.meta["id"] == "hit" and r.ids == c.ids and consistent(r),
    "abort": lambda r, c: r.meta["finish_reason"]["type"] == "abort" and r.ids == c.ids[:MIDWAY] and consistent(r),
    "drop_token_consistent": lambda r, c: r.ids == without(c.ids, MIDWAY) and consistent(r),
    "drop_eos": lambda r, c: r.meta["finish_reason"] == {"type": "stop", "matched": 2} and r.ids == c.ids[:-1],
    "invent_eos": lambda r, _: (
        r.meta["finish_reason"] == {"type": "length", "length": 64} and r.ids[64:] == [2] and consistent(r)
    ),
    "id_out_of_range": lambda r, _: r.ids[MIDWAY] == 49159 and consistent(r),
    "negative_id": lambda r, _: r.ids[MIDWAY] == -1 and consistent(r),
    "empty_output": lambda r, _: r.ids == [] and r.meta["finish_reason"]["type"] == "stop" and consistent(r),
    "strip_token": lambda r, c: r.ids == without(c.ids, 1) and consistent(r),
    "wrong_count": lambda r, c: r.meta["completion_tokens"] == len(r.ids) + 1 and same_but(r, c, "completion_tokens"),
    "wrong_prompt_tokens": lambda r, c: r.meta["prompt_tokens"] == 4 and same_but(r, c, "prompt_tokens"),
    "drop_token": lambda r, c: r.ids == without(c.ids, MIDWAY) and not consistent(r),
    "unknown_finish": lambda r, c: r.meta["finish_reason"] == {"type": "mystery"} and same_but(r, c, "finish_reason"),
    "null_output": lambda r, _: r.json["output_ids"] is None,
    "other_weight_version": lambda r, c: (
        r.meta["weight_version"] == "other" and same_but(r, c, "weight_version", "weight_versions")
    ),
    "logprob_mismatch": lambda r, c: not consistent(r) and same_but(r, c, "output_token_logprobs"),
    "nan_logprob": lambda r, c: r.meta["output_token_logprobs"][MIDWAY][0] is None and consistent(r),
    "speculative": lambda r, _: r.meta["spec_accept_length"] * r.meta["spec_verify_ct"] == len(r.ids),
    "alter_text_only": lambda r, c: same_but(r, c) and r.json["text"] != c.json["text"],
}
BROKEN_CONNECTION: dict[str, type[Exception]] = {
    "reset": ConnectionResetError,
    "reset_midway": ConnectionResetError,
    "timeout": TimeoutError,
}


def test_every_fault_has_a_check() -> None:
    assert OBSERVABLE.keys() | BROKEN_CONNECTION.keys() == set(FAULTS)


@pytest.mark.parametrize("fault", OBSERVABLE)
def test_a_fault_is_observable(server: FakeServer, fault: str) -> None:
    stripped = answer(PROMPT, max_new_tokens=64, **MODEL)[0][1]
    clean_prompt = [9, 9] if fault.startswith("swapped") else PROMPT
    server.set(faults={fault: [1]}, strip_ids=[stripped], slow_s=0.1)
    clean = generate(server, clean_prompt, rid="clean", **SCORED)
    began = time.monotonic()
    hit = generate(server, rid="hit", **SCORED)
    assert (time.monotonic() - began > 0.1) == (fault == "slow")
    assert OBSERVABLE[fault](hit, clean)
    assert server.requests()[-1]["outcome"] == f"fault:{fault}"
    assert generate(server, rid="after").ids == answer(PROMPT, max_new_tokens=64, **MODEL)[0]


@pytest.mark.parametrize("fault", BROKEN_CONNECTION)
def test_a_broken_connection_is_observable(server: FakeServer, fault: str) -> None:
    server.set(faults={fault: [0]})
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=0.3)
    body = {"input_ids": PROMPT, "rid": fault, "sampling_params": {"temperature": 0}}
    connection.request("POST", "/generate", json.dumps(body))
    if fault == "reset_midway":
        response = connection.getresponse()
        assert response.status == 200
        with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
            response.read()
    else:
        with pytest.raises(BROKEN_CONNECTION[fault]):
            connection.getresponse()
    connection.close()
    wait_until(lambda: server.requests()[-1]["outcome"] == f"fault:{fault}")


def test_faults_repeat_with_their_seed_and_spare_the_probe(server: FakeServer) -> None:
    def hits() -> list[int]:
        server.set(faults={"http_503": 0.3}, fault_seed=5)
        return [generate(server).status for _ in range(30)]

    first = hits()
    assert {200, 503} == set(first)
    assert hits() == first
    server.set(faults={"http_503": 1.0})
    assert [generate(server, rid=rid).status for rid in ("probe-1", "row-1")] == [200, 503]
    server.set(faults_hit_probe=True)
    assert generate(server, rid="probe-2").status == 503
    server.set(faults_hit_probe=False)


# ---- time, queue and process


def test_requests_over_the_limit_wait_and_are_reported() -> None:
    timing = {"max_running": 2, "base_latency_s": 0.2, "token_latency_s": 0.01, "max_total_tokens": 1000}
    with FakeServer(**timing) as server, ThreadPoolExecutor(5) as pool:
        sampling = {"max_new_tokens": 20, "ignore_eos": True}
        began = time.monotonic()
        replies = [pool.submit(generate, server, rid=f"r{n}", sampling=sampling) for n in range(5)]
        wait_until(lambda: load(server)["num_waiting_reqs"] == 3)
        assert generate(server, rid="r0").text == '{"error": {"message": "Duplicate request ID detected: r0"}}'
        wait_until(lambda: load(server)["num_used_tokens"] > 20)  # two prompts of 3 and some of 2 x 20 tokens
        now = load(server)
        assert (now["num_running_reqs"], now["queues"]["waiting"], now["gen_throughput"]) == (2, 3, 200.0)
        assert now["token_usage"] == now["num_used_tokens"] / 1000
        assert [len(reply.result().ids) for reply in replies] == [20] * 5
        assert 1.1 < time.monotonic() - began < 2.5  # three waves of 0.4 s
        assert load(server)["num_running_reqs"] == load(server)["num_used_tokens"] == 0
        assert server.max_in_flight() == 5


def test_a_full_kv_pool_makes_requests_wait() -> None:
    with FakeServer(max_total_tokens=50, base_latency_s=0.2) as server, ThreadPoolExecutor(3) as pool:
        sampling = {"max_new_tokens": 20, "ignore_eos": True}
        replies = [pool.submit(generate, server, sampling=sampling) for _ in range(3)]
        wait_until(lambda: (load(server)["num_running_reqs"], load(server)["num_waiting_reqs"]) == (2, 1))
        assert all(reply.result().status == 200 for reply in replies)


def test_a_client_that_leaves_is_recorded_and_frees_its_place(server: FakeServer) -> None:
    server.set(base_latency_s=0.5)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"input_ids": PROMPT, "rid": "gone"}).encode()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: load(server)["num_running_reqs"] == 1)
    server.set(base_latency_s=0.0)
    wait_until(lambda: server.requests()[-1]["outcome"] == "aborted by client")
    assert load(server)["num_running_reqs"] == 0
    assert generate(server, rid="gone").status == 200


def test_a_killed_server_restarts_on_its_port_and_keeps_its_log() -> None:
    with FakeServer(base_latency_s=0.1) as server, ThreadPoolExecutor(1) as pool:
        generate(server, rid="before")
        url, pid = server.url, server.pid
        lost = pool.submit(generate, server, rid="lost")
        wait_until(lambda: server.requests()[-1]["rid"] == "lost")
        server.kill()
        assert isinstance(lost.exception(), ConnectionError | http.client.HTTPException | urllib.error.URLError)
        server.restart()
        assert (server.url, server.pid != pid) == (url, True)
        assert generate(server, rid="after").status == 200
        outcomes = [(entry["rid"], entry["outcome"]) for entry in server.requests()]
        assert outcomes == [("before", "answered"), ("lost", "in flight"), ("after", "answered")]


def test_an_id_outside_the_vocabulary_kills_the_server() -> None:
    with FakeServer() as server:
        with pytest.raises((ConnectionError, http.client.HTTPException, urllib.error.URLError)):
            generate(server, [5, 49152])
        wait_until(lambda: not server.running)


def test_the_server_dies_with_the_process_that_started_it() -> None:
    code = "from tests.fakes.sglang_server import FakeServer; import os, signal; s = FakeServer(); s.start(); "
    code += "print(s.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    parent = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, timeout=60)
    status = f"/proc/{int(parent.stdout)}/stat"

    def gone() -> bool:
        if not os.path.exists(status):
            return True
        with open(status) as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"

    wait_until(gone)
