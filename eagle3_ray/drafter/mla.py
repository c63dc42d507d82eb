# mypy: allow-subclassing-any, allow-untyped-decorators
"""Multi-head latent attention of DeepSeek-V2 (arXiv 2405.04434) over cat(embed, hidden), as SGLang's
`Eagle3DeepseekV2ForCausalLM` has it: queries and keys-values each pass a narrow latent with a norm of its own; one
rotary key is shared by all heads.
"""

from typing import cast

import torch
from torch import Tensor, nn

from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.norm import RMSNorm
from eagle3_ray.drafter.rope import rotate_pairs, yarn_mscale


class LatentAttention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        sizes = config.mla
        assert sizes is not None, "LatentAttention needs a config with mla"
        heads, self.sizes, self.v_head_dim = config.num_attention_heads, sizes, sizes.v_head_dim
        self.q_a_proj = nn.Linear(2 * config.hidden_size, sizes.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(sizes.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = nn.Linear(sizes.q_lora_rank, heads * config.head_dim, bias=False)
        latent = sizes.kv_lora_rank + sizes.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(2 * config.hidden_size, latent, bias=False)
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(sizes.kv_lora_rank, heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * sizes.v_head_dim, config.hidden_size, bias=False)
        self.heads = heads
        self.scale = config.head_dim**-0.5
        if config.rope["rope_type"] == "yarn":  # deepseek_v2.py: the scores' scale grows with mscale_all_dim, squared
            mscale = yarn_mscale(float(config.rope["factor"]), float(config.rope.get("mscale_all_dim") or 0.0))
            self.scale *= mscale * mscale

    def query_weight(self) -> Tensor:
        return self.q_a_proj.weight

    def key_value_weight(self) -> Tensor:
        return self.kv_a_proj_with_mqa.weight

    def queries(self, features: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(features)).unflatten(-1, (self.heads, -1))
        nope, rope = q.split((self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim), dim=-1)
        return torch.cat((nope, rotate_pairs(rope, cos, sin)), dim=-1)

    def keys_values(self, features: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        latent, rope = features.split((self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        nope, v = kv.split((self.sizes.qk_nope_head_dim, self.sizes.v_head_dim), dim=-1)
        shared = rotate_pairs(rope[:, None], cos, sin).expand(-1, self.heads, -1)
        return torch.cat((nope, shared.to(nope.dtype)), dim=-1), v

    def output(self, heads: Tensor) -> Tensor:
        return cast(Tensor, self.o_proj(heads.flatten(-2)))
