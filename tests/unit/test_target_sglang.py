"""What the SGLang backend makes of a server's answers, without a server."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_ray.sglang.capture_plugin import ERROR
from eagle3_ray.target.protocol import CaptureError, TokenSequence
from eagle3_ray.target.sglang_backend import SGLangTarget
from eagle3_ray.target.sglang_server import capture_arguments
from tests.tiny_model import sequences

CONFIG = {"hidden_size": 4, "num_hidden_layers": 8, "architectures": ["LlamaForCausalLM"]}


def answering(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> SGLangTarget:
    """A target whose server answers sequence number n with `answers[n]`."""
    target = SGLangTarget("http://nowhere", CONFIG, (2, 4, 5), "float32")

    async def generate(_session: Any, sequence: TokenSequence, _asked: Any) -> dict[str, Any]:
        return {"hidden_states": answers[int(sequence.sequence_id[1:])]}

    monkeypatch.setattr(target, "_generate", generate)
    return target


def stored(path: Path, tokens: int) -> list[str]:
    save_file({"aux": torch.ones(tokens, 12), "last": torch.ones(tokens, 4)}, path)
    return [str(path)]


def test_states_come_back_in_the_order_asked_and_their_files_are_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = answering(monkeypatch, stored(tmp_path / "a", 3), stored(tmp_path / "b", 5))
    found = target.capture(sequences([3, 5]))
    assert [(s.sequence_id, len(s.last_hidden)) for s in found] == [("s0", 3), ("s1", 5)]
    assert list(tmp_path.iterdir()) == []


def test_one_bad_answer_fails_the_batch_but_every_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = answering(monkeypatch, [f"{ERROR}2 rows of 3 prompt tokens"], stored(tmp_path / "b", 5))
    with pytest.raises(CaptureError, match="Sequence s0: 2 rows of 3 prompt tokens"):
        target.capture(sequences([3, 5]))
    assert list(tmp_path.iterdir()) == []


def test_rows_of_another_sequence_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="chunked prefill or a cache hit"):
        answering(monkeypatch, stored(tmp_path / "a", 2)).capture(sequences([3]))


def test_a_server_without_the_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaptureError, match="runs without eagle3_ray's plugin"):
        answering(monkeypatch, [[[0.1, 0.2]]]).capture(sequences([3]))


def test_a_server_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="another machine"):
        answering(monkeypatch, [str(tmp_path / "none")]).capture(sequences([3]))


def test_a_server_is_started_so_that_every_row_comes_out_of_the_layers_asked() -> None:
    words = capture_arguments(CONFIG, (2, 4, 5))
    ids = words.index("--return-aux-hidden-state-layer-ids")
    assert words[ids + 1 : ids + 4] == ["1", "3", "4"]
    assert words[words.index("--chunked-prefill-size") + 1] == "-1"
    assert "--disable-radix-cache" in words
