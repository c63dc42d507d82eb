"""The shards of a run's cache of states: which sequences each holds, which are there, what the others will take."""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle3_ray.config import Capture, ConfigError
from eagle3_ray.corpus import Corpus
from eagle3_ray.model_config import text_config
from eagle3_ray.runs import CAPTURE, RunDir
from eagle3_ray.states_cache import DamagedShard, about, bytes_per_token, read_scores
from eagle3_ray.target.files import TargetFiles


@dataclass(frozen=True)
class Shard:
    """A file of the cache: its name tells which sequences it holds."""

    name: str
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What there is to capture, what that takes, and what is there already."""

    shards: list[Shard]
    missing: list[Shard]
    damaged: list[Path]
    sequences: int
    tokens: int
    missing_tokens: int
    bytes_per_token: int
    free_bytes: int
    storage: str
    known_speed: float | None  # tokens per second of an earlier job of this run

    @staticmethod
    def make(run_dir: RunDir, capture: Capture, sequences: Corpus, target: TargetFiles) -> "Plan":
        """Cuts the corpus into shards and looks which of them are there."""
        folder = run_dir.stage(CAPTURE) / "shards"
        planned = shards(sequences, capture.shard_tokens)
        missing, broken = [], []
        for shard in planned:
            path = folder / f"{shard.name}.parquet"
            try:
                if not path.exists():
                    missing.append(shard)
                else:
                    about(path)
                    read_scores(run_dir.stage(CAPTURE) / "scores" / path.name)
            except DamagedShard as damage:
                broken.append(damage.path)
                missing.append(shard)
        place = next(path for path in (folder, *folder.parents) if path.exists())
        return Plan(
            shards=planned,
            missing=missing,
            damaged=broken,
            sequences=len(sequences),
            tokens=int(sequences.tokens.sum()),
            missing_tokens=sum(int(sequences.tokens[list(shard.rows)].sum()) for shard in missing),
            bytes_per_token=bytes_per_token(int(text_config(target.config)["hidden_size"]), capture.storage),
            free_bytes=shutil.disk_usage(place).free,
            storage=capture.storage,
            known_speed=(run_dir.summary(CAPTURE) or {}).get("tokens_per_second") or None,
        )

    def text(self) -> str:
        """For people: size, room, time, and what to do where it does not fit."""
        need = self.missing_tokens * self.bytes_per_token
        time_needed = (
            f"about {self.missing_tokens / self.known_speed / 60:.0f} min at {self.known_speed:,.0f} tokens/s as before"
            if self.known_speed
            else "time is told after the first shard"
        )
        lines = [
            f"capture: {self.sequences:,} sequences, {self.tokens:,} tokens in {len(self.shards):,} shards, "
            f"{len(self.shards) - len(self.missing):,} of them there",
            f"  disk: {self.bytes_per_token:,} bytes a token ({self.storage}) = {need / 1e9:,.1f} GB to write, "
            f"{self.free_bytes / 1e9:,.1f} GB free; {time_needed}",
        ]
        lines += [f"  {path} is damaged and is captured again" for path in self.damaged]
        if need > self.free_bytes:
            lines.append("  this does not fit: use train.feed=stream, which writes nothing")
        return "\n".join(lines)

    def check_room(self) -> None:
        """Raises ConfigError where the disk cannot hold the states."""
        need = self.missing_tokens * self.bytes_per_token
        if need > 0.97 * self.free_bytes:
            smaller = "" if self.storage == "fp8" else ", capture.storage=fp8"
            raise ConfigError(
                f"the states take {need / 1e9:,.1f} GB and {self.free_bytes / 1e9:,.1f} GB are free in run.dir. Use "
                f"train.feed=stream, which writes nothing{smaller}, or another run.dir."
            )


def shards(sequences: Corpus, shard_tokens: int) -> list[Shard]:
    """The corpus in its order, cut where a shard has its tokens. A longer sequence is a shard by itself."""
    ends = np.cumsum(sequences.tokens)
    found, first, base = [], 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, base + shard_tokens, side="right")))
        found.append(_shard(sequences, range(first, last)))
        base, first = int(ends[last - 1]), last
    return found


def _shard(sequences: Corpus, rows: Sequence[int]) -> Shard:
    digest = hashlib.sha256(" ".join(sequences.token_sha(row) for row in rows).encode()).hexdigest()[:8]
    return Shard(f"{rows[0]:010}-{digest}", tuple(rows))
