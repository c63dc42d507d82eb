"""What strangers' files and prompts may not do: run code, leave the run directory, or show a secret."""

import ast
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_ray import checkpoints
from eagle3_ray.config import ConfigError, Evaluate, Target, load, presets
from eagle3_ray.drafter.checkpoints import CheckpointError, load_drafter
from eagle3_ray.evaluate import EvaluateSettings
from eagle3_ray.plan import PlanSettings, Render
from eagle3_ray.prompts import find
from eagle3_ray.rendering import Renderer
from eagle3_ray.runs import RunError
from eagle3_ray.target.files import TargetError
from eagle3_ray.target.parts import load_parts
from tests.tiny_target import make_tiny_target

PACKAGE = Path(__file__).resolve().parents[2] / "eagle3_ray"


class _Malice:
    """A pickle that leaves a file where it is read."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._trace),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "drafter.pt"])
@pytest.mark.parametrize("layout", ["pickle", "torch"])
def test_a_drafter_whose_pickle_would_run_code_is_refused_and_runs_none(tmp_path: Path, name: str, layout: str) -> None:
    target = json.loads((make_tiny_target(tmp_path / "target") / "config.json").read_text())
    folder, trace = tmp_path / "drafter", tmp_path / "owned"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(target | {"architectures": ["LlamaForCausalLMEagle3"]} | ONE_LAYER))
    if layout == "pickle":
        (folder / name).write_bytes(pickle.dumps({"fc.weight": _Malice(trace)}))
    else:
        torch.save({"fc.weight": _Malice(trace)}, folder / name)
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        load_drafter(folder, target)
    assert not trace.exists()


ONE_LAYER = {"num_hidden_layers": 1}


def test_a_checkpoint_of_a_run_whose_pickle_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    """With a sound hash: whoever can write the folder can write that, too."""
    trace = tmp_path / "owned"
    checkpoints.save(tmp_path / "checkpoints", 3, "plan", {"model": _Malice(trace)}, best=True)
    found = checkpoints.latest(tmp_path / "checkpoints", "plan")
    assert found is not None
    with pytest.raises(RunError, match=r"00000003.* goes on from an earlier one"):
        found.load()
    assert not trace.exists()


def test_the_best_checkpoint_is_one_of_the_run_wherever_its_link_leads(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run" / "checkpoints", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        checkpoints.save(place, 3, "plan", {"best": 1.0}, best=True)
    for leads in (str(elsewhere / "00000003"), "../../elsewhere/00000003", "..", "/"):
        (folder / "best").unlink()
        (folder / "best").symlink_to(leads)
        assert checkpoints.best(folder, "plan") is None
    assert (elsewhere / "00000003" / "state.pt").exists()


def test_an_index_of_weights_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "target")
    for file in ("../secret.safetensors", "/etc/passwd", "a/../../b", 3):
        index = {"weight_map": {"model.embed_tokens.weight": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(TargetError, match="names no files of its folder"):
            load_parts(folder, torch.float32)


def test_nothing_of_ours_reads_a_pickle_or_evaluates_text() -> None:
    """`torch.load` only with `weights_only=True`; `trust_remote_code` never as a constant."""
    told = {"weights_only", "shell", "trust_remote_code"}
    forbidden = {"eval", "exec", "compile", "__import__", "pickle.load", "pickle.loads", "yaml.load", "os.system"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                words = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg in told}
                assert name not in forbidden, f"{path}:{node.lineno} {name}"
                assert name != "torch.load" or words.get("weights_only") == "True", f"{path}:{node.lineno}"
                assert words.get("shell") != "True", f"{path}:{node.lineno}"
                assert words.get("trust_remote_code", "") not in ("True", "1"), f"{path}:{node.lineno}"


def test_code_that_comes_with_a_model_runs_only_where_it_is_said(tmp_path: Path) -> None:
    """The default of every setting is no, and a tokenizer with code of its own is refused without running it."""
    assert not load("smollm2-cpu").target.trust_remote_code
    assert {name for name in presets() if load(name).target.trust_remote_code} == {"kimi-k2.5-8xblackwell"}
    assert not PlanSettings([], "t", {}, 1).trust_remote_code
    folder, trace = make_tiny_target(tmp_path / "target"), tmp_path / "owned"
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(trace)!r})\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        Renderer(folder)
    assert not trace.exists()


@pytest.mark.parametrize("tag", ["python/object/apply:os.mkdir", "python/object/new:os.mkdir", "python/name:os.mkdir"])
def test_yaml_that_asks_for_python_is_refused_and_runs_none(tmp_path: Path, tag: str) -> None:
    trace = tmp_path / "owned"
    path = tmp_path / "config.yaml"
    path.write_text(f"run:\n  dir: !!{tag} [{trace}]\n")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load(str(path))
    with pytest.raises(ConfigError, match="is not a YAML value"):
        load("smollm2-cpu", [f"run.dir=!!{tag} [{trace}]"])
    assert not trace.exists()


def test_aliases_of_yaml_that_would_fill_the_memory_end_in_a_short_message(tmp_path: Path) -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join([*lines, "run: *a11", "capture: {layers: *a11}"]))
    with pytest.raises(ConfigError) as error:
        load(str(path))
    assert len(str(error.value)) < 20_000


@pytest.mark.parametrize("name", ["../../x.jsonl", "..", "a/b.jsonl", "/etc/passwd", "a\0b", "<script>"])
def test_the_id_of_a_prompt_is_only_a_name(tmp_path: Path, name: str) -> None:
    raw = json.dumps({"id": name, "input_ids": [7]}).encode()
    row = Render(PlanSettings([], "/no/tokenizer", {}, 400))._row("../../p", "f", 1, raw)
    assert (row["prompt_id"], row["partition"], row.get("reason")) == (name, "../../p", None)
    assert list(tmp_path.iterdir()) == []


def test_a_partition_has_the_name_of_one_file_or_folder(tmp_path: Path) -> None:
    """So no name holds a slash or is `..`, whatever a path or a link says."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.jsonl").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "round").symlink_to(tmp_path / "real")
    for path in (f"{tmp_path}/real/../link", f"{tmp_path}/link/a.jsonl", f"{tmp_path}/real/../*/a.jsonl"):
        for source in find(path):
            assert "/" not in source.partition
            assert source.partition not in ("", ".", "..")


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match=r"generate\.api_key_env") as error:
        load("smollm2-cpu", ["generate.endpoints=http://user:hunter2@h:30000"])
    assert "hunter2" not in str(error.value)


def test_settings_that_hold_a_key_do_not_print_it() -> None:
    assert "hunter2" not in repr(EvaluateSettings(Evaluate(), Target(model="t"), api_key="hunter2"))
