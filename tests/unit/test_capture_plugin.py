"""The plugin's hooks and files, without an SGLang around them."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_ray.sglang import capture_plugin
from eagle3_ray.sglang.capture_plugin import ERROR, Writer, held_bytes, sweep
from eagle3_ray.target.sglang_server import plugin_environment

BIG = 1 << 30


def states(tokens: int, value: float = 1.0) -> dict[str, torch.Tensor]:
    """Of 4 * 4 * 4 = 64 bytes a token, plus the file's header."""
    return {"aux": torch.full((tokens, 12), value), "last": torch.full((tokens, 4), value)}


def test_a_file_holds_exactly_what_was_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path, BIG, 1)
    batch = torch.arange(40, dtype=torch.bfloat16).reshape(10, 4)
    path = writer.write("r", {"aux": batch[2:5], "last": batch[5:8]}, 3, new_batch=True)
    found = load_file(path)
    assert torch.equal(found["aux"], batch[2:5])
    assert torch.equal(found["last"], batch[5:8])
    assert sorted(os.listdir(writer.folder)) == ["owner.lock", "r.safetensors"]


def test_rows_that_are_not_the_prompts_become_an_error_and_no_file(tmp_path: Path) -> None:
    writer = Writer(tmp_path, BIG, 1)
    answer = writer.write("r", states(3), 4, new_batch=True)
    assert answer.startswith(ERROR)
    assert "3 rows" not in answer.split("'")[0]
    assert "of 4 prompt tokens" in answer
    assert os.listdir(writer.folder) == ["owner.lock"]


def test_a_full_directory_makes_the_writer_wait_for_a_reader(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1500, 20)
    first = Path(writer.write("a", states(15), 15, new_batch=True))
    threading.Timer(0.4, first.unlink).start()
    started = time.monotonic()
    second = writer.write("b", states(15), 15, new_batch=True)
    assert time.monotonic() - started >= 0.35
    assert Path(second).exists()
    assert held_bytes(writer.folder) <= 1500


def test_one_batch_may_be_larger_than_the_bound_or_it_would_wait_for_itself(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1500, 0.2)
    answers = [writer.write(str(n), states(15), 15, new_batch=n == 0) for n in range(4)]
    assert [Path(answer).exists() for answer in answers] == [True] * 4


def test_unread_states_are_deleted_only_after_the_wait(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1500, 0.3)
    old = Path(writer.write("a", states(15), 15, new_batch=True))
    started = time.monotonic()
    new = writer.write("b", states(15), 15, new_batch=True)
    assert time.monotonic() - started >= 0.3
    assert not old.exists()
    assert Path(new).exists()


def test_a_directory_that_stays_full_gives_an_error_with_the_remedy(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1500, 0.2)
    keeper = writer.folder / "not-ours"
    keeper.write_bytes(b"0" * 2000)
    assert "give the states more shared memory" in writer.write("a", states(15), 15, new_batch=True)


def hold_and_die(base: str, ready: Any, die: Any) -> None:
    writer = Writer(Path(base), BIG, 1)
    writer.write("r", states(2), 2, new_batch=True)
    ready.set()
    die.wait(30)
    os._exit(9)


def test_a_killed_writers_files_go_at_the_next_start_and_a_living_ones_stay(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready, die = spawn.Event(), spawn.Event()
    process = spawn.Process(target=hold_and_die, args=(str(tmp_path), ready, die))
    process.start()
    assert ready.wait(60)
    sweep(tmp_path)
    assert len(list(tmp_path.glob("*/r.safetensors"))) == 1
    die.set()
    process.join()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def hooked(monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int = 0, last: bool = True) -> tuple[Any, Any]:
    """A request of 3 tokens behind one of 2 in a prefill batch, and the batch's output."""
    monkeypatch.setattr(capture_plugin, "_answers", lambda: rank == 0)
    writer = Writer(folder, BIG, 1)
    monkeypatch.setattr(capture_plugin, "_writer", lambda: writer)
    rows = torch.arange(5.0)[:, None]
    output = SimpleNamespace(hidden_states=rows.expand(5, 12), last_hidden_states=rows.expand(5, 4) if last else None)
    request = SimpleNamespace(rid="x", return_hidden_states=True, origin_input_ids=[7, 8, 9], hidden_states=[])
    return request, output


def call_hook(request: Any, output: Any, **more: Any) -> int:
    return capture_plugin.write_instead_of_listing(
        lambda *_args, **_more: -1,
        None,
        req=request,
        logits_output=output,
        hidden_state_offset=2,
        extend_input_len=3,
        **more,
    )


def test_a_request_gets_its_own_rows_of_the_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request, output = hooked(monkeypatch, tmp_path)
    assert call_hook(request, output) == 5
    [path] = request.hidden_states
    found = load_file(path)
    assert found["aux"][:, 0].tolist() == [2, 3, 4]
    assert found["last"].shape == (3, 4)


def test_other_ranks_and_discarded_requests_write_nothing_but_count_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request, output = hooked(monkeypatch, tmp_path, rank=1)
    assert call_hook(request, output) == 5
    request, output = hooked(monkeypatch, tmp_path)
    assert call_hook(request, output, store=False) == 5
    assert list(tmp_path.glob("*/*.safetensors")) == []


def test_a_server_without_capture_works_as_if_there_were_no_plugin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request, output = hooked(monkeypatch, tmp_path, last=False)
    assert call_hook(request, output) == -1


def test_other_ranks_let_go_of_the_states(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, output = hooked(monkeypatch, tmp_path, rank=1)
    capture_plugin.copy_last_states_too(SimpleNamespace(logits_output=output))
    assert output.hidden_states is None
    assert output.last_hidden_states is None


def test_without_the_environment_variable_nothing_of_sglang_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(capture_plugin.CAPTURE_DIR, raising=False)
    capture_plugin.register()  # sglang is not installed here: touching it would raise


def test_sglang_finds_the_plugin_here_and_in_an_environment_without_this_package(tmp_path: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [ours] = project["entry-points"]["sglang.srt.plugins"].items()
    assert EntryPoint(*ours, "sglang.srt.plugins").load() is capture_plugin.register
    env = plugin_environment(tmp_path / "plugin", tmp_path / "states", 100)
    look = (
        "import sys; from importlib.metadata import entry_points; "
        "e, *more = entry_points(group='sglang.srt.plugins', name='eagle3_capture'); f = e.load(); "
        "assert all(one.load() is f for one in more); "  # where this package is installed too
        "print(sys.modules[f.__module__].__file__); "
        "print([m for m in sys.modules if m.startswith(('ray', 'transformers', 'pyarrow', 'aiohttp'))])"
    )
    found = subprocess.run(
        [sys.executable, "-c", look], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    where, heavy = found.stdout.splitlines()
    assert where == str(tmp_path / "plugin" / "eagle3_ray" / "sglang" / "capture_plugin.py")
    assert heavy == "[]"
