"""The drafter's parts against their definitions: RoPE with its scalings, latent attention, configs of many targets."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle3_ray.drafter.config import MLA, DrafterConfig, DrafterConfigError
from eagle3_ray.drafter.mla import LatentAttention
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.packed import PackedBatch
from eagle3_ray.drafter.propose import propose
from eagle3_ray.drafter.rollout import TargetHead, rollout
from eagle3_ray.drafter.rope import rope_frequencies, rotate_pairs

LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 30,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "vocab_size": 100,
}
KIMI: dict[str, Any] = {  # Kimi-K2.5's shape, narrowed
    "model_type": "kimi_k25",
    "text_config": LLAMA
    | {
        "num_hidden_layers": 61,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}
SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=["default", "linear", "llama3", "yarn", "yarn-mscale"])
def test_rope_is_that_of_transformers(scaling: dict[str, Any]) -> None:
    rope = scaling | {"rope_theta": 500000.0}
    ours, factor = rope_frequencies(rope, 64, 8192)
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=8192, rope_parameters=dict(rope)
    )
    if rope["rope_type"] == "default":
        theirs, their_factor = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64), 1.0
    else:
        theirs, their_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    torch.testing.assert_close(ours, theirs)
    assert factor == pytest.approx(their_factor)


@pytest.mark.parametrize("scaling", SCALINGS[:4], ids=["default", "linear", "llama3", "yarn"])
def test_rope_survives_the_config_file_for_either_transformers(scaling: dict[str, Any]) -> None:
    rope = scaling | {"rope_theta": 500000.0}
    config = DrafterConfig.from_target(LLAMA | {"rope_parameters": rope}, draft_vocab_size=10)
    written = config.to_json()
    assert DrafterConfig.from_json(written, LLAMA).rope == rope
    assert LlamaConfig(**deepcopy(written)).rope_parameters == rope  # transformers 5
    older = {name: value for name, value in written.items() if name != "rope_parameters"}
    assert DrafterConfig.from_json(older, LLAMA).rope == rope
    assert (older["rope_theta"], older["rope_scaling"]) == (
        500000.0,
        None if scaling["rope_type"] == "default" else scaling,
    )


def test_a_rope_that_no_drafter_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="rope_type 'longrope' is not served"):
        DrafterConfig.from_target(
            LLAMA | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, draft_vocab_size=10
        )


def test_default_layers_are_the_engines() -> None:
    assert DrafterConfig.from_target(LLAMA, draft_vocab_size=10).aux_layers == (2, 15, 27)
    assert DrafterConfig.from_target(KIMI, draft_vocab_size=10).aux_layers == (2, 30, 58)


@pytest.mark.parametrize("layers", [(2, 15), (2, 2, 27), (0, 15, 27), (2, 15, 30), (15, 2, 27)])
def test_layers_that_the_target_does_not_have_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(DrafterConfigError, match="three different layers from 1 to 29"):
        DrafterConfig.from_target(LLAMA, aux_layers=layers, draft_vocab_size=10)


def test_kimi_gets_the_mla_drafter_with_the_tensors_that_sglang_loads() -> None:
    config = DrafterConfig.from_target(KIMI, draft_vocab_size=10)
    written = config.to_json()
    assert written["architectures"] == [MLA]
    assert written["kv_lora_rank"] == 16
    shapes = {name: tuple(p.shape) for name, p in Eagle3Drafter(config).named_parameters() if "self_attn" in name}
    assert shapes == {
        "midlayer.self_attn.q_a_proj.weight": (24, 128),
        "midlayer.self_attn.q_a_layernorm.weight": (24,),
        "midlayer.self_attn.q_b_proj.weight": (4 * 20, 24),
        "midlayer.self_attn.kv_a_proj_with_mqa.weight": (24, 128),
        "midlayer.self_attn.kv_a_layernorm.weight": (16,),
        "midlayer.self_attn.kv_b_proj.weight": (4 * 22, 16),
        "midlayer.self_attn.o_proj.weight": (64, 40),
    }


def test_latent_attention_equals_its_expansion_head_by_head() -> None:
    torch.manual_seed(0)
    config = DrafterConfig.from_target(KIMI, draft_vocab_size=10)
    attention, sizes = LatentAttention(config), config.mla
    assert sizes is not None
    drafter = Eagle3Drafter(config)
    x = torch.randn(5, 128)
    cos, sin = drafter.rotations(torch.arange(5))
    q = attention.queries(x @ attention.query_weight().T, cos, sin)
    k, v = attention.keys_values(x @ attention.key_value_weight().T, cos, sin)

    def normed(y: torch.Tensor) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    down = x @ attention.kv_a_proj_with_mqa.weight.T
    latent, rope_key = normed(down[:, :16]), rotate_pairs(down[:, None, 16:], cos, sin)[:, 0]
    q_latent = normed(x @ attention.q_a_proj.weight.T)
    for head in range(4):
        up = attention.kv_b_proj.weight[head * 22 : (head + 1) * 22]
        torch.testing.assert_close(k[:, head, :12], latent @ up[:12].T)
        torch.testing.assert_close(k[:, head, 12:], rope_key)  # one rotary key for all heads
        torch.testing.assert_close(v[:, head], latent @ up[12:].T)
        q_head = q_latent @ attention.q_b_proj.weight[head * 20 : (head + 1) * 20].T
        torch.testing.assert_close(q[:, head, :12], q_head[:, :12])
        torch.testing.assert_close(q[:, head, 12:], rotate_pairs(q_head[:, None, 12:], cos, sin)[:, 0])
    # DeepSeek-V2: scores / sqrt(d) * mscale(factor, mscale_all_dim)^2, mscale = 0.1 ln 64 + 1
    assert attention.scale == pytest.approx(20**-0.5 * (0.1 * 4.158883083 + 1) ** 2)


def test_rotary_pairs_turn_by_the_angle() -> None:
    x = torch.tensor([[[1.0, 0.0]]])
    cos, sin = torch.tensor([[[0.6]]]), torch.tensor([[[0.8]]])
    torch.testing.assert_close(rotate_pairs(x, cos, sin), torch.tensor([[[0.6, 0.8]]]))


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}], ids=["3", "3.1"])
@pytest.mark.parametrize("target", [LLAMA, KIMI], ids=["llama", "mla"])
def test_every_variant_learns_from_the_logits_that_drafting_would_see(
    target: dict[str, Any], switches: dict[str, bool]
) -> None:
    torch.manual_seed(1)
    drafter = Eagle3Drafter(DrafterConfig.from_target(target, draft_vocab_size=10, **switches))
    head = TargetHead(torch.randn(100, 64), torch.randn(100, 64))
    context, steps = 6, 3
    ids, aux = torch.randint(0, 100, (12,)), torch.randn(12, 192)
    drafts, logits = propose(drafter, head.embed_tokens, aux[:context], ids[: context + 1], steps)
    ids[context + 1 : context + 1 + steps] = torch.tensor(drafts)
    last_hidden = torch.randn(12, 64)
    for step in range(steps):
        label = context + 1 + step
        mask = torch.arange(12) == label
        argmax = torch.full((12,), 3)  # in the draft vocabulary, the first ten tokens
        batch = PackedBatch(ids, aux, last_hidden, torch.tensor([0, 12]), mask, target_argmax=argmax)
        teacher = (last_hidden[label - 1] @ head.lm_head[:10].T).softmax(-1)
        result = rollout(drafter, batch, head, ttt_steps=steps)
        torch.testing.assert_close(result.step_loss_sums[step], -(teacher * logits[step].log_softmax(-1)).sum())
        result.loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in drafter.parameters())


def test_propose_wants_the_newest_token_without_a_state() -> None:
    drafter = Eagle3Drafter(DrafterConfig.from_target(LLAMA, draft_vocab_size=10))
    with pytest.raises(ValueError, match="input_ids has 4 tokens for 4 aux_hidden rows"):
        propose(drafter, torch.randn(100, 64), torch.randn(4, 192), torch.arange(4), 2)
