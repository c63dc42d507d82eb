"""Files of tensors, ours and those of strangers: tensors and plain values come out of them, code never runs."""

import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open


class UnreadableTorchFile(ValueError):
    """The file is damaged, or holds more than tensors and plain values."""


def load_plain(path: Path) -> dict[str, Any]:
    """The dictionary in a torch file, on the CPU.

    Raises:
        UnreadableTorchFile: it is damaged, or would need code of its own to be read, which is never run.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise UnreadableTorchFile(
            f"{path} is damaged, or holds more than tensors and plain values ({type(error).__name__})."
        ) from None
    if not isinstance(loaded, dict):
        raise UnreadableTorchFile(f"{path} holds no dictionary of tensors but {type(loaded).__name__}.")
    return loaded


def open_safetensors(path: Path, failure: type[Exception], remedy: str) -> safe_open:
    """The open file. Raises `failure` with the `remedy` where it is damaged."""
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise failure(f"{path} is damaged ({error}). {remedy}") from None


_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)
"""What torch 2.13 raises for bytes that it did not write."""
