"""Rows of instruction sets as people publish them: public sets by name, and the columns that hold the question.
Also questions that the target made up itself, out of a run of the generate job.

Everything comes out as `prompts.Prompt`: what the target is asked, without anybody's answers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import pyarrow.parquet as pq

from eagle3_ray.ledger import Ledger
from eagle3_ray.prompts import BadPrompt, Prompt, PromptSourceError, Source, hub_rows, parse, read, usual_form
from eagle3_ray.records import SEQUENCES
from eagle3_ray.rendering import Renderer
from eagle3_ray.runs import GENERATE, RunDir
from eagle3_ray.target.files import resolve

Rows = Iterator[tuple[str, str, bytes]]
"""Each row as its place for people, the id it has if it brings none, and its JSON."""


@dataclass(frozen=True)
class PublicSet:
    """A set on the Hugging Face Hub and the column with its prompts."""

    dataset: str
    split: str
    column: str
    config: str | None = None

    def __str__(self) -> str:
        config = f", {self.config}" if self.config else ""
        return f"{self.dataset}{config}, split {self.split}, column {self.column}"


PUBLIC_SETS = {
    "gsm8k": PublicSet("openai/gsm8k", "train", "question", config="main"),
    "magicoder-evol-instruct": PublicSet("ise-uiuc/Magicoder-Evol-Instruct-110K", "train", "instruction"),
    "open-perfectblend": PublicSet("mlabonne/open-perfectblend", "train", "conversations"),
    "sharegpt": PublicSet("Aeala/ShareGPT_Vicuna_unfiltered", "train", "conversations"),
    "ultrachat": PublicSet("HuggingFaceH4/ultrachat_200k", "train_sft", "messages"),
}


def file_rows(sources: Sequence[Source]) -> Rows:
    """The rows of files and hf:// datasets.

    Raises:
        PromptSourceError: one of them cannot be read to its end.
    """
    for source in sources:
        name = source.path if source.path.startswith("hf://") else PurePosixPath(source.path.partition("?")[0]).name
        for number, raw in read(source):
            yield f"{source.path}:{number}", f"{name}:{number}", raw


@dataclass(frozen=True)
class RunQuestions:
    """A generate run of `{"target_asks": true}` rows: its answers are the questions."""

    run: str

    @property
    def ledger(self) -> Ledger:
        return Ledger(RunDir(self.run))

    def __str__(self) -> str:
        return f"run://{self.run}"


def run_rows(questions: RunQuestions) -> Rows:
    """The questions that the target ended itself and that hold no control token, as text.

    Raises:
        PromptSourceError: the run is not there or not complete.
    """
    run_dir, ledger = RunDir(questions.run), questions.ledger
    if not run_dir.succeeded(GENERATE):
        raise PromptSourceError(f"{questions}: no complete generate run is there; run jobs/generate.py on it first.")
    target = run_dir.manifest()[GENERATE]["config"]["target"]
    renderer = Renderer(resolve(target["model"]).folder, trust_remote_code=target["trust_remote_code"])
    special = set(renderer.special_ids)
    columns = ["sequence_id", "output_ids", "finish_reason"]
    for file in ledger.files(SEQUENCES):
        for batch in pq.ParquetFile(file).iter_batches(columns=columns):
            for row in batch.to_pylist():
                name, words = row["sequence_id"], row["output_ids"][:-1]
                if row["finish_reason"] == "stop" and special.isdisjoint(words):
                    question = {"id": name, "prompt": renderer.text(words).strip()}
                    yield f"{questions}: {name}", name, json.dumps(question).encode()


def public_rows(public: PublicSet) -> Rows:
    """The rows of a public set, streamed.

    Raises:
        PromptSourceError: the set cannot be read, or `datasets` is not installed.
    """
    try:
        for number, raw in hub_rows(public.dataset, public.split, public.config):
            place = f"{public.dataset}:{number}"
            yield place, place, raw
    except PromptSourceError:
        raise
    except (ValueError, OSError) as error:
        raise PromptSourceError(
            f"{public} cannot be read: {error}. Without network, give a file: NAME=PATH."
        ) from error


Named = PublicSet | RunQuestions
"""A place that is no file."""

Place = Named | list[Source]
"""Where the rows of a partition come from."""


def rows_of(place: Place) -> Rows:
    """The rows of any place. Raises PromptSourceError."""
    if isinstance(place, PublicSet):
        return public_rows(place)
    return run_rows(place) if isinstance(place, RunQuestions) else file_rows(place)


def parse_row(raw: bytes, fallback_id: str, column: str | None) -> Prompt:
    """One row in any of the usual forms: those of `prompts.parse`, the questions of one column, or MT-bench's turns.

    Raises:
        BadPrompt: the row cannot be used.
    """
    prompt = parse(usual_form(raw, column), fallback_id)
    if prompt.input_ids is not None:
        raise BadPrompt("input_ids have no text to compare; give such files to the generate job as they are")
    return prompt
