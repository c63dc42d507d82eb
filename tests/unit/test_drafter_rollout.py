"""The training-time test against an independent implementation's numbers, and against cases small enough for paper."""

import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.packed import PackedBatch
from eagle3_ray.drafter.propose import propose
from eagle3_ray.drafter.rollout import Rollout, TargetHead, rollout

MASKS = {"label_mask": False, "published_mask": True}


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    """Two public implementations' common numbers: weights, a batch of 2 rows, losses, accuracies and gradients."""
    path = Path(__file__).resolve().parents[3] / "shared" / "oracle" / "eagle3_ttt.safetensors"
    if not path.exists():
        message = f"the oracle is not at {path}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with safe_open(path, "pt") as file:
        sizes = json.loads(file.metadata()["config"])
    return load_file(path) | {"sizes": sizes}


def oracle_drafter(oracle: dict[str, Any]) -> Eagle3Drafter:
    sizes = oracle["sizes"]
    config = DrafterConfig(
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["hidden_size"] // sizes["heads"],
        rms_norm_eps=sizes["rms_norm_eps"],
        max_position_embeddings=sizes["max_position_embeddings"],
        rope={"rope_type": "default", "rope_theta": sizes["rope_theta"]},
        vocab_size=sizes["vocab_size"],
        draft_vocab_size=sizes["draft_vocab_size"],
        aux_layers=tuple(sizes["aux_hidden_state_indices"]),
    )
    drafter = Eagle3Drafter(config)
    weights = {name.removeprefix("draft/"): tensor for name, tensor in oracle.items() if name.startswith("draft/")}
    weights.pop("embed_tokens.weight")
    weights["aux_scale"] = torch.ones(3 * config.hidden_size)
    drafter.load_state_dict(weights)
    return drafter


def oracle_head(oracle: dict[str, Any]) -> TargetHead:
    return TargetHead(oracle["draft/embed_tokens.weight"], oracle["target/lm_head.weight"])


def oracle_batch(oracle: dict[str, Any]) -> PackedBatch:
    """The two rows packed into one."""
    length = oracle["sizes"]["seq"]
    return PackedBatch(
        input_ids=oracle["input_ids"].flatten(),
        aux_hidden=oracle["aux_hidden_states"].flatten(0, 1),
        last_hidden=oracle["last_hidden_state_post_norm"].flatten(0, 1),
        cu_seqlens=torch.tensor([0, length, 2 * length]),
        loss_mask=oracle["loss_mask"].flatten().bool(),
    )


@pytest.mark.parametrize("mask", MASKS)
def test_losses_and_accuracies_are_the_oracles(oracle: dict[str, Any], mask: str) -> None:
    result = rollout(oracle_drafter(oracle), oracle_batch(oracle), oracle_head(oracle), published_mask=MASKS[mask])
    positions = oracle["input_ids"].numel()  # the oracle's mean is over all positions, supervised or not
    answers = oracle["loss_mask"].sum()  # and its accuracy over answers, in the draft vocabulary or not
    torch.testing.assert_close(
        result.step_loss_sums / positions, oracle[f"{mask}/step_loss_mean_over_all_positions"], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(result.step_correct / answers, oracle[f"{mask}/step_accuracy"], atol=1e-5, rtol=0)
    torch.testing.assert_close(result.loss[None] / positions, oracle[f"{mask}/total_loss"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("mask", MASKS)
def test_every_gradient_is_the_oracles(oracle: dict[str, Any], mask: str) -> None:
    drafter = oracle_drafter(oracle)
    result = rollout(drafter, oracle_batch(oracle), oracle_head(oracle), published_mask=MASKS[mask])
    (result.loss / oracle["input_ids"].numel()).backward()
    for name, parameter in drafter.named_parameters():
        expected = oracle[f"{mask}/grad/{name}"]
        error = (parameter.grad - expected).norm() / expected.norm()
        assert error < 1e-4, f"{name}: relative error {error:.1e}"


def test_three_tokens_give_the_loss_worked_out_on_paper() -> None:
    # H = 2, one head, three target tokens of which 0 and 1 are the draft vocabulary. Tokens 2, 1, 0; the last is the
    # answer, so column 0 alone has a label, at step 0: it embeds token 1 and learns what the target says after it.
    #   h = fc(aux_0) = (1, 0);  embedding of token 1 is (0, 2), its RMS is sqrt(4/2), so normed it is (0, sqrt 2).
    #   One key is visible, so attention gives its value whatever the scores: v = normed embedding; the MLP is zero.
    #   h'' = (1, sqrt 2), RMS sqrt(3/2), so the logits (identity head) are (sqrt(2/3), 2 / sqrt 3).
    #   Teacher: last_hidden_1 = (ln 3, 0) gives target logits (ln 3, 0, -5); over the draft vocabulary (3/4, 1/4).
    a, b = math.sqrt(2 / 3), 2 / math.sqrt(3)
    on_paper = math.log(math.exp(a) + math.exp(b)) - (3 / 4 * a + 1 / 4 * b)
    config = DrafterConfig(
        hidden_size=2,
        intermediate_size=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        rms_norm_eps=0.0,
        max_position_embeddings=8,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        vocab_size=3,
        draft_vocab_size=2,
        aux_layers=(1, 2, 3),
    )
    drafter = Eagle3Drafter(config)
    with torch.no_grad():
        drafter.fc.weight.copy_(torch.eye(2, 6))
        drafter.midlayer.self_attn.v_proj.weight.copy_(torch.eye(2, 4))
        drafter.midlayer.self_attn.o_proj.weight.copy_(torch.eye(2))
        drafter.midlayer.mlp.down_proj.weight.zero_()
        drafter.lm_head.weight.copy_(torch.eye(2))
    batch = PackedBatch(
        input_ids=torch.tensor([2, 1, 0]),
        aux_hidden=torch.tensor([[1.0, 0, 0, 0, 0, 0], [9.0, 9, 9, 9, 9, 9], [9.0, 9, 9, 9, 9, 9]]),
        last_hidden=torch.tensor([[7.0, 7.0], [math.log(3), 0.0], [7.0, 7.0]]),
        cu_seqlens=torch.tensor([0, 3]),
        loss_mask=torch.tensor([False, False, True]),
    )
    head = TargetHead(
        embed_tokens=torch.tensor([[5.0, 5.0], [0.0, 2.0], [5.0, -5.0]]),
        lm_head=torch.tensor([[1.0, 0.0], [0.0, 1.0], [-5 / math.log(3), 0.0]]),
    )
    result = rollout(drafter, batch, head, ttt_steps=2)
    assert result.loss.item() == pytest.approx(on_paper, abs=1e-6)
    assert result.step_counts.tolist() == [1, 0]
    assert result.step_correct.tolist() == [0, 0]  # b > a, the target's is token 0
    assert (result.chain_accepted.item(), result.chain_starts.item()) == (0, 1)


def test_each_step_learns_from_the_logits_that_drafting_would_see(oracle: dict[str, Any]) -> None:
    drafter, head, context, steps = oracle_drafter(oracle), oracle_head(oracle), 30, 5
    ids, aux = oracle["input_ids"][0], oracle["aux_hidden_states"][0]
    drafts, logits = propose(drafter, head.embed_tokens, aux[:context], ids[: context + 1], steps)
    ids = ids.clone()
    ids[context + 1 : context + 1 + steps] = torch.tensor(drafts)  # the sequence goes on as drafted
    for step in range(steps):
        label = context + 1 + step  # alone supervised: at `step` by the chain that begins at the context's last column
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[label] = True
        last_hidden = head.lm_head[drafts[step]].expand(len(ids), -1).contiguous()
        batch = PackedBatch(ids, aux, last_hidden, torch.tensor([0, len(ids)]), mask)
        teacher = (last_hidden[0] @ head.lm_head[drafter.target_ids()].T).softmax(-1)
        expected = -(teacher * logits[step].log_softmax(-1)).sum()
        result = rollout(drafter, batch, head, ttt_steps=steps)
        torch.testing.assert_close(result.step_loss_sums[step], expected, atol=1e-5, rtol=1e-5)


def test_a_chain_counts_a_step_only_if_all_before_it_were_right(oracle: dict[str, Any]) -> None:
    drafter, head, context, steps = oracle_drafter(oracle), oracle_head(oracle), 30, 4
    ids, aux = oracle["input_ids"][0].clone(), oracle["aux_hidden_states"][0]
    drafts, _ = propose(drafter, head.embed_tokens, aux[:context], ids[: context + 1], steps)
    ids[context + 1 : context + 1 + steps] = torch.tensor(drafts)
    ids = ids[: context + 1 + steps]
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[context + 1 :] = True
    for wrong, accepted in ((None, 4), (0, 0), (2, 2)):
        said = list(drafts)
        if wrong is not None:
            said[wrong] = next(t for t in range(512) if t != drafts[wrong] and drafter.t2d[t])
        argmax = torch.zeros(len(ids), dtype=torch.int64)
        argmax[context : context + steps] = torch.tensor(said)  # the target's word after each token
        batch = PackedBatch(
            ids, aux[: len(ids)], torch.zeros(len(ids), 64), torch.tensor([0, len(ids)]), mask, target_argmax=argmax
        )
        alone = torch.zeros_like(mask)
        alone[context + 1 :] = True
        with torch.no_grad():
            whole = rollout(drafter, batch, head, ttt_steps=steps)
            shorter = rollout(
                drafter, replace(batch, loss_mask=mask & (torch.arange(len(ids)) > context + 1)), head, steps
            )
        assert whole.chain_starts - shorter.chain_starts == 1  # the column that begins at the context's end
        assert whole.chain_accepted - shorter.chain_accepted == accepted


def test_a_label_outside_the_draft_vocabulary_has_no_loss_and_ends_a_chain(oracle: dict[str, Any]) -> None:
    drafter, head, batch = oracle_drafter(oracle), oracle_head(oracle), oracle_batch(oracle)
    outside = int((~drafter.t2d).nonzero()[0])
    argmax = torch.full_like(batch.input_ids, outside)
    result = rollout(drafter, replace(batch, target_argmax=argmax), head, ttt_steps=3)
    assert result.loss.item() == 0
    assert result.step_counts.tolist() == [0, 0, 0]
    assert result.chain_accepted.item() == 0
    assert result.chain_starts.item() == 126  # of 76 + 50 answer tokens each is a label of a first step
    result.loss.backward()


def test_validation_gives_the_same_figures_without_a_gradient(oracle: dict[str, Any]) -> None:
    drafter, head, batch = oracle_drafter(oracle), oracle_head(oracle), oracle_batch(oracle)
    trained = rollout(drafter, batch, head)
    with torch.no_grad():
        validated = rollout(drafter, batch, head)
    assert not validated.loss.requires_grad
    for field in fields(Rollout):
        torch.testing.assert_close(getattr(validated, field.name), getattr(trained, field.name).detach())


def test_another_loss_has_another_gradient_and_the_same_figures(oracle: dict[str, Any]) -> None:
    batch, head = oracle_batch(oracle), oracle_head(oracle)
    drafters = {loss: oracle_drafter(oracle) for loss in ("kl", "lk")}
    results = {loss: rollout(drafter, batch, head, loss=loss) for loss, drafter in drafters.items()}
    for field in fields(Rollout):
        if field.name != "loss":
            assert torch.equal(*(getattr(result, field.name) for result in results.values())), field.name
    assert 0 < results["lk"].loss.item() < results["kl"].loss.item()  # 1 - alpha is the smaller part of the blend
    for result in results.values():
        result.loss.backward()
    kl, lk = (torch.cat([p.grad.flatten() for p in drafter.parameters()]) for drafter in drafters.values())
    assert 0 < torch.cosine_similarity(kl, lk, dim=0) < 0.999


def test_sampled_columns_are_unbiased(oracle: dict[str, Any]) -> None:
    drafter, head, batch = oracle_drafter(oracle), oracle_head(oracle), oracle_batch(oracle)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        exact = rollout(drafter, batch, head, ttt_steps=3)
        draws = [rollout(drafter, batch, head, ttt_steps=3, columns_share=0.4, generator=generator) for _ in range(60)]
    assert all(draw.step_counts[0] == exact.step_counts[0] for draw in draws)
    assert all(draw.step_counts[1] < exact.step_counts[1] for draw in draws)
    mean = torch.stack([draw.loss for draw in draws]).mean()
    assert mean.item() == pytest.approx(exact.loss.item(), rel=0.05)


def test_the_same_generator_draws_the_same_columns(oracle: dict[str, Any]) -> None:
    drafter, head, batch = oracle_drafter(oracle), oracle_head(oracle), oracle_batch(oracle)
    first, second, other = (
        rollout(drafter, batch, head, columns_share=0.3, generator=torch.Generator().manual_seed(seed)).loss
        for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_a_batch_without_answers_has_a_zero_gradient_for_every_parameter(oracle: dict[str, Any]) -> None:
    drafter, head, batch = oracle_drafter(oracle), oracle_head(oracle), oracle_batch(oracle)
    result = rollout(drafter, replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), head)
    result.loss.backward()
    assert all((parameter.grad == 0).all() for parameter in drafter.parameters())
    assert result.step_counts.tolist() == [0] * 7


def test_bfloat16_compute_gives_the_loss_to_a_percent(oracle: dict[str, Any]) -> None:
    drafter, head, batch = oracle_drafter(oracle), oracle_head(oracle), oracle_batch(oracle)
    argmax = (batch.last_hidden @ head.lm_head.T).argmax(-1)  # near ties would change which positions have a label
    batch = replace(batch, target_argmax=argmax)
    exact = rollout(drafter, batch, head).loss
    rounded = rollout(drafter, batch, head, compute_dtype=torch.bfloat16).loss
    assert rounded.item() == pytest.approx(exact.item(), rel=0.01)
    rounded.backward()
    assert {parameter.grad.dtype for parameter in drafter.parameters()} == {torch.float32}


def test_a_batch_of_unequal_columns_is_refused_by_name(oracle: dict[str, Any]) -> None:
    batch = oracle_batch(oracle)
    with pytest.raises(ValueError, match="aux_hidden has 191 rows, input_ids has 192"):
        replace(batch, aux_hidden=batch.aux_hidden[1:])
    with pytest.raises(ValueError, match="must rise from 0 to the 192 tokens"):
        replace(batch, cu_seqlens=torch.tensor([0, 96]))
