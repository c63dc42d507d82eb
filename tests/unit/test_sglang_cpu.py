"""The parts of the CPU server that need no SGLang: pins, marker, ports, and the life and death of process trees."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from eagle3_ray.sglang import processes
from eagle3_ray.sglang.processes import ServerProcess, free_port, group_members
from eagle3_ray.sglang_cpu import InstallFailed, ServerFailed, venv
from eagle3_ray.sglang_cpu.__main__ import main, parse
from eagle3_ray.sglang_cpu.cache import cache_folder, locked
from eagle3_ray.sglang_cpu.server import LAUNCH, server_environment, sglang_arguments

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

WITH_CHILDREN = """
import subprocess, sys
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("line before healthy", flush=True)
"""


def toy(script: str, log: Path, timeout_s: float = 20, port: int = 0) -> ServerProcess:
    port = port or free_port()
    return ServerProcess(
        [sys.executable, "-c", script, str(port)], port=port, env=os.environ, log=log, startup_timeout_s=timeout_s
    )


def eventually(condition: Callable[[], bool], within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# Pins and the install's marker


def test_every_pin_is_exact_and_torch_comes_first_and_alone() -> None:
    first, *rest = venv.read_steps()
    assert first.requirements == ("torch==2.13.0",)
    assert all("==" in requirement for step in rest for requirement in step.requirements)
    assert [step.options for step in rest] == [("--no-deps",), ()]


def test_another_byte_in_the_pins_is_another_environment(tmp_path: Path) -> None:
    other = tmp_path / "pins.toml"
    other.write_text(venv.PINS.read_text() + "#")
    assert venv.venv_folder(tmp_path, other) != venv.venv_folder(tmp_path) == venv.venv_folder(tmp_path)


def test_the_cache_folder_is_the_argument_then_the_environment_then_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EAGLE3_RAY_CACHE", raising=False)
    assert cache_folder() == tmp_path / "home" / ".cache" / "eagle3_ray"
    monkeypatch.setenv("EAGLE3_RAY_CACHE", str(tmp_path / "set"))
    assert cache_folder() == tmp_path / "set"
    assert cache_folder(tmp_path / "given") == tmp_path / "given"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What install would run; only the folder that `python -m venv` makes is real."""
    seen: list[list[str]] = []

    def record(command: Sequence[str | Path], remedy: str) -> None:
        seen.append(list(map(str, command)))
        if "venv" in seen[-1]:
            Path(seen[-1][-1]).mkdir()

    monkeypatch.setattr(venv, "run", record)
    return seen


def test_a_finished_install_is_not_repeated(tmp_path: Path, commands: list[list[str]]) -> None:
    folder = venv.install(tmp_path)
    assert len(commands) == 4
    assert venv.install(tmp_path) == folder
    assert len(commands) == 4


def test_a_killed_install_is_made_again_from_nothing(tmp_path: Path, commands: list[list[str]]) -> None:
    half = venv.venv_folder(tmp_path)
    half.mkdir()
    (half / "half a package").touch()
    venv.install(tmp_path)
    assert [path.name for path in half.iterdir()] == [venv.MARKER]
    assert len(commands) == 4


def test_two_installs_at_once_run_one_after_the_other(tmp_path: Path, commands: list[list[str]]) -> None:
    both = [threading.Thread(target=venv.install, args=(tmp_path,)) for _ in range(2)]
    with locked(tmp_path / f"{venv.venv_folder(tmp_path).name}.lock"):
        for one in both:
            one.start()
        time.sleep(0.2)
        assert commands == []
    for one in both:
        one.join()
    assert len(commands) == 4


def test_a_failing_step_shows_its_last_lines_and_the_remedy(tmp_path: Path) -> None:
    script = "for i in range(40): print('line', i)\nraise SystemExit(3)"
    with pytest.raises(InstallFailed, match=r"exit code 3\. Plug it in\.") as failure:
        venv.run([sys.executable, "-c", script], remedy="Plug it in.")
    lines = str(failure.value).splitlines()
    assert lines[-1] == "line 39"
    assert len(lines) <= venv.TAIL_LINES + 4


# The command line


def test_arguments_of_serve_that_are_not_ours_go_to_sglang_last() -> None:
    arguments, rest = parse(["serve", "--port", "7", "--dtype", "bfloat16"])
    words = sglang_arguments(Path("m"), arguments.port, 64, rest)
    assert words[-2:] == ["--dtype", "bfloat16"]
    assert words[words.index("--port") + 1] == "7"


def test_arguments_that_install_does_not_know_are_refused() -> None:
    with pytest.raises(SystemExit):
        parse(["install", "--dtype", "bfloat16"])


def test_attention_is_the_stand_in_s_unless_another_backend_is_asked_for() -> None:
    def last_backend(args: list[str]) -> str:
        words = sglang_arguments(Path("m"), 1, 64, args)
        return [value for name, value in pairwise(words) if name == "--attention-backend"][-1]

    assert last_backend([]) == "intel_amx"
    assert last_backend(["--attention-backend", "torch_native"]) == "torch_native"


def test_the_product_s_python_path_stays_out_of_sglang_s_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "product")
    environment = server_environment(threads=3)
    assert "PYTHONPATH" not in environment
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "passive"


def test_a_failure_is_one_message_and_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Path:
        raise InstallFailed("No disk. Buy one.")

    monkeypatch.setattr("eagle3_ray.sglang_cpu.__main__.install", fail)
    assert main(["install"]) == 1
    assert capsys.readouterr().err == "InstallFailed: No disk. Buy one.\n"


# The stand-in for sgl_kernel


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    """Loaded by path, as SGLang's environment finds it; it needs torch only."""
    spec = spec_from_file_location("sgl_kernel_stand_in", LAUNCH.parent / "sgl_kernel" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Batch:
    """Requests with contexts of `lengths`, the last `new_lengths` of them new, in cache rows drawn at random."""

    heads, kv_heads, size, scale = 6, 2, 8, 0.3

    def __init__(self, lengths: list[int], new_lengths: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.new_lengths = torch.tensor(lengths), torch.tensor(new_lengths)
        self.starts = self.new_lengths.cumsum(0) - self.new_lengths
        self.requests = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
        self.table = torch.randperm((len(lengths) + 2) * 600, generator=generator).view(-1, 600).int()
        cached = (self.table.numel(), self.kv_heads, self.size)
        self.k, self.v = (torch.randn(cached, generator=generator) for _ in range(2))
        self.q = torch.randn(sum(new_lengths), self.heads, self.size, generator=generator)

    def expected(self) -> torch.Tensor:
        """One token after the other, as the definition of attention has it."""
        answers = []
        for request, length, new in zip(self.requests, self.lengths, self.new_lengths, strict=True):
            for seen in range(length - new + 1, length + 1):
                rows = self.table[request, :seen].long()
                k, v = (cache[rows].repeat_interleave(3, 1) for cache in (self.k, self.v))
                scores = torch.einsum("hd,thd->ht", self.q[len(answers)], k) * self.scale
                answers.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v))
        return torch.stack(answers)

    def extended(self, kernel: ModuleType, variants: tuple[Any, ...] = (0.0, False, 0, None, None)) -> torch.Tensor:
        out = torch.empty_like(self.q)
        places = (self.table, self.requests, self.lengths, self.new_lengths, self.starts)
        new_max = int(self.new_lengths.max())
        kernel.extend_attention(self.q, None, None, out, self.k, self.v, 1, 1, *places, new_max, self.scale, *variants)
        return out

    def decoded(self, kernel: ModuleType) -> torch.Tensor:
        """The new keys and values are handed over, and not yet in the cache."""
        out = torch.empty_like(self.q)
        last = self.table[self.requests, self.lengths - 1].long()
        k, v = self.k[last].flatten(1), self.v[last].flatten(1)
        self.k[last], self.v[last] = 0, 0
        places = (last, None, self.table, self.requests, self.lengths)
        kernel.decode_attention(self.q, self.k, self.v, 1, 1, out, k, v, *places, self.scale, 0.0, False, 0, None, None)
        return out


@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [3, 500, 1, 40, 499, 41, 300], list(range(1, 80))])
def test_one_new_token_attends_to_all_of_its_own_request_and_to_nothing_else(
    kernel: ModuleType, lengths: list[int]
) -> None:
    batch = Batch(lengths, [1] * len(lengths))
    torch.testing.assert_close(batch.decoded(kernel), batch.expected())


@pytest.mark.parametrize("new_lengths", [[4, 4, 4, 4], [5, 300, 1, 2], [9, 1, 9, 1]])
def test_several_new_tokens_attend_causally(kernel: ModuleType, new_lengths: list[int]) -> None:
    batch = Batch([9, 300, 20, 2 + new_lengths[3]], new_lengths)
    torch.testing.assert_close(batch.extended(kernel), batch.expected())


def test_a_batch_that_differs_in_its_cache_rows_alone_is_not_taken_for_the_last_one(kernel: ModuleType) -> None:
    batch = Batch([9, 30], [4, 4])
    batch.extended(kernel)
    batch.table[batch.requests] = batch.table[batch.requests.flip(0)]
    torch.testing.assert_close(batch.extended(kernel), batch.expected())


def test_attention_that_is_not_plain_is_refused(kernel: ModuleType) -> None:
    batch = Batch([9], [4])
    for variants in ((30.0, False, 0, None, None), (0.0, False, 128, None, None), (0.0, False, 0, None, torch.ones(6))):
        with pytest.raises(NotImplementedError, match="--attention-backend torch_native"):
            batch.extended(kernel, variants)


@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_a_packed_product_is_torch_s_own(kernel: ModuleType, rows: int) -> None:
    weight = torch.nn.Parameter(torch.randn(48, 32), requires_grad=False)
    x, bias = torch.randn(rows, 32), torch.randn(48)
    for _ in range(2):
        for maybe in (None, bias):
            product = kernel.weight_packed_linear(x, weight, maybe, True)
            torch.testing.assert_close(product, torch.nn.functional.linear(x, weight, maybe))


# Ports


def test_free_ports_differ_and_a_server_may_bind_them() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    for port in ports:
        processes.require_free(port)


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = toy(HEALTHY, tmp_path / "log", port=taken.getsockname()[1])
        with pytest.raises(ServerFailed, match="is taken"):
            server.start()
    assert not (tmp_path / "log").exists()


# Processes


def test_a_server_that_ends_early_fails_at_once_with_its_last_lines(tmp_path: Path) -> None:
    script = "for i in range(40): print('line', i)\nraise SystemExit(3)"
    started = time.monotonic()
    with pytest.raises(ServerFailed, match="ended while starting, with exit code 3") as failure:
        toy(script, tmp_path / "log", timeout_s=60).start()
    assert time.monotonic() - started < 10
    assert str(failure.value).splitlines()[1:] == [f"line {i}" for i in range(20, 40)]


def test_a_silent_server_fails_after_its_time_and_is_killed(tmp_path: Path) -> None:
    server = toy(WITH_CHILDREN + "import time; time.sleep(600)", tmp_path / "log", timeout_s=1)
    started = time.monotonic()
    with pytest.raises(ServerFailed, match=r"no healthy answer within 1 s.*\n.*line before healthy"):
        server.start()
    assert time.monotonic() - started < 10
    assert group_members(server.pid) == []


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_ending_a_server_ends_its_children(tmp_path: Path, end: str) -> None:
    server = toy(WITH_CHILDREN + HEALTHY, tmp_path / "log").start()
    assert len(group_members(server.pid)) == 3
    getattr(server, end)()
    assert group_members(server.pid) == []
    assert not server.healthy()


def test_children_that_outlive_a_crashed_server_are_ended_too(tmp_path: Path) -> None:
    with toy(WITH_CHILDREN + HEALTHY, tmp_path / "log") as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerFailed, match="killed by SIGKILL"):
            server.wait()
        assert len(group_members(server.pid)) == 2
    assert group_members(server.pid) == []


def test_an_exception_in_the_with_block_stops_the_server(tmp_path: Path) -> None:
    server = toy(WITH_CHILDREN + HEALTHY, tmp_path / "log")
    with pytest.raises(ZeroDivisionError), server:
        raise ZeroDivisionError
    assert group_members(server.pid) == []


FAMILY = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
"""A server that knows nothing of its owner, with a child that knows nothing of it."""


@pytest.mark.parametrize("victim", ["owner", "server"])
def test_a_watched_server_and_its_children_end_with_its_owner_and_with_itself(victim: str) -> None:
    """The server is the owner's own child: Ray 2.60 kills the children of a worker that ends, and no grandchildren."""
    owner = f"""
import subprocess, sys, time
server = subprocess.Popen([*{processes.WATCHED!r}, sys.executable, "-c", {FAMILY!r}], start_new_session=True)
print(server.pid, flush=True)
server.wait()
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server, child = (int(process.stdout.readline()) for _ in range(2))
        try:
            assert set(group_members(server)) > {server, child}
            assert Path(f"/proc/{server}/cmdline").read_text().split("\0")[1] == "-c"
            os.kill(process.pid if victim == "owner" else server, signal.SIGKILL)
            assert eventually(lambda: group_members(server) == [])
        finally:
            process.kill()
            for pid in group_members(server):
                os.kill(pid, signal.SIGKILL)
