"""What the target's files say, and that every change to them is seen."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray.target.files import TargetError, resolve
from tests.tiny_target import END_OF_TEXT, IM_END, VOCAB_SIZE

MIB = 1 << 20


@pytest.fixture
def folder(target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(target, tmp_path / "model"))


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_model_folder_resolves_to_itself_without_its_weights(target: Path) -> None:
    files = resolve(str(target))
    assert files.folder == target
    assert files.vocab_size == VOCAB_SIZE
    assert files.config["architectures"] == ["LlamaForCausalLM"]
    assert files.fingerprint()["target.weights"] is None


def test_a_nested_language_model_tells_the_vocabulary_size(folder: Path) -> None:
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"vocab_size": 163840}}
    (folder / "config.json").write_text(json.dumps(config))
    assert resolve(str(folder)).vocab_size == 163840


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        ({"eos_token_id": [7, 3, 7]}, {"eos_token_id": 1}, [3, 7]),
        ({"eos_token_id": 0}, {"eos_token_id": 1}, [0]),
        ({"eos_token_id": None}, {"eos_token_id": 1}, [1]),
        ({}, {"eos_token_id": [5, 4]}, [4, 5]),
        (None, {"eos_token_id": 1}, [1]),
        (None, {"text_config": {"vocab_size": 9, "eos_token_id": 6}, "eos_token_id": 1}, [6]),
        (None, {"text_config": {"vocab_size": 9}, "eos_token_id": 1}, [1]),
        (None, {"eos_token_id": None}, []),
    ],
)
def test_stop_tokens_come_from_the_generation_config_and_else_from_the_config(
    folder: Path, generation: dict[str, Any] | None, config: dict[str, Any], stops: list[int]
) -> None:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 10, **config}))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert resolve(str(folder)).stop_ids() == stops


def test_the_stop_tokens_of_the_tiny_target_are_both_of_its_ends(target: Path) -> None:
    assert resolve(str(target)).stop_ids() == [END_OF_TEXT, IM_END]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "has no config.json, so it is no model folder"),
        ("config.json", '{"architectures": []}', "does not tell vocab_size"),
        ("config.json", '{"vocab_size"', "is damaged"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(folder: Path, name: str, content: str | None, said: str) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(TargetError, match=said) as error:
        resolve(str(folder))
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "not a name!", "org/model"])
def test_a_name_that_is_neither_folder_nor_reachable_is_refused_with_the_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TargetError) as error:
        resolve(name)
    assert f"target.model={name}" in str(error.value)
    assert "Set target.model to a folder that holds config.json and the tokenizer." in str(error.value)


def test_a_hash_is_the_sha256_of_names_and_contents(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")
    hashes = resolve(str(folder)).fingerprint()
    for field, names in {
        "target.tokenizer": ["tokenizer.json"],
        "target.tokenizer_settings": ["tokenizer_config.json"],
        "target.chat_template": ["chat_template.jinja"],
        "target.config": ["config.json"],
        "target.weights": ["model.safetensors"],
    }.items():
        content = b"".join(name.encode() + (folder / name).read_bytes() for name in names)
        assert hashes[field] == hashlib.sha256(content).hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("tokenizer.json", "target.tokenizer"),
        ("tiktoken.model", "target.tokenizer"),
        ("tokenizer_config.json", "target.tokenizer_settings"),
        ("tokenization_kimi.py", "target.tokenizer_settings"),
        ("chat_template.jinja", "target.chat_template"),
        ("config.json", "target.config"),
        ("model-00001-of-00002.safetensors", "target.weights"),
    ],
)
def test_one_changed_byte_in_any_file_changes_just_its_field(folder: Path, name: str, field: str) -> None:
    (folder / name).touch()
    before = resolve(str(folder)).fingerprint()
    with (folder / name).open("ab") as file:
        file.write(b" ")
    after = resolve(str(folder)).fingerprint()
    assert [key for key in before if before[key] != after[key]] == [field]


def test_a_copy_in_another_folder_has_the_same_fingerprint(target: Path, folder: Path) -> None:
    assert resolve(str(folder)).fingerprint() == resolve(str(target)).fingerprint()


@pytest.mark.parametrize("place", [0, MIB - 1, 2 * MIB + 5, 3 * MIB + 4])
def test_a_change_at_either_end_of_a_large_weight_file_is_seen(folder: Path, place: int) -> None:
    weights = bytearray(3 * MIB + 5)
    path = folder / "model.safetensors"
    path.write_bytes(weights)
    before = resolve(str(folder)).fingerprint()["target.weights"]
    weights[place] = 1
    path.write_bytes(weights)
    assert resolve(str(folder)).fingerprint()["target.weights"] != before


def test_a_longer_weight_file_with_equal_ends_is_another_one(folder: Path) -> None:
    hashes = set()
    for size in (3 * MIB, 3 * MIB + 1):
        (folder / "model.safetensors").write_bytes(bytes(size))
        hashes.add(resolve(str(folder)).fingerprint()["target.weights"])
    assert len(hashes) == 2
