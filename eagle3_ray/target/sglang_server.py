"""How a capturing SGLang server is started: its arguments, and the plugin where it can see it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_ray import __version__
from eagle3_ray.model_config import keeps_ids, served_ids
from eagle3_ray.sglang import capture_plugin

SHARED_MEMORY = Path("/dev/shm/eagle3_ray")


def capture_arguments(config: Mapping[str, Any], layers: Sequence[int]) -> list[str]:
    """The flags of sglang 0.5.23 that make every prompt token's states come out, each prompt in one piece.

    `--speculative-algorithm` only names the convention here: nothing is speculated (sglang: exec_.py).
    """
    return [
        "--enable-return-aux-hidden-states",
        *("--speculative-algorithm", "EAGLE3"),
        *("--return-aux-hidden-state-layer-ids", *map(str, served_ids(layers, keeps_ids(config)))),
        *("--chunked-prefill-size", "-1"),
        "--disable-radix-cache",
    ]


def plugin_environment(folder: Path, shared_memory: Path, most_bytes: int) -> dict[str, str]:
    """Environment with which an SGLang finds the plugin; writes a package of nothing but the plugin into `folder`.

    SGLang lives in an environment of its own, and ours on its path would put our packages before its own.
    """
    package = Path(capture_plugin.__file__).parents[1]
    for name in ("__init__.py", "sglang/__init__.py", "sglang/capture_plugin.py"):
        copy = folder / "eagle3_ray" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((package / name).read_bytes())
    # of a name of its own: a stale eagle3_ray.egg-info in the working directory would hide one of the same name
    metadata = folder / f"eagle3_ray_capture-{__version__}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: eagle3_ray_capture\nVersion: {__version__}\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\neagle3_capture = eagle3_ray.sglang.capture_plugin:register\n"
    )
    return {
        "PYTHONPATH": str(folder),
        capture_plugin.CAPTURE_DIR: str(shared_memory),
        capture_plugin.CAPTURE_BYTES: str(most_bytes),
    }
