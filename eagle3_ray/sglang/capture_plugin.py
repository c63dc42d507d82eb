"""An SGLang plugin (entry point group `sglang.srt.plugins`): hidden states leave the engine as files in shared memory.

Asks for nothing but torch, safetensors and sglang 0.5.23, and does nothing unless CAPTURE_DIR is set. Then a request
with `return_hidden_states: true` is answered with `meta_info.hidden_states == [path]`: a safetensors file with `aux`
[T, 3H] and `last` [T, H] (post-norm). Where something is wrong, the text is ERROR and a sentence instead of a path.

The states come to the CPU on SGLang's own copy stream, beside the next forward pass, on the one rank that answers.
The files of one directory hold no more than max(CAPTURE_BYTES, one prefill batch): a full directory makes the
scheduler wait for its readers, and after CAPTURE_WAIT_S what no reader fetched for that long is deleted.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save_file

CAPTURE_DIR = "EAGLE3_RAY_CAPTURE_DIR"
CAPTURE_BYTES = "EAGLE3_RAY_CAPTURE_BYTES"
CAPTURE_WAIT_S = "EAGLE3_RAY_CAPTURE_WAIT_S"
ERROR = "eagle3_ray: "
SUFFIX = ".safetensors"
_LOCK = "owner.lock"
_POLL_S = 0.005
_log = logging.getLogger(__name__)


@cache
def register() -> None:
    """What SGLang calls in each of its processes; once, though an installed package and a copy may both name it."""
    if not os.environ.get(CAPTURE_DIR):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu", copy_last_states_too, HookType.BEFORE
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._append_prefill_hidden_states",
        write_instead_of_listing,
        HookType.AROUND,
    )


def copy_last_states_too(result: Any, *_args: Any, **_more: Any) -> None:
    """BEFORE hook: sglang copies the aux states on its copy stream and leaves the last ones on the GPU.

    A later forward pass may overwrite them there. Ranks that answer nobody let go of both.
    """
    output = result.logits_output
    if output is None or output.last_hidden_states is None:
        return
    if not _answers():
        output.hidden_states = output.last_hidden_states = None
    elif output.last_hidden_states.is_cuda:
        states = output.last_hidden_states
        host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
        host.copy_(states, non_blocking=True)
        states.record_stream(torch.cuda.current_stream(states.device))
        output.last_hidden_states = host


def write_instead_of_listing(
    original: Callable[..., int],
    processor: Any,
    *,
    req: Any,
    logits_output: Any,
    hidden_state_offset: int,
    extend_input_len: int,
    **more: Any,
) -> int:
    """AROUND hook: one request's rows of a prefill batch become a file. Returns where the next request's rows begin."""
    last = logits_output.last_hidden_states
    if last is None:
        return original(
            processor,
            req=req,
            logits_output=logits_output,
            hidden_state_offset=hidden_state_offset,
            extend_input_len=extend_input_len,
            **more,
        )
    end = hidden_state_offset + extend_input_len
    if more.get("store", True) and req.return_hidden_states is True and _answers():
        rows = slice(hidden_state_offset, end)
        tensors = {"aux": logits_output.hidden_states[rows], "last": last[rows]}
        req.hidden_states.append(
            _writer().write(str(req.rid), tensors, len(req.origin_input_ids), new_batch=hidden_state_offset == 0)
        )
    return end


class Writer:
    """Writes states into a directory of its own below `base`, and never lets more than `most_bytes` wait there."""

    def __init__(self, base: Path, most_bytes: int, wait_s: float) -> None:
        sweep(base)
        unlocked = Path(tempfile.mkdtemp(prefix=f".{os.getpid()}-", dir=base))
        self._lock = _hold(unlocked)
        self.folder = unlocked.rename(base / unlocked.name.removeprefix("."))
        self._most_bytes = most_bytes
        self._wait_s = wait_s
        self._of_this_batch = 0

    def write(self, name: str, tensors: dict[str, torch.Tensor], prompt_tokens: int, new_batch: bool) -> str:
        """The file's path, or ERROR and why there is none. The file appears whole or not at all."""
        if new_batch:
            self._of_this_batch = 0
        rows = {key: len(states) for key, states in tensors.items()}
        if set(rows.values()) != {prompt_tokens}:
            return (
                f"{ERROR}{rows} rows of {prompt_tokens} prompt tokens: chunked prefill or a cache hit. "
                "Start the server with --chunked-prefill-size -1 --disable-radix-cache."
            )
        size = sum(states.nbytes for states in tensors.values())
        if not self._wait_for_room(size):
            return (
                f"{ERROR}{self.folder} was full of unread states for {self._wait_s:g} s ({CAPTURE_BYTES}="
                f"{self._most_bytes}). Send less at once, or give the states more shared memory."
            )
        path = self.folder / f"{name}{SUFFIX}"
        unfinished = path.with_suffix(".tmp")
        try:
            save_file({key: states.cpu().contiguous() for key, states in tensors.items()}, unfinished)
            unfinished.rename(path)
        except OSError as error:  # safetensors raises it too when shared memory is full
            unfinished.unlink(missing_ok=True)
            return f"{ERROR}the states could not be written ({error}). Give the machine more shared memory (/dev/shm)."
        self._of_this_batch += path.stat().st_size
        return str(path)

    def _wait_for_room(self, size: int) -> bool:
        """The batch at hand does not count: its answers, and so its readers, only come after its last request."""
        deadline = time.monotonic() + self._wait_s
        while True:
            held = held_bytes(self.folder)
            if held <= self._of_this_batch or held + size <= self._most_bytes:
                return True
            if time.monotonic() > deadline:
                self._delete_unread()
                held = held_bytes(self.folder)
                return held <= self._of_this_batch or held + size <= self._most_bytes
            time.sleep(_POLL_S)

    def _delete_unread(self) -> None:
        """Files that stood for the whole wait: whoever asked for them is gone."""
        for path in self.folder.glob(f"*{SUFFIX}"):
            try:
                if time.time() - path.stat().st_mtime >= self._wait_s:
                    _log.warning("eagle3_ray: nobody read %s in %g s, deleted", path, self._wait_s)
                    path.unlink()
            except FileNotFoundError:
                continue


def held_bytes(folder: Path) -> int:
    """Bytes of the files in `folder`; one that a reader removes meanwhile counts as gone."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                total += entry.stat().st_size
            except FileNotFoundError:
                continue
    return total


def sweep(base: Path) -> None:
    """Makes `base` and removes what crashed servers left in it.

    A living owner holds a lock on its directory. Process ids would not do: containers share /dev/shm, not their ids.
    A name that begins with a dot is a directory whose owner is about to lock it.
    """
    base.mkdir(parents=True, exist_ok=True)
    for folder in base.iterdir():
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        try:
            _hold(folder).close()
        except (BlockingIOError, FileNotFoundError):
            continue
        _log.info("eagle3_ray: removing %s, which a server left behind", folder)
        shutil.rmtree(folder, ignore_errors=True)


def _hold(folder: Path) -> IO[bytes]:
    """The kernel lets go of the lock when the process ends, however it ends."""
    lock = (folder / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _answers() -> bool:
    """Whether this rank sends answers to clients (sglang 0.5.23: the first of each attention TP group)."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_rank) == 0


@cache
def _writer() -> Writer:
    return Writer(
        Path(os.environ[CAPTURE_DIR]),
        int(os.environ.get(CAPTURE_BYTES, 4 << 30)),
        float(os.environ.get(CAPTURE_WAIT_S, 60)),
    )
