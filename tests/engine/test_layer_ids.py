"""SGLang's own `set_eagle3_layers_to_capture`, of every model class that has it, is run and held against ours.

The methods are taken out of the installed sources: to import the model files would ask for what a CPU install lacks.
"""

import ast
import builtins
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray.model_config import indices_of, keeps_ids, served_ids
from eagle3_ray.sglang_cpu import install

SETTER = "set_eagle3_layers_to_capture"
DEPTH = 61
LAYERS = [(2, 30, 58), (3, 15, 60), (2, 3, 4)]
DRAFTERS = ("NextN", "MTP", "Eagle", "Eagle3")
"""How the names of classes end that draft and are no targets."""
NOT_A_MODEL = "MindSporeForCausalLM"
"""No `architectures` of a config.json: it runs models of other classes."""
HANDED_ON = {
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    NOT_A_MODEL: "LlamaForCausalLM",
}
"""Wrappers, and the class of the language model that they hand the ids on to."""


class Stub:
    """Stands in for a model of DEPTH layers and for everything in it, and keeps what is to be captured."""

    def __init__(self) -> None:
        self.__dict__["found"] = None

    def __getattr__(self, name: str) -> Any:
        return {"num_hidden_layers": DEPTH, "layers_to_capture": self.found}.get(name, self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "layers_to_capture":
            self.__dict__["found"] = value

    def __call__(self) -> "Stub":
        return self

    def __len__(self) -> int:
        return DEPTH

    def __getitem__(self, layer: int) -> "Stub":
        return self

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.__dict__["found"] = ids


class Source:
    """The classes and imports of one of SGLang's model files."""

    def __init__(self, path: Path) -> None:
        body = ast.parse(path.read_text()).body
        self.classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        self.imports = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        self.served = [
            name.id
            for node in body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass"
            for name in ast.walk(node.value)
            if isinstance(name, ast.Name)
        ]


@cache
def sources() -> dict[str, Source]:
    """By module name."""
    [folder] = install().glob("lib/python3*/site-packages/sglang/srt/models")
    return {f"sglang.srt.models.{path.stem}": Source(path) for path in folder.glob("*.py")}


def setter_of(module: str, name: str) -> ast.FunctionDef | None:
    """The method of a class or of the first base that has it."""
    if (source := sources().get(module)) is None:
        return None
    if name not in source.classes:
        return setter_of(*source.imports[name]) if name in source.imports else None
    node = source.classes[name]
    own = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == SETTER), None)
    inherited = (setter_of(module, ast.unparse(base)) for base in node.bases)
    return own or next((found for found in inherited if found), None)


def captured(setter: ast.FunctionDef, ids: list[int]) -> tuple[int, ...]:
    """The indices that the method marks for capture, in the order of the layers."""
    stub = Stub()
    used = {node.id for node in ast.walk(setter) if isinstance(node, ast.Name)}
    scope: dict[str, Any] = dict.fromkeys(used - set(dir(builtins)), stub)
    postponed = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([postponed, setter], []))
    exec(compile(module, "sglang", "exec"), scope)
    scope[SETTER](stub, list(ids))
    return tuple(sorted(stub.found))


@pytest.fixture(scope="module")
def setters() -> dict[str, ast.FunctionDef]:
    """By the class that SGLang serves."""
    found = {
        name: setter
        for module, source in sources().items()
        for name in source.served
        if not name.endswith(DRAFTERS) and (setter := setter_of(module, name))
    }
    assert {name for name, setter in found.items() if captured(setter, [1, 8, 9]) == (1, 8, 9)} == HANDED_ON.keys()
    for wrapper, inner in HANDED_ON.items():
        found[wrapper] = found[inner]
    del found[NOT_A_MODEL]
    return found


def test_every_family_that_the_table_names_is_looked_at(setters: dict[str, ast.FunctionDef]) -> None:
    assert len(setters) >= 40
    kept = {name for name in setters if keeps_ids({"architectures": [name]})}
    assert kept == {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "GlmMoeDsaForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "MistralLarge3ForCausalLM",
    }
    assert setters.keys() - kept >= {
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
        "LongcatFlashForCausalLM",
        "Glm5NextForConditionalGeneration",
        "GptOssForCausalLM",
    }


@pytest.mark.parametrize("layers", LAYERS)
def test_the_ids_of_every_class_capture_the_layers(
    setters: dict[str, ast.FunctionDef], layers: tuple[int, ...]
) -> None:
    asked = {name: served_ids(layers, keeps_ids({"architectures": [name]})) for name in setters}
    assert {name: captured(setter, asked[name]) for name, setter in setters.items()} == dict.fromkeys(setters, layers)


@pytest.mark.parametrize("ids", [[1, 29, 57], [2, 30, 58], [30, 58, 1], [0, 5, 9]])
def test_published_ids_mean_to_every_class_what_we_read(setters: dict[str, ast.FunctionDef], ids: list[int]) -> None:
    read = {name: indices_of(ids, keeps_ids({"architectures": [name]})) for name in setters}
    assert {name: captured(setter, ids) for name, setter in setters.items()} == read
