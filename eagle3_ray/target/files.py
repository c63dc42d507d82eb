"""The target model's files: where they are, and hashes that tell one model, tokenizer or chat template from another."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_ray.json_files import read_object
from eagle3_ray.model_config import text_config

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt", "*.tiktoken")
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "*.py")
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
_SAMPLE_BYTES = 1 << 20

SMOLLM2 = "sglang_cpu/SmolLM2-135M-Instruct"
"""The target that `python -m eagle3_ray.sglang_cpu model` makes."""


class TargetError(ValueError):
    """The target model's files cannot be used; the message names the remedy."""


@dataclass(frozen=True)
class TargetFiles:
    """A target model's folder. Weights may be absent: generation needs only the tokenizer and the config."""

    name: str  # what a server of this model reports as its model path
    folder: Path
    config: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: ids from 0 to vocab_size - 1 can be sent to a server of this model."""
        return int(text_config(self.config)["vocab_size"])

    def stop_ids(self) -> list[int]:
        """The tokens that end an answer: `eos_token_id` of generation_config.json, else of config.json."""
        places = (read_json(self.folder / "generation_config.json", missing={}), text_config(self.config), self.config)
        eos: int | list[int] = next(
            (place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), []
        )
        ids = [eos] if isinstance(eos, int) else eos
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise TargetError(f"{self.folder}: eos_token_id is {eos!r}, not token ids. Fetch the target model again.")
        return sorted(set(ids))

    def for_sglang(self) -> str:
        """What SGLang loads: the folder, or the model's name where the folder has no weights."""
        return self.name if self.fingerprint()["target.weights"] is None else str(self.folder)

    def fingerprint(self) -> dict[str, str | None]:
        """Hashes of tokenizer, its settings, chat template, config and weights (sampled); None where there is none."""
        return {
            "target.tokenizer": _hash_files(self._match(_TOKENIZER_FILES)),
            "target.tokenizer_settings": _hash_files(self._match(_TOKENIZER_SETTINGS)),
            "target.chat_template": _hash_files(self._match(("chat_template*",))),
            "target.config": _hash_files([self.folder / "config.json"]),
            "target.weights": _hash_files(self._match(_WEIGHT_FILES), sampled=True),
        }

    def _match(self, patterns: Iterable[str]) -> list[Path]:
        return sorted({path for pattern in patterns for path in self.folder.glob(pattern)})


def resolve(model: str, weights: bool = False) -> TargetFiles:
    """The files of `model`: a folder, a Hugging Face name, or SMOLLM2, which is made where it is missing.

    A Hugging Face model is fetched, or read from the hub's cache, without its weights unless these are asked for.

    Raises:
        TargetError: no such folder or name, or a file is missing.
    """
    if model == SMOLLM2:
        from eagle3_ray import sglang_cpu

        model = str(sglang_cpu.model())
    folder = Path(model)
    if not folder.is_dir():
        folder = _fetch(model, weights)
    files = TargetFiles(model, folder, read_config(folder))
    if not isinstance(text_config(files.config).get("vocab_size"), int):
        raise TargetError(f"target.model={model}: {folder / 'config.json'} does not tell vocab_size.")
    if weights and files.fingerprint()["target.weights"] is None:
        raise TargetError(f"target.model={model}: {folder} holds no weights, which this stage needs. Put them there.")
    return files


def _fetch(model: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        unwanted = ["*.pt", "*.pth", "*.onnx", *([] if weights else _WEIGHT_FILES)]
        return Path(snapshot_download(model, ignore_patterns=unwanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise TargetError(
            f"target.model={model} is no folder here and could not be fetched by that name ({first_line}). "
            "Set target.model to a folder that holds config.json and the tokenizer."
        ) from None


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder. Raises TargetError: it is missing or damaged."""
    if not (folder / "config.json").exists():
        raise TargetError(f"target.model: {folder} has no config.json, so it is no model folder.")
    return read_json(folder / "config.json", missing={})


def read_json(path: Path, missing: dict[str, Any]) -> dict[str, Any]:
    """The JSON object in a file of the target, `missing` where there is no such file. Raises TargetError: damaged."""
    return read_object(path, "Fetch the target model again.", TargetError) if path.exists() else missing


def _hash_files(paths: Iterable[Path], sampled: bool = False) -> str | None:
    """Hash of names and contents; of large weight files the size and the first and last MiB stand for the whole.

    The first MiB of a safetensors file holds the names, shapes and offsets of all its tensors.
    """
    digest = hashlib.sha256()
    names = 0
    for path in paths:
        names += 1
        digest.update(path.name.encode())
        with path.open("rb") as file:
            size = path.stat().st_size
            if not sampled or size <= 2 * _SAMPLE_BYTES:
                digest.update(file.read())
            else:
                digest.update(size.to_bytes(8, "little") + file.read(_SAMPLE_BYTES))
                file.seek(-_SAMPLE_BYTES, 2)
                digest.update(file.read())
    return digest.hexdigest()[:16] if names else None
