"""An SGLang server on this node's GPUs, the way that every job starts one: to generate, to capture, to evaluate."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle3_ray.sglang_cpu import in_venv
from eagle3_ray.sglang_cpu.processes import HOST, ServerProcess, free_port

_PARENT_WATCH = Path(in_venv.__file__).parent / "parent_watch.py"
_STARTUP_TIMEOUT_S = 3600.0  # a terabyte of weights from shared storage


def gpu_server(
    launch: str,
    model: str,
    gpus: int,
    args: Sequence[str],
    *,
    port: int = 0,
    host: str = HOST,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> ServerProcess:
    """A server of `model` over `gpus` GPUs, not started yet; it ends with this process, however this process ends.

    `launch` is the command without arguments of ours (`python -m sglang.launch_server`), `args` are more of SGLang's,
    `env` is more environment; port 0 takes a free one. This process's PYTHONPATH stays behind: SGLang has packages of
    its own.
    """
    port = port or free_port()
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    ours = ["--model-path", model, "--host", host, "--port", str(port), "--tp-size", str(gpus)]
    return ServerProcess(
        [sys.executable, _PARENT_WATCH, *shlex.split(launch), *ours, *args],
        port=port,
        env=inherited | {"EAGLE3_RAY_SERVER_PARENT": str(os.getpid())} | dict(env or {}),
        log=log,
        startup_timeout_s=_STARTUP_TIMEOUT_S,
        host=host,
    )
