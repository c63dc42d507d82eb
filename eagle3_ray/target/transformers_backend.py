"""Hidden states from transformers, on a CPU or on all GPUs of the process.

Sequences are packed one behind the other, so no padding is computed. Only the captured layers are hooked and no
logits are made. Which way of packing a model allows is found out by trying, not from a list of models.
"""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3_ray.target.layers import resolve_layers
from eagle3_ray.target.model import load_model
from eagle3_ray.target.packed_attention import PACKED, NotPlainAttention, register, sequences_of
from eagle3_ray.target.protocol import BatchHalved, CaptureError, States, TokenSequence, in_groups, relative_error

_PACKING_NOISE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_PROBE_LENGTHS = (40, 24)


class TransformersTarget:
    """The causal language model in `folder`, with `dtype` "float32" or "bfloat16".

    `device` is "cpu", "cuda" or one of several GPUs ("cuda:1"); None takes all GPUs of the process (one after the
    other, by layers), else the CPU. A forward pass holds at most `batch_tokens` tokens, or one longer sequence.

    Raises:
        TargetError: the folder's own code is needed, and `trust_remote_code` is off.
    """

    def __init__(
        self,
        folder: Path,
        layers: Sequence[int] | None = None,
        dtype: str = "bfloat16",
        device: str | None = None,
        batch_tokens: int = 8192,
        trust_remote_code: bool = False,
    ) -> None:
        register()
        self._dtype: torch.dtype = getattr(torch, dtype)
        spread = device is None and torch.cuda.device_count() > 1
        model = load_model(folder, self._dtype, trust_remote_code, **({"device_map": "auto"} if spread else {}))
        if not spread:
            model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._decoder: Any = model.get_decoder().eval()
        self._config: dict[str, Any] = model.config.get_text_config().to_dict()
        self.layers = resolve_layers(self._config, layers)
        self.longest = None
        self.batch_tokens = batch_tokens
        self._inputs: dict[int, torch.Tensor] = {}
        modules = _decoder_layers(self._decoder, int(self._config["num_hidden_layers"]))
        self._hooks = [
            modules[layer].register_forward_pre_hook(self._remember(layer), with_kwargs=True) for layer in self.layers
        ]
        self.packed = self._choose_packing(str(self._decoder.config._attn_implementation))

    def capture(self, sequences: Sequence[TokenSequence]) -> list[States]:
        """See `Target.capture`. On out-of-memory the batch is halved for good, with one warning.

        Raises:
            CaptureError: wrong states, or a single sequence that does not fit into the GPU's memory.
        """
        found: list[States] = []
        while len(found) < len(sequences):
            batch = next(self._batches(sequences[len(found) :]))
            try:
                found += self._forward(batch)
            except torch.OutOfMemoryError:
                self._halve(batch)
        hidden_size = int(self._config["hidden_size"])
        for states, sequence in zip(found, sequences, strict=True):
            states.check(sequence, hidden_size, self._dtype)
        return found

    def prefill(self, sequences: Sequence[TokenSequence]) -> None:
        """See `Target.prefill`; the same batches as those of `capture`."""
        for batch in self._batches(sequences):
            self._read(batch)
            self._inputs.clear()

    def close(self) -> None:
        """Frees the model's memory."""
        for hook in self._hooks:
            hook.remove()
        self._decoder = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _batches(self, sequences: Sequence[TokenSequence]) -> Iterator[list[TokenSequence]]:
        return in_groups(sequences, lambda sequence: len(sequence.ids), self.batch_tokens if self.packed else 0)

    def _halve(self, batch: Sequence[TokenSequence]) -> None:
        torch.cuda.empty_cache()
        tokens = sum(len(sequence.ids) for sequence in batch)
        if len(batch) == 1:
            raise CaptureError(
                f"Sequence {batch[0].sequence_id} of {tokens} tokens alone does not fit into the GPU's memory. "
                "Give the capture actor more GPUs, or leave sequences of that length out."
            ) from None
        self.batch_tokens = max(tokens // 2, 1)
        warnings.warn(
            f"Out of GPU memory with {tokens} tokens in a forward pass: going on with {self.batch_tokens} "
            "(capture.batch_tokens).",
            BatchHalved,
            stacklevel=3,
        )

    def _read(self, batch: Sequence[TokenSequence]) -> torch.Tensor:
        """One forward pass: the final norm's output [T, H] of all sequences side by side."""
        lengths = [len(sequence.ids) for sequence in batch]
        device = self._decoder.get_input_embeddings().weight.device
        ids = torch.from_numpy(np.concatenate([sequence.ids for sequence in batch])).to(device, torch.int64)
        # transformers tells packed sequences by positions that begin again (masking_utils.find_packed_sequence_indices)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        with sequences_of(lengths), torch.no_grad():
            last: torch.Tensor = self._decoder(
                input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
            ).last_hidden_state[0]
        return last

    def _forward(self, batch: Sequence[TokenSequence]) -> list[States]:
        lengths = [len(sequence.ids) for sequence in batch]
        try:
            last = self._read(batch)
            aux = [self._inputs[layer][0].to(last.device) for layer in self.layers]
        finally:
            self._inputs.clear()
        rows = zip(batch, last.split(lengths), *(states.split(lengths) for states in aux), strict=True)
        # .cpu() of what lies on the CPU already is a view of the whole batch: each sequence has to own its rows
        return [
            States(sequence.sequence_id, torch.cat(columns, dim=-1).cpu(), own.clone().cpu())
            for sequence, own, *columns in rows
        ]

    def _remember(self, layer: int) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inputs[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _choose_packing(self, default: str) -> bool:
        """Takes the fastest way that leaves each sequence alone; returns whether sequences may share a forward pass.

        Ways: our mask-free attention, the model's own attention with the mask that transformers makes, one by one.
        """
        rng = np.random.default_rng(0)
        vocab = int(self._config["vocab_size"])
        probes = [
            TokenSequence(f"probe {length}", rng.integers(vocab, size=length, dtype=np.int32), 0)
            for length in _PROBE_LENGTHS
        ]
        alone = [self._forward([probe])[0] for probe in probes]
        for attention in (PACKED, default) if self._sees_all() else (default,):
            self._decoder.set_attn_implementation(attention)
            try:
                together = self._forward(probes)
            except NotPlainAttention:
                continue
            noise = (relative_error(a.last_hidden, b.last_hidden) for a, b in zip(alone, together, strict=True))
            if all(error < _PACKING_NOISE[self._dtype] for error in noise):
                return True
        warnings.warn(
            "This model mixes sequences that share a forward pass, so they are captured one by one, which is slow.",
            stacklevel=2,
        )
        return False

    def _sees_all(self) -> bool:
        """Whether every layer attends to all tokens before: windows and chunks are longer than the probes."""
        kinds = set(self._config.get("layer_types") or ())
        return kinds <= {"full_attention"} and not self._config.get("attention_chunk_size")


def _decoder_layers(decoder: torch.nn.Module, count: int) -> torch.nn.ModuleList:
    """Raises CaptureError where the decoder has no one list of all its layers."""
    lists = [m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if not lists:
        raise CaptureError(f"{type(decoder).__name__} has no list of {count} layers to hook. Use the SGLang backend.")
    return lists[0]
