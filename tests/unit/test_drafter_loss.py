"""The chunked losses and their written-out gradients against autograd's and against paper, and the teacher."""

import math

import pytest
import torch
from torch import Tensor

from eagle3_ray.drafter.loss import Loss, Scored, fused_loss, greedy_tokens, teacher_probabilities

LOSSES: tuple[Loss, ...] = ("kl", "lk")


def plain(loss: Loss, teacher: Tensor, logits: Tensor) -> Tensor:
    """The loss of each row, as it is defined, in float64 and with autograd."""
    p, log_q = teacher.double(), logits.double().log_softmax(-1)
    cross_entropy = -(p * log_q).sum(-1)
    if loss == "kl":
        return cross_entropy
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    blend = (-3 * alpha.detach()).exp()
    return blend * cross_entropy + (1 - blend) * (1 - alpha)


def score(loss: Loss, logits: Tensor, teacher: Tensor) -> Scored:
    """One step of rows that are logits themselves, for the head is the identity."""
    every = torch.arange(len(logits))
    return fused_loss([logits], [every], [every], [1.0], torch.eye(logits.shape[1]), teacher, loss)


def acceptance(teacher: Tensor, logits: Tensor) -> float:
    return torch.minimum(teacher, logits.softmax(-1)).sum(-1).mean().item()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunk", [7, 1 << 21], ids=["a row at a time", "one chunk"])
def test_the_fused_loss_and_its_gradients_are_autograds(
    chunk: int, loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3_ray.drafter.loss.CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    head = torch.randn(6, 4, requires_grad=True)
    hidden = [torch.randn(5, 4, requires_grad=True) for _ in range(2)]
    teacher = teacher_probabilities(torch.randn(3, 4), torch.randn(6, 4))
    rows, theirs = [torch.tensor([0, 2, 4]), torch.tensor([1])], [torch.tensor([2, 0, 1]), torch.tensor([0])]
    result = fused_loss(hidden, rows, theirs, [1.0, 0.5], head, teacher, loss)
    logits = [h[r] @ head.T for h, r in zip(hidden, rows, strict=True)]
    taught = [teacher[t] for t in theirs]
    of_steps = [plain(loss, p, z).sum() for p, z in zip(taught, logits, strict=True)]
    entropies = [plain("kl", p, z).sum() for p, z in zip(taught, logits, strict=True)]
    expected = of_steps[0] + 0.5 * of_steps[1]
    torch.testing.assert_close(result.loss.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.stack(result.step_sums).double(), torch.stack(entropies).detach())
    assert [p.tolist() for p in result.predicted] == [z.argmax(-1).tolist() for z in logits]
    for got, autograd in zip(
        torch.autograd.grad(3 * result.loss, [head, *hidden]),
        torch.autograd.grad(3 * expected, [head, *hidden]),
        strict=True,
    ):
        torch.testing.assert_close(got, autograd, atol=1e-6, rtol=1e-5)


def test_three_tokens_give_the_lk_loss_worked_out_on_paper() -> None:
    # p = (1/2, 3/8, 1/8), q = (1/4, 1/4, 1/2): alpha = 1/4 + 1/4 + 1/8 = 5/8, so b = exp(-15/8) = 0.153355.
    # Cross entropy: 1/2 ln 4 + 3/8 ln 4 + 1/8 ln 2 = 15/8 ln 2 = 1.299651. Loss: b 1.299651 + (1 - b) 3/8 = 0.516800.
    # q is under p at tokens 0 and 1, by the sum 1/2: d(1 - alpha)/dz = q/2 - (1/4, 1/4, 0) = (-1/8, -1/8, 1/4).
    # With q - p = (-1/4, -1/8, 3/8) the gradient is (-1/8 - b/8, -1/8, 1/4 + b/8) = (-0.144169, -0.125, 0.269169).
    logits = torch.tensor([[0.25, 0.25, 0.5]]).log().requires_grad_()
    result = score("lk", logits, torch.tensor([[0.5, 0.375, 0.125]]))
    (gradient,) = torch.autograd.grad(result.loss, [logits])
    assert result.loss.item() == pytest.approx(0.516800, abs=1e-6)
    assert result.step_sums[0].item() == pytest.approx(15 / 8 * math.log(2), abs=1e-6)
    assert gradient[0].tolist() == pytest.approx([-0.144169, -0.125, 0.269169], abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_position_counts_the_same_in_any_company(loss: Loss) -> None:
    torch.manual_seed(0)
    logits, teacher = torch.randn(4, 6) * 2, torch.randn(4, 6).softmax(-1)
    alone = [score(loss, logits[i : i + 1], teacher[i : i + 1]).loss for i in range(4)]
    torch.testing.assert_close(score(loss, logits, teacher).loss, torch.stack(alone).sum())


def test_lk_learns_a_token_that_the_drafter_gives_next_to_nothing() -> None:
    teacher = torch.tensor([[0.9, 0.1] + [0.0] * 48])
    logits = torch.tensor([[-12.0] * 2 + [0.0] * 48], requires_grad=True)
    rates = [acceptance(teacher, logits)]
    for _ in range(40):
        (gradient,) = torch.autograd.grad(score("lk", logits, teacher).loss, [logits])
        logits = (logits - 2 * gradient).detach().requires_grad_()
        rates.append(acceptance(teacher, logits))
    assert rates[0] < 1e-6
    assert rates[-1] > 0.9
    assert rates == sorted(rates)


def test_lk_raises_the_acceptance_of_a_drafter_that_cross_entropy_leaves_at_its_best() -> None:
    # One number h is all that this drafter has, logits (0, h, 2h): it cannot say p = (0.5, 0.1, 0.4). Cross entropy is
    # least where q_1 + 2 q_2 = 0.9, at e^h = x with 1.1 x^2 + 0.1 x - 0.9 = 0: x = 0.860221, q = (0.3846, 0.3308,
    # 0.2846), alpha = 0.3846 + 0.1 + 0.2846 = 0.7692. alpha is greatest where q_0 reaches 0.5: x + x^2 = 1,
    # x = 0.618034, q_2 = 0.190983, alpha = 0.790983.
    teacher, head = torch.tensor([[0.5, 0.1, 0.4]]), torch.tensor([[0.0], [1.0], [2.0]])
    h = torch.tensor([[math.log(0.860221)]], requires_grad=True)
    every = torch.arange(1)
    gradients, rates = {}, []
    for loss in LOSSES:
        result = fused_loss([h], [every], [every], [1.0], head, teacher, loss)
        (gradients[loss],) = torch.autograd.grad(result.loss, [h])
    for _ in range(200):
        rates.append(acceptance(teacher, h @ head.T))
        (gradient,) = torch.autograd.grad(fused_loss([h], [every], [every], [1.0], head, teacher, "lk").loss, [h])
        h = (h - 0.1 * gradient).detach().requires_grad_()
    assert abs(gradients["kl"].item()) < 1e-5
    assert gradients["lk"].item() > 0.01
    assert rates[0] == pytest.approx(0.7692, abs=1e-4)
    assert rates[-1] == pytest.approx(0.790983, abs=0.003)


def test_a_loss_without_a_gradient_is_the_same() -> None:
    torch.manual_seed(0)
    logits, teacher = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6).softmax(-1)
    for loss in LOSSES:
        with torch.no_grad():
            validated = score(loss, logits, teacher)
        trained = score(loss, logits, teacher)
        assert not validated.loss.requires_grad
        assert validated.loss == trained.loss
        assert validated.step_sums == trained.step_sums


def test_the_teacher_is_the_full_distribution_renormalised_over_the_draft_vocabulary() -> None:
    torch.manual_seed(0)
    last_hidden, lm_head, drafted = torch.randn(5, 4), torch.randn(9, 4), torch.tensor([0, 3, 8])
    full = (last_hidden @ lm_head.T).softmax(-1)
    expected = full[:, drafted] / full[:, drafted].sum(-1, keepdim=True)
    torch.testing.assert_close(teacher_probabilities(last_hidden, lm_head[drafted]), expected)
    assert greedy_tokens(last_hidden, lm_head).tolist() == full.argmax(-1).tolist()


def test_a_target_that_caps_its_logits_teaches_what_it_says() -> None:
    torch.manual_seed(0)
    last_hidden, draft_rows = 9 * torch.randn(50, 16), torch.randn(20, 16)
    logits = last_hidden @ draft_rows.T
    expected = (30 * (logits / 30).tanh()).softmax(-1)
    torch.testing.assert_close(teacher_probabilities(last_hidden, draft_rows, 30.0), expected)
    assert (teacher_probabilities(last_hidden, draft_rows) - expected).abs().max() > 0.05
