"""The attention of the training-time test against the same thing written with a dense mask."""

import pytest
import torch
from torch import Tensor

from eagle3_ray.drafter.attention import Run, chain_attention

RUNS = (Run(row=0, start=0, column=3, length=5), Run(row=5, start=9, column=9, length=4))
COLUMNS = torch.tensor([3, 4, 5, 6, 7, 9, 10, 11, 12])
STARTS = torch.tensor([0, 0, 0, 0, 0, 9, 9, 9, 9])


def dense(q: Tensor, k0: Tensor, v0: Tensor, own: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    keys = torch.arange(len(k0))
    hidden = (keys > COLUMNS[:, None]) | (keys < STARTS[:, None])
    scores = torch.einsum("qhd,khd->hqk", q, k0) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    scores = torch.cat([scores, *[((q * k).sum(-1) * scale).T[..., None] for k, _ in own]], dim=-1)
    share = scores.softmax(-1)
    out = torch.einsum("hqk,khd->qhd", share[..., : len(k0)], v0)
    for j, (_, v) in enumerate(own):
        out = out + share[..., len(k0) + j].T[..., None] * v
    return out


@pytest.mark.parametrize("value_width", [8, 6])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_output_and_gradients_are_those_of_dense_attention(steps: int, value_width: int) -> None:
    generator = torch.Generator().manual_seed(steps)

    def random(rows: int, width: int = 8) -> Tensor:
        return torch.randn(rows, 2, width, generator=generator).requires_grad_()

    q, k0, v0 = random(9), random(14), random(14, value_width)
    own = [(random(9), random(9, value_width)) for _ in range(steps)]
    inputs = [q, k0, v0, *(tensor for pair in own for tensor in pair)]
    weight = torch.randn(9, 2, value_width, generator=generator)
    fast, plain = chain_attention(q, k0, v0, own, RUNS, 0.3), dense(q, k0, v0, own, 0.3)
    torch.testing.assert_close(fast, plain, atol=1e-6, rtol=1e-5)
    for got, expected in zip(
        torch.autograd.grad((fast * weight).sum(), inputs),
        torch.autograd.grad((plain * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
