"""Hidden states from a stock SGLang server with our plugin, through shared memory of this machine.

One request a sequence with one new token, all of a batch in flight at once so that the engine fills its prefill
batches. The server is ours (started and ended here) or one that runs already.
"""

import asyncio
import tempfile
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp
import torch
from safetensors.torch import load

from eagle3_ray.model_config import keeps_ids, served_ids, text_config
from eagle3_ray.sglang import capture_plugin, start, transport
from eagle3_ray.sglang.processes import ServerFailed, ServerProcess
from eagle3_ray.sglang.protocol import Refused, Transient, Unauthorized
from eagle3_ray.target import sglang_server
from eagle3_ray.target.files import TargetError, read_config
from eagle3_ray.target.layers import resolve_layers
from eagle3_ray.target.protocol import CaptureError, States, TargetDead, TokenSequence

_MOST_BYTES = 4 << 30
_TIMEOUT_S = 600.0
_TRIES = 3
_RETRY_S = 1.0
_Result = TypeVar("_Result")


class SGLangTarget:
    """States of the model in `folder` from the server at `url`, which computes in `dtype`.

    `connect` finds a running server, `start` starts one on GPUs or on the CPU.
    """

    def __init__(self, url: str, config: Mapping[str, Any], layers: tuple[int, ...], dtype: str) -> None:
        self.url = url
        self.layers = layers
        self.server: ServerProcess | None = None
        self._hidden_size = int(text_config(config)["hidden_size"])
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._cleanup = ExitStack()

    @classmethod
    def connect(cls, url: str, folder: Path, layers: Sequence[int] | None = None, dtype: str = "bfloat16") -> Self:
        """A server on this machine that was started with the plugin and the flags of `capture_arguments`.

        Raises:
            TargetError: the server was started with other flags; names the one.
            TargetDead: nobody answers.
        """
        config = read_config(folder)
        chosen = resolve_layers(config, layers)
        target = cls(url, config, chosen, dtype)
        _check_flags(url, target._info, served_ids(chosen, keeps_ids(config)))
        return target

    @classmethod
    def start(
        cls,
        folder: Path,
        layers: Sequence[int] | None = None,
        dtype: str = "float32",
        args: Sequence[str] = (),
        gpus: int = 0,
        launch: str = "",
    ) -> Self:
        """A server over `gpus` GPUs started by `launch` (`python -m sglang.launch_server`), or on the CPU for 0 GPUs.

        `args` are more SGLang arguments. Raises TargetDead where it does not start.
        """
        config = read_config(folder)
        chosen = resolve_layers(config, layers)
        with ExitStack() as cleanup:
            scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="eagle3_ray-capture-")))
            capture_plugin.sweep(sglang_server.SHARED_MEMORY)
            cleanup.callback(capture_plugin.sweep, sglang_server.SHARED_MEMORY)
            env = sglang_server.plugin_environment(scratch / "plugin", sglang_server.SHARED_MEMORY, _MOST_BYTES)
            words = [*args, "--dtype", dtype, *sglang_server.capture_arguments(config, chosen)]  # the last one wins
            server = start.server(str(folder), gpus, launch, words, env=env, log=scratch / "server.log")
            try:
                cleanup.enter_context(server)
            except ServerFailed as error:
                raise TargetDead(str(error)) from None
            target = cls(server.url, config, chosen, dtype)
            target.server = server
            target._cleanup = cleanup.pop_all()
            return target

    @cached_property
    def longest(self) -> int:
        """See `Target.longest`: sglang 0.5.23 refuses a prompt of max_req_input_len tokens (managers/tp_worker.py)."""
        return int(self._info["max_req_input_len"]) - 1

    @cached_property
    def _info(self) -> dict[str, Any]:
        """What the server says of itself, asked once."""
        return self._run(self._server_info())

    def capture(self, sequences: Sequence[TokenSequence]) -> list[States]:
        """See `Target.capture`. Threads may call it side by side."""
        return self._run(self._capture_all(sequences))

    def prefill(self, sequences: Sequence[TokenSequence]) -> None:
        """See `Target.prefill`; all of them in flight at once, as for `capture`."""
        self._run(self._prefill_all(sequences))

    def close(self) -> None:
        """Ends the server if it was started here, and removes what it left in shared memory."""
        self._cleanup.close()

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """In a thread of its own: the caller's may run an event loop, as those of Ray's async actors do."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, work).result()

    async def _server_info(self) -> dict[str, Any]:
        async with transport.open_session(None, _TIMEOUT_S) as session:
            try:
                info: dict[str, Any] = await transport.get(session, f"{self.url}/server_info")
            except Transient as error:
                raise TargetDead(f"The server {self.url} does not answer ({error}).") from None
            return info

    async def _capture_all(self, sequences: Sequence[TokenSequence]) -> list[States]:
        async with transport.open_session(None, _TIMEOUT_S) as session:
            # all of them are waited for even if one fails: an answer that nobody reads would stay in shared memory
            found = await asyncio.gather(*(self._capture(session, one) for one in sequences), return_exceptions=True)
        failed = [result for result in found if isinstance(result, BaseException)]
        if failed:
            raise next((error for error in failed if isinstance(error, TargetDead)), failed[0])
        return [states for states in found if isinstance(states, States)]

    async def _prefill_all(self, sequences: Sequence[TokenSequence]) -> None:
        async with transport.open_session(None, _TIMEOUT_S) as session:
            await asyncio.gather(*(self._generate(session, one, {}) for one in sequences))

    async def _capture(self, session: aiohttp.ClientSession, sequence: TokenSequence) -> States:
        meta = await self._generate(session, sequence, {"return_hidden_states": True})
        answer = meta.get("hidden_states")
        path = answer[0] if isinstance(answer, list) and len(answer) == 1 else None
        if not isinstance(path, str):
            raise CaptureError(
                f"The server {self.url} sent no file of states: it runs without eagle3_ray's plugin. Start it with "
                f"{capture_plugin.CAPTURE_DIR} set and the plugin installed; its log says whether it loaded."
            )
        if path.startswith(capture_plugin.ERROR):
            raise CaptureError(f"Sequence {sequence.sequence_id}: {path.removeprefix(capture_plugin.ERROR)}")
        tensors = await asyncio.to_thread(_take, Path(path))
        states = States(sequence.sequence_id, tensors["aux"], tensors["last"])
        states.check(sequence, self._hidden_size, self._dtype)
        return states

    async def _generate(
        self, session: aiohttp.ClientSession, sequence: TokenSequence, asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The `meta_info` of a request that adds one token to the sequence."""
        rid = uuid.uuid4().hex
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        body = {"rid": rid, "input_ids": sequence.ids.tolist(), "sampling_params": sampling, **asked}
        for attempt in range(1, _TRIES + 1):
            try:
                answer = await transport.post(session, f"{self.url}/generate", body)
                break
            except (Refused, Unauthorized) as error:
                raise CaptureError(f"The server {self.url} refuses {sequence.sequence_id}: {error}") from None
            except Transient as error:
                await self._require_alive(session, error)
                if attempt == _TRIES:
                    raise CaptureError(
                        f"The server {self.url} failed {_TRIES} times on {sequence.sequence_id}: {error}"
                    ) from None
                await asyncio.sleep(_RETRY_S * attempt)
        meta: dict[str, Any] = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            raise CaptureError(f"The server {self.url} aborted {sequence.sequence_id}: {meta['finish_reason']}")
        if meta["id"] != rid or meta["prompt_tokens"] != len(sequence.ids):
            raise CaptureError(
                f"The server {self.url} answered {meta['id']} with {meta['prompt_tokens']} tokens, asked was {rid} "
                f"with {len(sequence.ids)}."
            )
        return meta

    async def _require_alive(self, session: aiohttp.ClientSession, lost: Transient) -> None:
        try:
            await transport.get(session, f"{self.url}/model_info")
        except Transient as error:
            raise TargetDead(f"The server {self.url} is gone ({lost}, then {error}).") from None


def _take(path: Path) -> dict[str, torch.Tensor]:
    """Reads a file of states and deletes it. The tensors own their memory: a map of the file would keep it alive."""
    try:
        content = path.read_bytes()
        path.unlink()
    except FileNotFoundError:
        raise CaptureError(
            f"{path} is not here: the server runs on another machine or in a container with a /dev/shm of its own, "
            "or the states waited too long for this reader and were deleted."
        ) from None
    tensors: dict[str, torch.Tensor] = load(content)
    return tensors


def _check_flags(url: str, info: Mapping[str, Any], layer_ids: list[int]) -> None:
    wanted = {
        "enable_return_aux_hidden_states": True,
        "return_aux_hidden_state_layer_ids": layer_ids,
        "chunked_prefill_size": -1,
        "disable_radix_cache": True,
    }
    for name, value in wanted.items():
        if info.get(name) != value:
            flag = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
            raise TargetError(f"The server {url} has {name}={info.get(name)}: start it with {flag}.")
