# mypy: allow-subclassing-any, allow-untyped-decorators
"""The EAGLE-3 drafter as SGLang 0.5.23 serves it; its parameters carry the names of the exported checkpoint.

    fused = fc(aux * aux_scale)                          # [T, 3H] -> [T, H], step 0's state
    x     = cat(input_layernorm(embed), hidden_norm(h))
    h'    = h + attention(x);  h'' = h' + mlp(post_attention_layernorm(h'))
    logits over the draft vocabulary = lm_head(norm(h''));  the next step's state is h'' (norm(h'') with norm_output)

`embed` is the target's embedding, frozen, and no part of the drafter. `aux_scale` is ours: the aux states' channels
differ by orders of magnitude in size, and Adam learns well only where inputs are alike. Export multiplies it into
`fc.weight`, so that a served drafter never sees it.
"""

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.mla import LatentAttention
from eagle3_ray.drafter.mlp import MLP
from eagle3_ray.drafter.norm import RMSNorm
from eagle3_ray.drafter.rope import cos_sin, rope_frequencies, rotate_halves


class Attention(Protocol):
    """What one step needs of an attention layer, be it Llama's or latent.

    Both begin with linear maps of cat(embed, hidden) [n, 2H]; a caller may apply the two halves of the weights apart.
    """

    scale: float  # of the scores
    v_head_dim: int

    def query_weight(self) -> Tensor: ...  # [F_q, 2H]
    def key_value_weight(self) -> Tensor: ...  # [F_kv, 2H]
    def queries(self, features: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...  # [n, F_q] -> [n, heads, D]
    def keys_values(self, features: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...  # all heads
    def output(self, heads: Tensor) -> Tensor: ...  # [n, heads, v_head_dim] -> [n, H]


class LlamaAttention(nn.Module):
    """Grouped-query attention whose projections take cat(embed, hidden), 2H wide."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = self.v_head_dim = config.head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.scale = config.head_dim**-0.5
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def query_weight(self) -> Tensor:
        return self.q_proj.weight

    def key_value_weight(self) -> Tensor:
        return torch.cat((self.k_proj.weight, self.v_proj.weight))

    def queries(self, features: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_halves(features.unflatten(-1, (-1, self.head_dim)), cos, sin)

    def keys_values(self, features: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (half.unflatten(-1, (-1, self.head_dim)) for half in features.chunk(2, dim=-1))
        k = rotate_halves(k, cos, sin)
        return k.repeat_interleave(self.group, dim=1), v.repeat_interleave(self.group, dim=1)

    def output(self, heads: Tensor) -> Tensor:
        return cast(Tensor, self.o_proj(heads.flatten(-2)))


class MidLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn: Attention = LatentAttention(config) if config.mla else LlamaAttention(config)
        self.mlp = MLP(config)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def after_attention(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The step's pre-norm state [n, H] from the state it began with and the attention's heads [n, heads, D]."""
        h = residual + self.self_attn.output(attended)
        return cast(Tensor, h + self.mlp(self.post_attention_layernorm(h)))


class Eagle3Drafter(nn.Module):
    """`state_dict()` holds the exported tensors, and `aux_scale`, which export folds away.

    `d2t` is int64 [draft vocabulary], offsets: draft token i is target token i + d2t[i]. `t2d` is bool [V].
    Weights are float32 and random until `initialise` or a checkpoint sets them.
    """

    d2t: Tensor
    t2d: Tensor
    aux_scale: Tensor
    frequencies: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        width = len(config.aux_layers) * config.hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.aux_layers)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[: config.draft_vocab_size] = True
        self.register_buffer("t2d", t2d)
        self.register_buffer("aux_scale", torch.ones(width))
        frequencies, self.rope_factor = rope_frequencies(config.rope, config.rope_dim, config.max_position_embeddings)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def target_ids(self) -> Tensor:
        """The target's id of every draft token, int64 [draft vocabulary], rising."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fc_input(self, aux_hidden: Tensor) -> Tensor:
        """What `fc` takes, before `aux_scale`: the aux states [T, 3H], each third normed on its own with fc_norm."""
        if not self.config.fc_norm:
            return aux_hidden
        thirds = aux_hidden.chunk(len(self.config.aux_layers), dim=-1)
        return torch.cat([norm(third) for norm, third in zip(self.fc_norm, thirds, strict=True)], dim=-1)

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """Step 0's states [T, H] from the target's aux states [T, 3H]."""
        return cast(Tensor, self.fc(self.fc_input(aux_hidden).to(self.aux_scale.dtype) * self.aux_scale))

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return cos_sin(positions, self.frequencies, self.rope_factor)
