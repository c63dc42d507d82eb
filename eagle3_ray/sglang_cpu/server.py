"""A real SGLang server on this machine's CPU.

    with Server(model()) as server:
        requests.post(server.url + "/generate", json={"input_ids": [1, 2, 3]})

float32 is the default because speculative decoding then equals plain greedy decoding token for token. The model's
threads wait for each other asleep: spinning, they would bring each other to a halt where other work shares the cores.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle3_ray.sglang.processes import HOST, WATCHED, ServerProcess, clean_environment, free_port
from eagle3_ray.sglang_cpu.venv import install

LAUNCH = Path(__file__).parent / "in_venv" / "launch.py"
_STARTUP_TIMEOUT_S = 300.0
MOST_THREADS = 4
"""By default. A model small enough for a CPU has little more to share out in one step."""


def default_threads() -> int:
    return min(len(os.sched_getaffinity(0)), MOST_THREADS)


class Server(ServerProcess):
    """SGLang serving `model`."""

    def __init__(
        self,
        model: Path,
        *,
        port: int = 0,
        host: str = HOST,
        args: Sequence[str] = (),
        kv_tokens: int = 16384,
        log: Path | None = None,
        threads: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`args` are more SGLang arguments, `env` more environment (a plugin's PYTHONPATH, say).

        `threads` are the model's own; None takes one for each core, up to four.
        """
        port = port or free_port()
        words = sglang_arguments(model, port, kv_tokens, ["--host", host, *args])
        super().__init__(
            [*WATCHED, install() / "bin" / "python", LAUNCH, *words],
            port=port,
            host=host,
            env=server_environment(threads or default_threads()) | dict(env or {}),
            log=log,
            startup_timeout_s=_STARTUP_TIMEOUT_S,
        )


def sglang_arguments(model: Path, port: int, kv_tokens: int, args: Sequence[str]) -> list[str]:
    """The server's command line; `args` come last and so win over what stands before them."""
    options = {
        "--model-path": str(model),
        "--device": "cpu",
        "--dtype": "float32",
        "--port": str(port),
        "--attention-backend": "intel_amx",  # launch.py stands in for it
        "--cuda-graph-backend-decode": "disabled",
        "--cuda-graph-backend-prefill": "disabled",
        "--mem-fraction-static": "0.2",
        "--max-total-tokens": str(kv_tokens),
    }
    words = [word for option in options.items() for word in option]
    return [*words, "--disable-radix-cache", "--sleep-on-idle", *args]


def server_environment(threads: int) -> dict[str, str]:
    return clean_environment() | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
    }
