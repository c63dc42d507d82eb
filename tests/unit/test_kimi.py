"""The preset for Kimi-K2.5 as far as it can be proved without Kimi's files: ids, boundary, layers, drafter."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from eagle3_ray import drafting
from eagle3_ray.audit import AuditRules, Evidence, cut_in_reasoning, judge
from eagle3_ray.config import load
from eagle3_ray.drafter.config import MLA, DrafterConfig
from eagle3_ray.drafter.export import export
from eagle3_ray.drafter.initialise import initialise
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.rope import rope_frequencies
from eagle3_ray.drafter.vocabulary import DraftVocabulary
from eagle3_ray.model_config import keeps_ids, served_ids
from eagle3_ray.plan import PlanSettings, Render
from eagle3_ray.prompts import Prompt, parse
from eagle3_ray.rendering import Renderer
from eagle3_ray.target.files import TargetFiles, resolve
from eagle3_ray.target.layers import resolve_layers
from eagle3_ray.telemetry import Report, Telemetry
from tests.kimi_target import (
    CONFIG,
    END_THINK,
    IM_ASSISTANT,
    IM_END,
    IM_MIDDLE,
    IM_USER,
    TEXT_CONFIG,
    THINK,
    make_kimi_target,
)

PRESET = load("kimi-k2.5-8xblackwell")
SAID = [72, 105]  # two ordinary tokens


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> TargetFiles:
    return resolve(str(make_kimi_target(tmp_path_factory.mktemp("kimi"))))


@pytest.fixture(scope="module")
def renderer(kimi: TargetFiles) -> Renderer:
    return Renderer(kimi.folder, boundary_ids=PRESET.audit.boundary_ids)


@pytest.fixture(scope="module")
def rules(kimi: TargetFiles, renderer: Renderer) -> AuditRules:
    """As generate.py makes them."""
    return AuditRules(
        stop_ids=frozenset(kimi.stop_ids()),
        special_ids=frozenset(renderer.special_ids),
        boundary_ids=frozenset(PRESET.audit.boundary_ids),
        loop_tokens=PRESET.audit.loop_tokens,
        evidence_rows=PRESET.audit.evidence_rows,
    )


def ask(**row: Any) -> Prompt:
    return parse(json.dumps({"prompt": "Why?", **row}).encode(), "file:1")


def test_a_prompt_ends_in_think_behind_the_templates_own_ids(renderer: Renderer) -> None:
    ids = renderer.prompt_ids(ask())
    assert ids[0] == IM_USER
    assert [ids[-1], ids[-2]] == [THINK, IM_MIDDLE]
    assert [token for token in ids if token >= 163584] == [IM_USER, IM_MIDDLE, IM_END, IM_ASSISTANT, IM_MIDDLE, THINK]
    assert renderer.prompt_ids(ask(chat_template_kwargs={"thinking": False}))[-2:] == [THINK, END_THINK]


def test_a_later_turn_holds_the_answer_with_its_reasoning_between_the_tags(renderer: Renderer) -> None:
    talk = parse(json.dumps({"messages": [{"role": "user", "content": c} for c in ("a", "b")]}).encode(), "file:1")
    thought, said = renderer.encode("hm"), renderer.encode("yes")
    ids = renderer.prompt_ids(talk, [[*thought, END_THINK, *said, IM_END]])
    start = ids.index(THINK)
    assert ids[start : start + 8] == [THINK, *thought, END_THINK, *said, IM_END]
    assert ids[-1] == THINK


def test_answers_end_with_im_end_and_ids_reach_to_the_end_of_the_vocabulary(kimi: TargetFiles) -> None:
    assert (kimi.stop_ids(), kimi.vocab_size) == ([163586], 163840)
    (kimi.folder / "generation_config.json").rename(kimi.folder / "aside")
    assert kimi.stop_ids() == [163586]  # text_config says so too
    (kimi.folder / "aside").rename(kimi.folder / "generation_config.json")


def test_the_last_id_of_the_vocabulary_is_sent_and_the_one_behind_it_is_not(kimi: TargetFiles) -> None:
    render = Render(PlanSettings([], str(kimi.folder), {}, kimi.vocab_size))
    rows = {"partition": ["p"] * 2, "file": ["f"] * 2, "line": [1, 2]}
    raw = [b'{"input_ids": [1, 163839]}', b'{"input_ids": [1, 163840]}']
    planned = render(pa.table({**rows, "raw": pa.array(raw, pa.binary())})).to_pylist()
    assert [row["prompt_ids"] for row in planned] == [[1, 163839], []]
    assert [row["reason"] for row in planned] == [None, "token id 163840 is outside the vocabulary of 163840"]


def test_answers_without_end_think_stop_the_job_with_their_number(renderer: Renderer, rules: AuditRules) -> None:
    prompt, stripped = renderer.prompt_ids(ask()), Evidence()
    for _ in range(PRESET.audit.evidence_rows):
        answer = [*SAID, IM_END]
        stripped.add(prompt, answer, stopped=True, reason=judge(answer, False, rules), rules=rules)
    reason = Telemetry(rules).report("a writer", Report({}, {"math": stripped}, {}))
    assert reason == (
        "Partition math: none of 200 whole answers holds a boundary token [163607] (audit.boundary_ids). "
        "Something strips it, or the target has none."
    )
    stripped.add(prompt, [*SAID, END_THINK, *SAID, IM_END], stopped=True, reason=None, rules=rules)
    assert Telemetry(rules).report("a writer", Report({}, {"math": stripped}, {})) is None


def test_an_answer_cut_before_end_think_is_no_evidence_and_is_told_apart(renderer: Renderer, rules: AuditRules) -> None:
    prompt, cut = renderer.prompt_ids(ask()), Evidence()
    for _ in range(1000):
        cut.add(prompt, SAID, stopped=False, reason=None, rules=rules)
    assert cut.finding("math", rules) is None
    assert cut_in_reasoning(prompt, SAID, "length", rules)
    assert not cut_in_reasoning(prompt, [*SAID, END_THINK], "length", rules)
    instant = renderer.prompt_ids(ask(chat_template_kwargs={"thinking": False}))
    assert not cut_in_reasoning(instant, SAID, "length", rules)


def test_the_boundary_is_allowed_in_an_answer_and_the_templates_tokens_are_not(rules: AuditRules) -> None:
    assert judge([*SAID, END_THINK, *SAID, IM_END], False, rules) is None
    assert judge([*SAID, IM_USER, IM_END], False, rules) == "special token 163587 inside the answer, at position 2"


def test_the_layers_are_those_that_sglang_captures_of_the_deepseek_family(kimi: TargetFiles) -> None:
    layers = resolve_layers(kimi.config, PRESET.capture.layers)
    assert layers == (2, 30, 58)
    assert served_ids(layers, keeps_ids(kimi.config)) == [
        2,
        30,
        58,
    ]


def test_the_drafter_of_the_whole_model_has_the_shapes_that_sglang_loads() -> None:
    config = drafting.new_config(CONFIG, (2, 30, 58), PRESET.train.draft_vocab_size, False, False)
    with torch.device("meta"):
        drafter = Eagle3Drafter(config)
    assert {name.removesuffix(".weight"): tuple(t.shape) for name, t in drafter.named_parameters()} == {
        "fc": (7168, 3 * 7168),
        "midlayer.self_attn.q_a_proj": (1536, 2 * 7168),
        "midlayer.self_attn.q_a_layernorm": (1536,),
        "midlayer.self_attn.q_b_proj": (64 * (128 + 64), 1536),
        "midlayer.self_attn.kv_a_proj_with_mqa": (512 + 64, 2 * 7168),
        "midlayer.self_attn.kv_a_layernorm": (512,),
        "midlayer.self_attn.kv_b_proj": (64 * (128 + 128), 512),
        "midlayer.self_attn.o_proj": (7168, 64 * 128),
        "midlayer.mlp.gate_proj": (18432, 7168),
        "midlayer.mlp.up_proj": (18432, 7168),
        "midlayer.mlp.down_proj": (7168, 18432),
        "midlayer.hidden_norm": (7168,),
        "midlayer.input_layernorm": (7168,),
        "midlayer.post_attention_layernorm": (7168,),
        "norm": (7168,),
        "lm_head": (32000, 7168),
    }
    assert sum(parameter.numel() for parameter in drafter.parameters()) == 896_169_984
    assert {name: tuple(drafter.state_dict()[name].shape) for name in ("d2t", "t2d")} == {
        "d2t": (32000,),
        "t2d": (163840,),
    }


SHRUNK = CONFIG | {
    "text_config": TEXT_CONFIG
    | {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    | {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
}


def test_an_exported_drafter_keeps_the_targets_rope_and_names_the_layers_as_sglang_does(tmp_path: Path) -> None:
    config = DrafterConfig.from_target(SHRUNK, draft_vocab_size=10)
    drafter = Eagle3Drafter(config)
    vocabulary = DraftVocabulary.from_counts(torch.arange(40), 10)
    generator = torch.Generator().manual_seed(0)
    initialise(drafter, vocabulary, torch.randn(40, 16), torch.ones(16), torch.randn(50, 48), generator)
    export(drafter, tmp_path / "drafter", SHRUNK)
    written = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert written["architectures"] == [MLA] == ["Eagle3DeepseekV2ForCausalLM"]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert (written["rope_theta"], written["max_position_embeddings"]) == (50000.0, 262144)
    yarn = {name: value for name, value in TEXT_CONFIG["rope_scaling"].items() if name != "type"}
    assert written["rope_scaling"] == {**yarn, "rope_type": "yarn"}
    assert written["rope_parameters"] == {**yarn, "rope_type": "yarn", "rope_theta": 50000.0}
    assert DrafterConfig.from_json(written, SHRUNK) == config


def test_yarn_slows_the_channels_that_the_first_4096_positions_do_not_turn() -> None:
    rope = DrafterConfig.from_target(CONFIG).rope
    frequencies, factor = rope_frequencies(rope, 64, 262144)
    plain = [50000.0 ** (-2 * channel / 64) for channel in range(32)]
    assert factor == 1.0  # mscale over mscale_all_dim, which are equal
    # 4096 positions turn channel j 4096 * plain[j] / 2 pi times: over 32 times stays, under once is 64 times slower
    turns = [4096 * frequency / (2 * math.pi) for frequency in plain]
    fast = [j for j in range(32) if j <= max(i for i in range(32) if turns[i] > 32)]
    slow = [j for j in range(32) if j > min(i for i in range(32) if turns[i] < 1)]
    assert (fast[-1], slow[0]) == (8, 21)
    torch.testing.assert_close(frequencies[fast], torch.tensor([plain[j] for j in fast]))
    torch.testing.assert_close(frequencies[slow], torch.tensor([plain[j] / 64 for j in slow]))
