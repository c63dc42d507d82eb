"""An SGLang server on this node, the way that every job starts one: to generate, to capture, to evaluate."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle3_ray.sglang.processes import HOST, WATCHED, ServerProcess, clean_environment, free_port
from eagle3_ray.sglang_cpu import Server

_STARTUP_TIMEOUT_S = 3600.0  # a terabyte of weights from shared storage


def server(
    model: str,
    gpus: int,
    launch: str,
    args: Sequence[str],
    *,
    port: int = 0,
    host: str = HOST,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> ServerProcess:
    """A server of `model`, not started yet; it ends with this process, however this process ends.

    Over GPUs it is started by `launch`, the command without arguments of ours (`python -m sglang.launch_server`); for
    0 `gpus` it is that of `sglang_cpu`. `args` are more of SGLang's, `env` is more environment; port 0 is any free one.
    """
    if gpus == 0:
        return Server(Path(model), port=port, host=host, args=args, log=log, env=env)
    port = port or free_port()
    ours = ["--model-path", model, "--host", host, "--port", str(port), "--tp-size", str(gpus)]
    return ServerProcess(
        [*WATCHED, *shlex.split(launch), *ours, *args],
        port=port,
        env=clean_environment() | dict(env or {}),
        log=log,
        startup_timeout_s=_STARTUP_TIMEOUT_S,
        host=host,
    )
