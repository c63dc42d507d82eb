"""One typed configuration for all jobs: a preset or a YAML file, then `dotted.key=value` from the command line.

Unknown keys are refused with the nearest known name. A function below this module takes the values that it needs,
never the configuration.
"""

import datetime
import difflib
import re
import reprlib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key, the value and the remedy."""


def _split_commas(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _expanded(value: str) -> Path:
    if "\0" in value:
        raise ValueError("holds a null character, which no path can")
    try:
        return Path(value).expanduser()
    except RuntimeError:  # ~somebody
        raise ValueError("names the home of a user who is not here; give the folder itself") from None


def _lasting_folder(value: str) -> str:
    path = str(_expanded(value).absolute())
    if _RAY_COPY in path:  # ray job submit --working-dir runs the job in a copy that Ray deletes
        raise ValueError("is inside Ray's copy of the working directory, which is deleted; give an absolute path")
    return path


_RAY_COPY = "/runtime_resources/working_dir_files/"

_NO_YAML = (yaml.YAMLError, AttributeError, LookupError, RecursionError, ValueError)
"""What PyYAML raises for text that is no YAML: for `2026-13-45`, `!!int x` and the like Python's own errors."""

Names = Annotated[list[str], BeforeValidator(_split_commas)]
"""A list of strings; `a,b` on the command line means two of them."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class Run(Section):
    dir: str = Field(description="the folder that holds all of one run; on storage that every node sees")
    mirror: str | None = Field(
        None,
        description="s3://BUCKET/PATH, gs://BUCKET/PATH or a folder that a job copies run.dir to while it works, and "
        "that an empty run.dir is fetched from, so that a run outlives its disk",
    )

    @field_validator("dir")
    @classmethod
    def _is_a_folder(cls, value: str) -> str:
        if "://" in value:
            raise ValueError(
                "has to be a folder on a file system that every node mounts, not a URL; run.mirror may be one"
            )
        if odd := sorted(set(value).intersection("*?[=")):
            raise ValueError(
                f"holds {' and '.join(odd)}, which readers of Parquet take for a pattern; use other letters"
            )
        return _lasting_folder(value)

    @field_validator("mirror")
    @classmethod
    def _is_a_place_beside_the_run(cls, value: str | None, about: ValidationInfo) -> str | None:
        if value is None:
            return None
        if "://" not in value:
            folder = _lasting_folder(value)
            if Path(folder).is_relative_to(about.data.get("dir", "")):
                raise ValueError("is inside run.dir, whose copy it is meant to be; give another place")
            return folder
        if not value.startswith(("s3://", "gs://")):
            raise ValueError("has to be s3://BUCKET/PATH, gs://BUCKET/PATH or a folder")
        if "@" in value:
            raise ValueError(
                "holds a key, which would stand in manifests and logs; put keys into the environment "
                "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS), or use the machine's role"
            )
        return value


class Target(Section):
    model: str = Field(description="folder or Hugging Face name of the target model; its tokenizer and chat template")
    served_as: str | None = Field(
        None,
        description="the model path that the servers report, where it is not target.model under another parent folder",
    )
    trust_remote_code: bool = Field(
        False,
        description="run the code that comes with the model, here and in the servers that we start (Kimi needs it)",
    )
    launch: str = Field(
        "python -m sglang.launch_server", description="command that starts SGLang on a GPU node, where a job starts one"
    )

    @property
    def server_args(self) -> list[str]:
        """What every SGLang server of this target has to be started with."""
        return ["--trust-remote-code"] if self.trust_remote_code else []

    @field_validator("model")
    @classmethod
    def _expand_home(cls, value: str) -> str:
        return str(_expanded(value)) if value.startswith("~") else value


class Prompts(Section):
    path: str = Field(description="file, folder of partitions or glob (local, s3://, gs://), or hf://DATASET[:SPLIT]")
    partitions: Names | None = Field(None, description="names of the partitions to use; all where not given")
    limit: int | None = Field(
        None, ge=1, description="most prompts of a partition; a larger limit extends a smaller one"
    )
    max_tokens_total: int | None = Field(
        None, ge=1, description="most prompt tokens of a partition, in all; a larger value extends a smaller one"
    )
    dedupe: bool = Field(True, description="use prompts with the same token ids once")


class Generate(Section):
    endpoints: Names = Field(
        default_factory=list, description="URLs of running SGLang servers, e.g. http://h1:30000,http://h2:30000"
    )
    servers: int | Literal["auto"] = Field(
        0,
        description="SGLang servers that the job starts, and stops, itself where no endpoints are given; auto: as many "
        "as the GPUs of all nodes are for (on CPUs one a node), more when a node joins",
    )
    gpus_per_server: int = Field(0, ge=0, description="GPUs of each of them (tensor parallelism); 0 is a CPU")
    server_args: Names = Field(default_factory=list, description="more arguments of the SGLang servers that we start")
    max_in_flight: int = Field(4096, ge=1, description="upper bound on requests in flight over all servers")
    max_new_tokens: int = Field(2048, ge=1, description="longest answer, in tokens")
    temperature: float = Field(0.7, ge=0, le=2, description="sampling temperature; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling")
    samples_per_prompt: int = Field(1, ge=1, description="answers for each prompt")
    record_logprobs: bool = Field(
        True, description="keep the log-probability of each answer token (capture checks with it)"
    )
    api_key_env: str | None = Field(
        None, description="name of the environment variable that holds the servers' API key"
    )
    attempts: int = Field(6, ge=1, description="times that a request is sent before its row waits for the next run")
    request_timeout_s: float = Field(1800, gt=0, description="longest time that one request may take")
    outage_limit_s: float = Field(600, gt=0, description="longest wait while no server answers, before the job stops")

    @field_validator("servers", mode="before")
    @classmethod
    def _is_a_number_or_auto(cls, value: Any) -> Any:
        if value != "auto" and (not isinstance(value, int) or value < 0):
            raise ValueError("has to be a number of servers, or auto")
        return value

    @field_validator("endpoints")
    @classmethod
    def _are_urls(cls, value: list[str]) -> list[str]:
        urls = [url.rstrip("/") for url in value]
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"'{url}' is not a URL; write http://HOST:PORT")
            if "@" in url:
                raise ValueError(
                    "holds a user or password, which would stand in logs, rows and reports; put a key into the "
                    "environment and name it in generate.api_key_env"
                )
        if len(set(urls)) != len(urls):
            raise ValueError("names a server twice; each has to be named once")
        return urls


class Audit(Section):
    boundary_ids: list[int] = Field(
        default_factory=list,
        description="token ids that the answer proper starts behind (</think>); a partition without any stops the job",
    )
    evidence_rows: int = Field(200, ge=1, description="rows of a partition before a finding about it may stop the job")
    loop_tokens: int = Field(
        64, ge=8, description="an answer that ends in at least this many repeated tokens counts as a loop"
    )


class Capture(Section):
    backend: Literal["transformers", "sglang"] = Field(
        "transformers", description="what runs the target: transformers, or a stock SGLang with this package's plugin"
    )
    layers: list[int] | None = Field(
        None, description="three HF hidden_states indices; [2, N//2, N-3] of the target's N layers where not given"
    )
    dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="what the target computes in; bfloat16 on GPUs and float32 on CPUs where not given"
    )
    storage: Literal["bf16", "fp8", "fp32"] = Field(
        "bf16", description="numbers that the cache keeps: of a token 8H, 4H + 16 or 16H bytes, and 4"
    )
    targets: int = Field(1, ge=1, description="copies of the target that capture at once")
    gpus_per_target: int = Field(0, ge=0, description="GPUs of each copy (SGLang: its tensor parallelism); 0 is a CPU")
    cpus_per_target: float = Field(1, gt=0, description="CPUs of each copy")
    batch_tokens: int = Field(8192, ge=1, description="tokens of a forward pass; less after running out of memory")
    shard_tokens: int = Field(65536, ge=1, description="tokens of a file of the cache, which is what a kill costs")
    endpoints: Names = Field(
        default_factory=list,
        description="SGLang servers with capture on, one for each target, on its node; started by us where not given",
    )
    server_args: Names = Field(default_factory=list, description="more arguments of the SGLang servers that we start")


class Train(Section):
    feed: Literal["stream", "cache"] = Field(
        "stream", description="states straight from the target, or from the files that jobs/capture.py wrote"
    )
    drafter: str | None = Field(None, description="folder of a published drafter to start from; from scratch if none")
    draft_vocab_size: int = Field(32000, ge=1, description="tokens that the drafter can propose")
    fc_norm: bool = Field(False, description="EAGLE-3.1: normalise each auxiliary state")
    norm_output: bool = Field(False, description="EAGLE-3.1: hand on the normalised state from step to step")
    epochs: int = Field(4, ge=1, description="passes over the sequences")
    learning_rate: float = Field(4e-4, gt=0, description="peak of a cosine with warm-up")
    warmup_share: float = Field(0.03, ge=0, lt=1, description="share of the steps in which the rate rises")
    ttt_steps: int = Field(7, ge=1, le=16, description="drafted tokens that training plays through")
    one_step_share: float = Field(0.4, ge=0, le=1, description="first share of the training with only one TTT step")
    columns_share: float = Field(
        0.25, gt=0, le=1, description="share of the positions, drawn anew each time, that play TTT steps 2 and on"
    )
    step_decay: float = Field(0.8, gt=0, le=1, description="weight of a TTT step relative to the one before it")
    loss: Literal["kl", "lk"] = Field(
        "kl", description="kl: cross entropy with the target's distribution; lk: acceptance rate, blended with it"
    )
    batch_tokens: int = Field(4096, ge=1, description="tokens of a forward and backward pass")
    step_tokens: int = Field(16384, ge=1, description="tokens of an optimiser step, over all workers")
    workers: int = Field(1, ge=1, description="training workers")
    gpus_per_worker: int = Field(0, ge=0, le=1, description="GPUs of each worker; 0 is a CPU")
    cpus_per_worker: float = Field(1, gt=0, description="CPUs, and threads, of each worker")
    strategy: Literal["ddp", "fsdp2"] = Field("ddp", description="a copy of the drafter on each worker, or a share")
    dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="what the drafter computes in; its weights are float32; bfloat16 on GPUs where not given"
    )
    heldout: float = Field(
        0.05, ge=0, lt=1, description="share of the prompts (of first turns, in conversations) that only validate"
    )
    validate_every: int = Field(50, ge=1, description="steps between validations")
    checkpoint_every: int = Field(50, ge=1, description="steps between checkpoints")
    patience: int | None = Field(
        None,
        ge=1,
        description="validations without a longer acceptance before training stops early; none: never",
    )
    restarts: int = Field(3, ge=0, description="times that training starts again after losing a worker")
    seed: int = Field(0, ge=0, description="of the order of the sequences and of a new drafter's weights")


class Evaluate(Section):
    prompts: Names = Field(default_factory=list, description="files, folders or globs of questions to measure with")
    drafters: Names = Field(
        default_factory=list, description="folders of drafters to measure; the run's own, new and trained, if not given"
    )
    limit: int | None = Field(None, ge=1, description="most questions of a file")
    max_new_tokens: int = Field(512, ge=1, description="longest answer, in tokens")
    steps: int = Field(5, ge=1, description="drafted tokens of a verify step, in a chain")
    concurrencies: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 8], min_length=1, description="requests in flight to measure speed with"
    )
    speed_prompts: int = Field(32, ge=1, description="questions of each measurement of speed")
    gpus: int = Field(0, ge=0, description="GPUs of the engine (tensor parallelism); 0 is a CPU")
    endpoints: Names = Field(
        default_factory=list, description="engines that run already, as DRAFTER=URL, none=URL without a drafter"
    )


class Config(Section):
    """Everything that a run is made of."""

    run: Run
    target: Target
    prompts: Prompts
    generate: Generate = Field(default_factory=Generate)
    audit: Audit = Field(default_factory=Audit)
    capture: Capture = Field(default_factory=Capture)
    train: Train = Field(default_factory=Train)
    evaluate: Evaluate = Field(default_factory=Evaluate)


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its pydantic field, in the order of the configuration."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def presets() -> dict[str, Path]:
    """The presets in this package: name to YAML file."""
    folder = Path(str(resources.files("eagle3_ray") / "presets"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load(source: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of `source`, a preset's name or a YAML file, with `dotted.key=value` overrides on top.

    Raises:
        ConfigError: unknown key, wrong value, missing file; all findings in one message.
    """
    tree = _read(source)
    for override in overrides:
        _apply(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(finding) for finding in error.errors())) from None
    except ValueError as error:  # a whole number of thousands of digits where a text belongs
        raise ConfigError(f"A value cannot be used: {error}.") from None


def _read(source: str) -> dict[str, Any]:
    path = presets().get(source, Path(source))
    try:
        there = path.is_file()
    except OSError:  # a name that is too long
        there = False
    if not there:
        raise ConfigError(f"'{source}' is neither a file nor a preset. Presets: {', '.join(presets())}.")
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, *_NO_YAML) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} has to hold sections such as 'run:' and 'target:'.")
    return {str(name): {} if section is None else section for name, section in tree.items()}  # `generate:` and no more


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"'{override}' is not of the form dotted.key=value.")
    *sections, name = key.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"'{key}' is not a known key: '{section}' has no keys of its own.")
        tree = inner
    try:
        parsed = yaml.safe_load(value)
    except _NO_YAML as error:
        raise ConfigError(f"{key}: '{value}' is not a YAML value: {error}") from None
    tree[name] = value if isinstance(parsed, datetime.date) else parsed  # run.dir=2026-11-30


def _explain(finding: Any) -> str:
    key = ".".join(str(part) for part in finding["loc"])
    if finding["type"] == "missing":
        needed = [name for name, field in keys() if field.is_required() and f"{name}.".startswith(f"{key}.")]
        return "\n".join(f"{name} is not set. Set it in the YAML file or as {name}=VALUE." for name in needed)
    if finding["type"] == "extra_forbidden":
        known = [*Config.model_fields, *(name for name, _ in keys())]
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
        return f"{key} is not a known key{f'; did you mean {near[0]}?' if near else '. --help lists them.'}"
    message = finding["msg"].removeprefix("Value error, ")
    return f"{key}={_shown(finding['input'])}: {message[0].lower()}{message[1:]}. --help tells what it means."


def _shown(value: Any) -> str:
    """The value as Python writes it, cut where it is large: YAML's aliases can make more of it than memory holds."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 3, 200, 200
    try:
        return re.sub(r"://[^/@]*@", "://…@", short.repr(value))  # a password in a URL
    except ValueError:  # a whole number of thousands of digits
        return type(value).__name__
