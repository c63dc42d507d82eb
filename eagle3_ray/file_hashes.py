"""What is in a file, or in a drafter's folder, as a hash."""

import hashlib
from pathlib import Path


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_sha(folder: Path) -> str:
    """SHA-256 of all that a checkpoint's folder means to an engine: names and bytes of its config and tensors."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin", ".pt"))
    return hashlib.sha256("\n".join(f"{path.name} {sha256_of(path)}" for path in files).encode()).hexdigest()
