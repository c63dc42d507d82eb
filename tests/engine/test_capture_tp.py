"""A target that is spread over the ranks of a real SGLang (TP): one rank writes, and what it writes is whole."""

from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_ray.target.protocol import CaptureError, TokenSequence
from eagle3_ray.target.sglang_backend import SGLangTarget
from eagle3_ray.target.sglang_server import SHARED_MEMORY
from eagle3_ray.target.transformers_backend import TransformersTarget

RANKS = 3  # SmolLM2-135M has 9 heads, and 3 of keys


def test_three_ranks_give_the_states_of_one_and_one_of_them_writes_up_to_the_longest_sequence(
    cpu_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = np.random.default_rng(0)
    sequences = [
        TokenSequence(f"{number:032x}", dice.integers(3, 40000, length).astype(np.int32), 2)
        for number, length in enumerate((17, 60, 130, 2))
    ]
    whole = TransformersTarget(cpu_model, dtype="float32", device="cpu", batch_tokens=1024)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(["0"] * RANKS))  # SGLang wants to be told on a CPU
    spread = SGLangTarget.start(cpu_model, args=["--tp", str(RANKS), "--context-length", "256"])
    try:
        assert 130 < spread.longest < 256
        longest, longer = (
            TokenSequence(f"{length:032x}", dice.integers(3, 40000, length).astype(np.int32), 2)
            for length in (spread.longest, spread.longest + 1)
        )
        sequences.append(longest)
        with pytest.raises(CaptureError, match=f"refuses {longer.sequence_id}"):
            spread.capture([longer])
        captured = spread.capture(sequences)
        assert len([path for path in SHARED_MEMORY.iterdir() if path.is_dir()]) == 1  # a rank that writes has a folder
    finally:
        spread.close()
    for sequence, ours, theirs in zip(sequences, captured, whole.capture(sequences), strict=True):
        ours.check(sequence, 576, torch.float32)
        for mine, right in ((ours.aux_hidden, theirs.aux_hidden), (ours.last_hidden, theirs.last_hidden)):
            assert float((mine - right).norm() / right.norm()) < 2e-5
