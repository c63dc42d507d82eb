"""Each way to break a drafter that works is named by its cause. The drafter is trained here, on a small target."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_ray.acceptance.changes import Evidence, Recorded
from eagle3_ray.acceptance.diagnosis import check_engine, diagnose_folder, examine, is_suspicious
from eagle3_ray.acceptance.engine import EngineInfo, Served
from eagle3_ray.acceptance.folder import Finding, inspect_folder
from eagle3_ray.acceptance.questions import EvalPrompt
from eagle3_ray.acceptance.replay import replay
from eagle3_ray.drafter.checkpoints import load_drafter
from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.packed import PackedBatch
from eagle3_ray.drafter.rollout import TargetHead, rollout
from eagle3_ray.target.files import TargetError, TargetFiles
from eagle3_ray.target.protocol import States, TokenSequence

LAYERS, STEPS = (2, 3, 4), 3
REPLAYED = 8  # of the 24 sequences that the drafter is trained on: a diagnosis replays them up to 14 times
TARGET: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 60,
    "rope_theta": 500.0,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class World:
    folder: Path  # of a drafter that works
    evidence: Evidence
    length: float  # its replayed acceptance length


def make_target(seed: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**TARGET)).eval()


Said = tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]
"""Token ids, the hidden states of all layers and the last ones, of all sequences."""


def say(target: Any) -> Said:
    """Greedy answers of 30 tokens to 24 prompts of 3 tokens, and the target's states."""
    prompts = torch.randint(60, (24, 3), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ids = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=30, do_sample=False)
        out = target.model(ids, output_hidden_states=True)
    return ids, out.hidden_states, out[0]


def record(said: Said, layers: tuple[int, ...]) -> Recorded:
    ids, hidden, last = said
    aux_hidden = torch.cat([hidden[layer] for layer in layers], dim=-1)
    return [
        (TokenSequence(str(n), ids[n].numpy().astype(np.int32), 3), States(str(n), aux_hidden[n], last[n]))
        for n in range(len(ids))
    ]


def make_evidence(target: Any) -> Evidence:
    embed = target.get_input_embeddings().weight.detach()
    said = say(target)
    return Evidence(TARGET, embed, lambda layers: record(said, layers)[:REPLAYED], STEPS)


def train(target: Any, recorded: Recorded, rounds: int = 110) -> Eagle3Drafter:
    torch.manual_seed(1)
    drafter = Eagle3Drafter(DrafterConfig.from_target(TARGET, LAYERS, 50, norm_output=True))
    counts = torch.bincount(torch.cat([torch.from_numpy(s.ids).long() for s, _ in recorded]), minlength=60)
    ids = counts.argsort(descending=True, stable=True)[:50].sort().values
    drafter.d2t.copy_(ids - torch.arange(50))
    drafter.t2d.zero_()[ids] = True
    drafter.lm_head.weight.data.copy_(target.lm_head.weight.data[ids])
    batch = PackedBatch(
        torch.cat([torch.from_numpy(s.ids).long() for s, _ in recorded]),
        torch.cat([states.aux_hidden for _, states in recorded]),
        torch.cat([states.last_hidden for _, states in recorded]),
        torch.arange(len(recorded) + 1) * 33,
        torch.tensor(([False] * 3 + [True] * 30) * len(recorded)),
    )
    head = TargetHead(target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach())
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(rounds):
        result = rollout(drafter, batch, head, ttt_steps=STEPS)
        (result.loss / result.step_counts[0]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()
    return drafter.eval()


def write(drafter: Eagle3Drafter, folder: Path) -> Path:
    folder.mkdir()
    tensors = {name: t.contiguous() for name, t in drafter.state_dict().items() if name != "aux_scale"}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(drafter.config.to_json()))
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    target = make_target(0)
    evidence = make_evidence(target)
    recorded = evidence.at_layers(LAYERS)
    folder = write(train(target, record(say(target), LAYERS)), tmp_path_factory.mktemp("world") / "drafter")
    drafter = load_drafter(folder, TARGET)
    length = replay(drafter, evidence.embed_tokens, recorded, STEPS).length
    assert length is not None
    assert length > 1.8, "else there is nothing to lose by sabotage"
    return World(folder, evidence, length)


@pytest.fixture
def break_it(world: World, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the drafter, with changed config fields and tensors."""

    def break_it(
        config: dict[str, Any] | None = None, tensors: Callable[[dict[str, torch.Tensor]], Any] | None = None
    ) -> Path:
        folder = tmp_path / "broken"
        folder.mkdir()
        held = load_file(world.folder / "model.safetensors")
        if tensors:
            tensors(held)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "model.safetensors")
        written = json.loads((world.folder / "config.json").read_text()) | (config or {})
        (folder / "config.json").write_text(json.dumps(written))
        return folder

    return break_it


def diagnosed(folder: Path, evidence: Evidence, served: float | None, expected: float | None) -> list[Finding]:
    return diagnose_folder(folder, TARGET, served, expected, lambda: evidence)


def causes(world: World, folder: Path) -> list[str]:
    findings = diagnosed(folder, world.evidence, 1.0, world.length)
    print(*findings, sep="\n")
    return [finding.cause for finding in findings]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), TargetError("own code"), ValueError("requires accelerate")]
)
def test_a_target_that_cannot_be_loaded_is_told_and_costs_no_measurement(world: World, error: Exception) -> None:
    def gather() -> Evidence:
        raise error

    [finding] = diagnose_folder(world.folder, TARGET, 1.0, world.length, gather)
    assert finding.cause == "unknown"
    assert str(error) in finding.evidence


def test_a_drafter_that_works_on_the_targets_states_but_not_in_the_engine_is_a_matter_of_serving(world: World) -> None:
    assert diagnosed(world.folder, world.evidence, None, world.length) == []
    [finding] = diagnosed(world.folder, world.evidence, 1.0, world.length)
    assert finding.cause == "serving"
    assert f"accepts {world.length:.2f} tokens a step when replayed" in finding.evidence


def test_a_map_that_holds_absolute_ids_is_named(world: World, break_it: Callable[..., Path]) -> None:
    def absolute(held: dict[str, torch.Tensor]) -> None:
        held["d2t"] += torch.arange(50)

    assert causes(world, break_it(tensors=absolute)) == ["vocabulary map"]


def test_a_map_of_other_rows_is_named_though_it_is_consistent_in_itself(
    world: World, break_it: Callable[..., Path]
) -> None:
    def other(held: dict[str, torch.Tensor]) -> None:
        ids = torch.arange(50) + torch.arange(50) // 25 * 5  # as good a map as any, but not that of lm_head's rows
        held["d2t"] = ids - torch.arange(50)
        held["t2d"] = torch.zeros(60, dtype=torch.bool).index_fill(0, ids, True)

    folder = break_it(tensors=other)
    assert inspect_folder(folder, TARGET) == []
    assert causes(world, folder) == ["vocabulary map"]


def test_a_map_whose_two_halves_disagree_is_named_without_running_anything(
    world: World, break_it: Callable[..., Path]
) -> None:
    def disagree(held: dict[str, torch.Tensor]) -> None:
        held["t2d"] = held["t2d"].roll(1)

    [finding] = inspect_folder(break_it(tensors=disagree), TARGET)
    assert finding.cause == "vocabulary map"


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1)])
def test_swapped_layers_are_named_with_the_order_that_works(
    world: World, break_it: Callable[..., Path], order: tuple[int, int, int]
) -> None:
    def swap(held: dict[str, torch.Tensor]) -> None:
        thirds = held["fc.weight"].chunk(3, dim=1)
        held["fc.weight"] = torch.cat([thirds[i] for i in order], dim=1)

    [finding] = diagnosed(break_it(tensors=swap), world.evidence, 1.0, world.length)
    assert finding.cause == "layer ids"
    assert f"in the order {[LAYERS[i] for i in order]} instead of [2, 3, 4]" in finding.evidence


def test_layer_ids_that_do_not_rise_are_named_without_running_anything(break_it: Callable[..., Path]) -> None:
    eagle = {"eagle_aux_hidden_state_layer_ids": [3, 1, 2], "use_aux_hidden_state": True}
    assert [f.cause for f in inspect_folder(break_it({"eagle_config": eagle}), TARGET)] == ["layer ids"]


def test_layers_named_in_another_convention_are_named(world: World, break_it: Callable[..., Path]) -> None:
    eagle = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4], "use_aux_hidden_state": True}  # SGLang: outputs of these
    folder = break_it({"eagle_config": eagle})
    [finding] = diagnosed(folder, world.evidence, 1.0, world.length)
    assert finding.cause == "layer ids"
    assert "Capturing layers [2, 3, 4] instead of [3, 4, 5]" in finding.evidence


def test_a_flipped_norm_output_is_named(world: World, break_it: Callable[..., Path]) -> None:
    assert causes(world, break_it({"norm_output": False})) == ["norm_output"]


def test_fc_norm_without_its_tensors_is_named(world: World, break_it: Callable[..., Path]) -> None:
    assert causes(world, break_it({"fc_norm": True})) == ["fc_norm"]


def test_a_missing_fc_is_named(world: World, break_it: Callable[..., Path]) -> None:
    folder = break_it(tensors=lambda held: held.pop("fc.weight"))
    [finding] = diagnosed(folder, world.evidence, 1.0, world.length)
    assert finding.cause == "missing tensor"
    assert "lacks fc.weight" in finding.evidence


def test_a_lost_rope_theta_is_named(world: World, break_it: Callable[..., Path]) -> None:
    lost = {"rope_theta": None, "rope_parameters": None, "rope_scaling": None}
    assert causes(world, break_it(lost)) == ["rope"]


def test_another_target_of_the_same_sizes_is_named(world: World) -> None:
    other = make_evidence(make_target(7))
    [finding] = diagnosed(world.folder, other, 1.0, world.length)
    assert finding.cause == "other target"
    assert f"training said {world.length:.2f}" in finding.evidence


def test_without_a_training_figure_a_drafter_of_another_target_looks_like_an_untrained_one(
    world: World, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    fresh = write(Eagle3Drafter(DrafterConfig.from_target(TARGET, LAYERS, 50)), tmp_path / "fresh")
    [finding] = diagnosed(fresh, world.evidence, 1.0, None)
    assert finding.cause == "untrained or other target"


def test_another_target_of_other_sizes_is_named_by_them(world: World) -> None:
    [finding] = inspect_folder(world.folder, TARGET | {"hidden_size": 48})
    assert finding.cause == "other target"
    assert "hidden_size 32 (target 48)" in finding.evidence


def info(**fields: Any) -> EngineInfo:
    return replace(EngineInfo("EAGLE3", "/models/drafter", 5, 1, "/models/target", "bfloat16", "0.5.23"), **fields)


def test_the_older_algorithm_is_named() -> None:
    [finding] = check_engine(info(algorithm="EAGLE"), Path("/runs/drafter"), 5)
    assert finding.cause == "algorithm"
    assert "runs --speculative-algorithm EAGLE;" in finding.evidence
    [finding] = check_engine(info(algorithm=None), Path("/runs/drafter"), 5)
    assert "decodes without a drafter" in finding.evidence


def test_a_server_of_another_drafter_or_chain_is_named_and_the_right_one_is_not() -> None:
    assert check_engine(info(), Path("/runs/drafter"), 5) == []
    findings = check_engine(info(draft_model="/models/old", steps=3), Path("/runs/drafter"), 5)
    assert [finding.cause for finding in findings] == ["other drafter", "other chain"]


@pytest.fixture(scope="module")
def target_files(tmp_path_factory: pytest.TempPathFactory) -> TargetFiles:
    folder = tmp_path_factory.mktemp("target")
    make_target(0).save_pretrained(folder)
    return TargetFiles("target", folder, json.loads((folder / "config.json").read_text()))


def answers(world: World) -> list[Served]:
    """What the plain engine would have answered."""
    ids = [sequence.ids.tolist() for sequence, _ in world.evidence.at_layers(LAYERS)]
    return [
        Served(EvalPrompt("set", "", str(n), 0, tuple(s[:3])), tuple(s[3:]), "length", None) for n, s in enumerate(ids)
    ]


def test_a_served_figure_is_followed_up_on_the_served_answers(
    world: World, break_it: Callable[..., Path], target_files: TargetFiles
) -> None:
    broken = break_it({"norm_output": False})
    served = info(draft_model=str(broken), steps=STEPS)
    [finding] = examine(served, broken, 1.0, world.length, target_files, answers(world), STEPS)
    assert finding.cause == "norm_output"
    assert examine(served, broken, world.length, world.length, target_files, answers(world), STEPS) == []
    [finding] = examine(replace(served, algorithm="EAGLE"), broken, 1.0, None, target_files, answers(world), STEPS)
    assert finding.cause == "algorithm"


def test_where_nothing_can_be_replayed_the_figure_is_said_to_be_unknown(
    world: World, target_files: TargetFiles, tmp_path: Path
) -> None:
    served = info(draft_model=str(world.folder), steps=STEPS)
    [finding] = examine(served, world.folder, 1.0, None, replace(target_files, folder=tmp_path), answers(world), STEPS)
    assert (finding.cause, "are not there" in finding.evidence) == ("unknown", True)
    [finding] = examine(served, world.folder, 1.0, None, target_files, [], STEPS)
    assert (finding.cause, "No answer is long enough" in finding.evidence) == ("unknown", True)


def test_a_folder_that_holds_no_drafter_is_named_and_raises_nothing(target_files: TargetFiles, tmp_path: Path) -> None:
    [finding] = examine(info(draft_model=str(tmp_path)), tmp_path, 1.0, None, target_files, [], 5)
    assert finding.cause == "files"
    assert "has no config.json" in finding.evidence


def test_exactly_one_nothing_at_all_and_far_below_training_are_suspicious() -> None:
    assert [is_suspicious(served, 2.0) for served in (None, 1.0, 1.59, 1.61)] == [True, True, True, False]
    assert [is_suspicious(served, None) for served in (1.0, 1.01)] == [True, False]
    assert not is_suspicious(1.0, 1.0), "a drafter before its training"
