"""The written-out gradients of norm and MLP against autograd's, and what a drafter starts as."""

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.initialise import initialise, set_aux_scale
from eagle3_ray.drafter.mlp import MLP
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.norm import RMSNorm
from eagle3_ray.drafter.vocabulary import DraftVocabulary

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 30,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def assert_same_gradients(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9))
    for got, expected in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((theirs * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_the_norms_gradient_is_autograds() -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(8, 1e-3), torch.randn(5, 8, requires_grad=True)
    norm.weight.data.uniform_(0.5, 2.0)
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    assert_same_gradients(norm(x), plain, [x, norm.weight])


def test_the_mlps_gradient_is_autograds() -> None:
    torch.manual_seed(0)
    mlp = MLP(DrafterConfig.from_target(LLAMA, draft_vocab_size=10))
    x = torch.randn(5, 64, requires_grad=True)
    plain = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert_same_gradients(mlp(x), plain, [x, *mlp.parameters()])


def test_aux_channels_of_any_size_reach_fc_alike_whatever_the_first_token_is() -> None:
    drafter = Eagle3Drafter(DrafterConfig.from_target(LLAMA, draft_vocab_size=10))
    sample = torch.randn(400, 192, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 2, 192)
    sample[0] *= 1000  # a first token's states
    set_aux_scale(drafter, sample)
    sizes = (sample[1:] * drafter.aux_scale).square().mean(0).sqrt()
    assert 0.8 < float(sizes.min()) < float(sizes.max()) < 1.25


def test_a_silent_aux_channel_is_not_blown_up() -> None:
    drafter = Eagle3Drafter(DrafterConfig.from_target(LLAMA, draft_vocab_size=10))
    sample = torch.randn(400, 192, generator=torch.Generator().manual_seed(0))
    sample[:, 5] = 0
    set_aux_scale(drafter, sample)
    assert bool(drafter.aux_scale.isfinite().all())
    assert float(drafter.aux_scale.max() / drafter.aux_scale.median()) < 2e4


def test_a_fresh_drafter_has_the_targets_head_and_is_the_same_for_the_same_seed() -> None:
    head = torch.randn(100, 64, generator=torch.Generator().manual_seed(1))
    vocabulary = DraftVocabulary.from_counts(torch.arange(100), 10)
    drafters = []
    for _ in range(2):
        drafter = Eagle3Drafter(DrafterConfig.from_target(LLAMA, draft_vocab_size=10))
        sample = torch.randn(50, 192, generator=torch.Generator().manual_seed(2))
        initialise(drafter, vocabulary, head, torch.ones(64), sample, torch.Generator().manual_seed(3))
        drafters.append(drafter.state_dict())
    assert torch.equal(drafters[0]["lm_head.weight"], head[90:])
    assert all(torch.equal(tensor, drafters[1][name]) for name, tensor in drafters[0].items())
