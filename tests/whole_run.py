"""A run directory with every kind of file that the stages leave, in moments: what there is to damage."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from eagle3_ray import capture_plan, checkpoints, corpus, plan
from eagle3_ray.capturer import CaptureSettings, ShardCapturer
from eagle3_ray.corpus import Corpus
from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.export import export
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.journal import Journal
from eagle3_ray.plan import PartitionPlan, Plan, PlanSettings, Render, TargetTokens
from eagle3_ray.plan_units import choose
from eagle3_ray.runs import RunDir, WriterLock, write_json
from tests.runs import make_run
from tests.tiny_target import VOCAB_SIZE

LAYERS = (2, 4, 5)
TRAINING = "plan of the training"


@dataclass(frozen=True)
class WholeRun:
    """The run, and what it was made of."""

    run: RunDir
    model: Path
    rows: list[dict[str, Any]]

    @property
    def settings(self) -> PlanSettings:
        return PlanSettings([], "/no/tokenizer", {}, VOCAB_SIZE)

    @property
    def target_config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.model / "config.json").read_text())
        return config

    def capture_settings(self, sequences: Corpus) -> CaptureSettings:
        return CaptureSettings(sequences, self.model, LAYERS, "transformers", "float32", 0, 1, 512, 0.0)


def make_whole_run(path: Path, model: Path, rows: list[dict[str, Any]]) -> WholeRun:
    """Every file is written by the code that writes it in a job, but for the rows, which Ray Data writes there."""
    whole = WholeRun(make_run(path, rows), model, rows)
    stage = whole.run.stage("generate")
    (stage / "checkpoint").mkdir()
    pq.write_table(pa.table({"unit": pa.array(range(len(rows)), pa.int64())}), stage / "checkpoint" / "0.parquet")
    _plan(whole, stage / "plan")
    journal = Journal(stage / "journal")
    for row in rows:
        journal.append(row["sequence_id"], {"output_ids": row["output_ids"], "token_sha": row["token_sha"]})
    _capture(whole)
    _train(whole)
    for name in ("generate", "capture", "train"):
        whole.run.write_summary(name, {"stage": name, "status": "complete"})
    return whole


def _plan(whole: WholeRun, folder: Path) -> None:
    raw = [
        {"partition": row["partition"], "file": "f", "line": line, "raw": json.dumps({"input_ids": row["prompt_ids"]})}
        for line, row in enumerate(whole.rows)
    ]
    (folder / "parts").mkdir(parents=True)
    pq.write_table(Render(whole.settings)(pa.Table.from_pylist(raw)), folder / "parts" / "0.parquet")
    counts = choose(folder, [], **whole.settings.choice())
    tokens = TargetTokens([0, 1, 2, 3, 4], "text", [7, 8], [9])
    plan.save(folder, Plan(folder, [PartitionPlan(**count) for count in counts], tokens), whole.settings.key())


def _capture(whole: WholeRun) -> None:
    sequences = corpus.make(whole.run)
    whole.run.claim("capture", {"corpus": sequences.key}, {})
    with WriterLock(whole.run) as lock:
        capturer = ShardCapturer(
            whole.capture_settings(sequences), str(whole.run.stage("capture")), "bf16", {"of": "test"}, lock.token
        )
        for shard in capture_plan.shards(sequences, 200):
            capturer({"shard": [shard.name], "rows": [shard.rows]})  # type: ignore[dict-item]
    whole.run.succeed("capture", sequences.key)


def _train(whole: WholeRun) -> None:
    folder = whole.run.stage("train")
    drafter = Eagle3Drafter(DrafterConfig.from_target(whole.target_config, LAYERS, draft_vocab_size=64))
    for name in ("initial", "drafter"):
        export(drafter, folder / name, whole.target_config, torch.float32)
    for step in (3, 6):
        state = {"model": drafter.state_dict(), "best": 1.5, "unimproved": 0}
        checkpoints.save(folder / "checkpoints", step, TRAINING, state, best=step == 3)
    log = [{"step": step, "of": 6, "loss": 3.0 / step, "line": step} for step in range(1, 7)]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    write_json(folder / "finished.json", {"plan": TRAINING, "step": 6})
    whole.run.claim("train", {"train.seed": 0}, {})
    whole.run.succeed("train", TRAINING)
