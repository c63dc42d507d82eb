"""One configuration: presets, YAML files and overrides, and what a wrong one says."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_ray.config import ConfigError, keys, load, presets

MINIMAL = {"run": {"dir": "/runs/a"}, "target": {"model": "/models/m"}, "prompts": {"path": "/data"}}

FIXED_NAMES = [
    *("run.dir", "target.model", "prompts.path", "prompts.partitions", "prompts.limit", "prompts.max_tokens_total"),
    *("prompts.dedupe", "generate.endpoints", "generate.max_in_flight", "generate.max_new_tokens"),
    *("generate.temperature", "generate.top_p", "generate.samples_per_prompt", "generate.record_logprobs"),
    "generate.api_key_env",
]


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    return _write(tmp_path, MINIMAL)


def _write(folder: Path, tree: Any) -> str:
    path = folder / "config.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return str(path)


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("name", ["smollm2-cpu", "kimi-k2.5-8xblackwell"])
def test_the_promised_presets_are_in_the_package(name: str) -> None:
    assert name in presets()


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_loads_and_keeps_each_value_of_its_file(name: str) -> None:
    config = load(name)
    for section, values in yaml.safe_load(presets()[name].read_text()).items():
        for key, value in values.items():
            got = _value(config, f"{section}.{key}")
            if isinstance(value, str) and value.startswith("~"):
                assert got == str(Path.home() / value[2:])
            elif (section, key) == ("run", "dir"):
                assert got == str(Path.cwd() / value)
            else:
                assert got == value


def test_kimi_is_preset_with_its_end_of_thinking_token_as_the_answer_boundary() -> None:
    assert load("kimi-k2.5-8xblackwell").audit.boundary_ids == [163607]


@pytest.mark.parametrize("name", FIXED_NAMES)
def test_the_fixed_names_are_keys(name: str) -> None:
    assert name in dict(keys())


def test_every_key_has_a_meaning_and_the_keys_are_those_of_a_loaded_configuration(minimal: str) -> None:
    assert all(field.description for _, field in keys())
    dumped = load(minimal).model_dump()
    assert [name for name, _ in keys()] == [f"{section}.{key}" for section in dumped for key in dumped[section]]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("generate.temperature=0", "generate.temperature", 0.0),
        ("generate.temperature=1.25", "generate.temperature", 1.25),
        ("generate.max_new_tokens=17", "generate.max_new_tokens", 17),
        ("generate.record_logprobs=false", "generate.record_logprobs", False),
        ("generate.api_key_env=SGLANG_KEY", "generate.api_key_env", "SGLANG_KEY"),
        ("generate.request_timeout_s=1e3", "generate.request_timeout_s", 1000.0),
        ("generate.endpoints=http://a:1,http://b:2/", "generate.endpoints", ["http://a:1", "http://b:2"]),
        ("generate.endpoints=[http://a:1]", "generate.endpoints", ["http://a:1"]),
        ("prompts.partitions=B1_glaive, B2", "prompts.partitions", ["B1_glaive", "B2"]),
        ("prompts.limit=5", "prompts.limit", 5),
        ("prompts.limit=null", "prompts.limit", None),
        ("prompts.dedupe=no", "prompts.dedupe", False),
        ("prompts.path=s3://bucket/a=b", "prompts.path", "s3://bucket/a=b"),
        ("run.mirror=s3://b/a?scheme=http&region=x", "run.mirror", "s3://b/a?scheme=http&region=x"),
        ("run.mirror=/runs/a-copy", "run.mirror", "/runs/a-copy"),
        ("audit.boundary_ids=[7, 8]", "audit.boundary_ids", [7, 8]),
    ],
)
def test_an_override_has_the_type_of_its_key(minimal: str, override: str, key: str, value: Any) -> None:
    got = _value(load(minimal, [override]), key)
    assert got == value
    assert type(got) is type(value)


def test_the_last_override_of_a_key_counts_and_overrides_beat_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, {**MINIMAL, "generate": {"top_p": 0.5, "temperature": 0.1}})
    config = load(path, ["generate.top_p=0.6", "generate.top_p=0.7"])
    assert (config.generate.top_p, config.generate.temperature) == (0.7, 0.1)


def test_an_empty_section_is_all_defaults(tmp_path: Path) -> None:
    path = _write(tmp_path, yaml.safe_dump(MINIMAL) + "generate:\n  # temperature: 1\n")
    assert load(path) == load(_write(tmp_path, MINIMAL))
    path = _write(tmp_path, yaml.safe_dump(MINIMAL) + "generate:\n")
    assert load(path, ["generate.temperature=1"]).generate.temperature == 1.0


def test_a_relative_run_dir_becomes_absolute(minimal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(minimal, ["run.dir=runs/x"]).run.dir == f"{tmp_path}/runs/x"
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load(minimal, ["run.dir=~/x"]).run.dir == "/home/somebody/x"
    assert load(minimal, ["target.model=~/m"]).target.model == "/home/somebody/m"
    assert load(minimal, ["target.model=org/name"]).target.model == "org/name"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("generate.temprature", "generate.temperature"),
        ("generate.max_inflight", "generate.max_in_flight"),
        ("prompts.dedup", "prompts.dedupe"),
        ("target.modle", "target.model"),
        ("genrate.top_p", "generate"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_name(minimal: str, key: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(minimal, [f"{key}=1"])
    assert f"did you mean {nearest}?" in str(error.value)
    assert key.split(".")[0] in str(error.value)


def test_an_unknown_key_in_a_file_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generate\.topp is not a known key; did you mean generate\.top_p\?"):
        load(_write(tmp_path, {**MINIMAL, "generate": {"topp": 0.5}}))


def test_a_key_that_is_near_nothing_points_to_help(minimal: str) -> None:
    with pytest.raises(ConfigError, match=r"zzzz is not a known key\. --help lists them\."):
        load(minimal, ["zzzz=1"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("generate.temperature=3", ["generate.temperature=3", "less than or equal to 2", "--help"]),
        ("generate.temperature=-1", ["generate.temperature=-1", "greater than or equal to 0"]),
        ("generate.temperature=.nan", ["generate.temperature=nan"]),
        ("generate.temperature=hot", ["generate.temperature='hot'", "valid number"]),
        ("generate.top_p=0", ["generate.top_p=0", "greater than 0"]),
        ("generate.max_new_tokens=0", ["generate.max_new_tokens=0", "greater than or equal to 1"]),
        ("generate.max_new_tokens=1.5", ["generate.max_new_tokens=1.5", "integer"]),
        ("generate.samples_per_prompt=none", ["generate.samples_per_prompt='none'", "integer"]),
        ("prompts.limit=0", ["prompts.limit=0", "greater than or equal to 1"]),
        ("prompts.dedupe=perhaps", ["prompts.dedupe='perhaps'", "boolean"]),
        ("generate.endpoints=h1:30000", ["generate.endpoints", "'h1:30000' is not a URL", "http://HOST:PORT"]),
        ("generate.endpoints=http://a:1,http://a:1/", ["generate.endpoints", "names a server twice"]),
        ("run.dir=s3://bucket/run", ["run.dir='s3://bucket/run'", "every node mounts"]),
        ("run.dir=runs/lr=1e-4[2]", ["run.dir='runs/lr=1e-4[2]'", "holds = and [, which readers of Parquet"]),
        ("train.loss=tv", ["train.loss='tv': input should be 'kl' or 'lk'. --help tells what it means."]),
        (
            "run.mirror=hdfs://host/run",
            ["run.mirror='hdfs://host/run'", "gs://BUCKET/PATH or a folder"],
        ),
        ("run.mirror=s3://KEY:secret@bucket/run", ["run.mirror='s3://…@bucket/run'", "put keys into the environment"]),
        ("run.mirror=/runs/a/copy", ["run.mirror='/runs/a/copy'", "inside run.dir"]),
        ("audit.boundary_ids=[a]", ["audit.boundary_ids.0='a'", "integer"]),
        ("run=/runs/a", ["run='/runs/a'"]),
        ("run.dir.x=1", ["'run.dir.x' is not a known key", "'dir' has no keys of its own"]),
        ("generate.temperature", ["'generate.temperature' is not of the form dotted.key=value"]),
        ("generate.endpoints=[http://a", ["generate.endpoints", "is not a YAML value"]),
        ("run.dir=2026-13-45", ["run.dir", "is not a YAML value", "month must be in 1..12"]),
        ("run.dir=!!int x", ["run.dir", "is not a YAML value"]),
        ("run.dir=~no-such-user/runs", ["run.dir='~no-such-user/runs'", "home of a user who is not here"]),
        ("target.model=~no-such-user/m", ["target.model='~no-such-user/m'", "home of a user who is not here"]),
        ("run.dir=0x" + "f" * 5000, ["cannot be used", "4300 digits"]),
        ("capture.layers=0x" + "f" * 5000, ["capture.layers=int"]),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_what_is_wrong(
    minimal: str, override: str, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load(minimal, [override])
    for part in said:
        assert part in str(error.value)


def test_all_findings_stand_in_one_message(minimal: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(minimal, ["generate.temperature=9", "generate.topp=1", "prompts.limit=-3"])
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert [line.split("=")[0].split()[0] for line in sorted(lines)] == [
        "generate.temperature",
        "generate.topp",
        "prompts.limit",
    ]


@pytest.mark.parametrize(
    ("tree", "missing"),
    [
        ({**MINIMAL, "target": {}}, ["target.model"]),
        ({"target": {"model": "m"}, "prompts": {"path": "p"}}, ["run.dir"]),
        ({}, ["prompts.path", "run.dir", "target.model"]),
    ],
)
def test_what_is_not_set_is_named_by_the_key_that_sets_it(tmp_path: Path, tree: Any, missing: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(_write(tmp_path, tree))
    assert sorted(str(error.value).splitlines()) == [
        f"{key} is not set. Set it in the YAML file or as {key}=VALUE." for key in missing
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "cannot be read as YAML"),
        ("- a\n- b\n", "has to hold sections"),
        ("just text", "has to hold sections"),
    ],
)
def test_a_file_that_holds_no_configuration_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(_write(tmp_path, text))


def test_a_name_too_long_for_a_file_is_no_preset() -> None:
    with pytest.raises(ConfigError, match="is neither a file nor a preset"):
        load("x" * 5000)


def test_a_source_that_does_not_exist_is_answered_with_the_presets() -> None:
    with pytest.raises(ConfigError) as error:
        load("smollm2_cpu")
    assert "'smollm2_cpu' is neither a file nor a preset" in str(error.value)
    assert all(name in str(error.value) for name in presets())
