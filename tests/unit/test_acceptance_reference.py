"""The reference decoder, on a toy target of four tokens whose every probability is known, and on a small Llama."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_ray.acceptance.reference import CachedTransformers, Choose, decode, decode_plainly

V = 4
DRAFT_IDS = torch.tensor([0, 2, 3])  # the drafter never proposes token 1
DRAWS, LENGTH = 1000, 3
RARE = 5  # answers expected less often are counted together: chi-square needs full cells


class ToyTarget:
    """The logits behind a token are its row of a table; the aux_hidden of a position is the token itself."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.tokens: list[int] = []

    def read(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        self.tokens += ids
        return self.table[list(ids)], torch.tensor(ids)[:, None].float()

    def forget(self, length: int) -> None:
        del self.tokens[length:]


def toy_drafter(table: torch.Tensor) -> Callable[..., tuple[list[int], torch.Tensor]]:
    """Drafts by a table [V, Vd] of its own; checks that it is told the states of all tokens but the newest."""

    def propose(
        aux_hidden: torch.Tensor, input_ids: torch.Tensor, steps: int, choose: Choose
    ) -> tuple[list[int], torch.Tensor]:
        assert aux_hidden[:, 0].tolist() == input_ids[:-1].tolist()
        token, drafts, logits = int(input_ids[-1]), [], []
        for _ in range(steps):
            logits.append(table[token])
            token = int(DRAFT_IDS[choose(table[token])])
            drafts.append(token)
        return drafts, torch.stack(logits)

    return propose


@pytest.fixture
def tables() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(V, V, generator=generator), torch.randn(V, len(DRAFT_IDS), generator=generator)


def p_value(table: torch.Tensor, temperature: float, answers: Sequence[tuple[int, ...]]) -> float:
    """Chi-square test of the answers against the product of the table's probabilities along each answer."""
    p = (table.double() / temperature).softmax(-1)
    cells: dict[tuple[int, ...], float] = {}
    for answer in itertools.product(range(V), repeat=LENGTH):
        expected = math.prod(float(p[a, b]) for a, b in itertools.pairwise((0, *answer))) * len(answers)
        cell = answer if expected >= RARE else ()
        cells[cell] = cells.get(cell, 0.0) + expected
    seen = Counter(answer if answer in cells else () for answer in answers)
    statistic = sum((seen[cell] - expected) ** 2 / expected for cell, expected in cells.items())
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def sample(tables: tuple[torch.Tensor, torch.Tensor], temperature: float, steps: int) -> list[tuple[int, ...]]:
    target, generator = ToyTarget(tables[0]), torch.Generator().manual_seed(steps)
    return [
        tuple(
            decode(
                target,
                toy_drafter(tables[1]),
                DRAFT_IDS,
                [3, 0],
                steps=steps,
                max_new_tokens=LENGTH,
                stop_ids=(),
                temperature=temperature,
                generator=generator,
            ).output_ids
        )
        for _ in range(DRAWS)
    ]


@pytest.mark.parametrize(("temperature", "steps"), [(1.0, 1), (1.0, 3), (0.6, 2)])
def test_sampled_answers_are_distributed_as_the_targets_own(
    tables: tuple[torch.Tensor, torch.Tensor], temperature: float, steps: int
) -> None:
    assert p_value(tables[0], temperature, sample(tables, temperature, steps)) > 0.01


def test_the_chi_square_sees_a_temperature_that_is_a_little_off(tables: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert p_value(tables[0], 1.2, sample(tables, 1.0, 2)) < 1e-6


def test_greedy_output_is_the_targets_argmax_whatever_the_drafter_says(
    tables: tuple[torch.Tensor, torch.Tensor],
) -> None:
    target = ToyTarget(tables[0])
    for start, steps in itertools.product(range(V), (1, 2, 5)):
        decoded = decode(target, toy_drafter(tables[1]), DRAFT_IDS, [start], steps=steps, max_new_tokens=9, stop_ids=())
        token, by_hand = start, []
        for _ in range(9):
            token = int(tables[0][token].argmax())
            by_hand.append(token)
        assert decoded.output_ids == by_hand


def test_a_perfect_drafter_has_every_draft_accepted_and_a_stop_token_ends_the_answer() -> None:
    next_token = torch.full((V, V), -9.0)
    next_token[[0, 1, 2, 3], [2, 0, 3, 0]] = 9.0  # 0 -> 2 -> 3 -> 0 -> ...
    drafter = toy_drafter(next_token[:, DRAFT_IDS])
    decoded = decode(ToyTarget(next_token), drafter, DRAFT_IDS, [0], steps=3, max_new_tokens=9, stop_ids=())
    assert decoded.output_ids == [2, 3, 0, 2, 3, 0, 2, 3, 0]
    assert decoded.accepted == [3, 3]  # the prefill's token, then 4 tokens a step
    assert decoded.acceptance.length == 4.0
    stopped = decode(ToyTarget(next_token), drafter, DRAFT_IDS, [0], steps=5, max_new_tokens=9, stop_ids=[3])
    assert stopped.output_ids == [2, 3]
    assert stopped.accepted == [5]
    assert stopped.acceptance.length == 1.0


def test_a_stop_token_out_of_the_prefill_ends_the_answer_without_a_verify_step() -> None:
    table = torch.eye(V)
    decoded = decode(ToyTarget(table), toy_drafter(table[:, DRAFT_IDS]), DRAFT_IDS, [2], steps=2, max_new_tokens=5,
                     stop_ids=[2])  # fmt: skip
    assert (decoded.output_ids, decoded.accepted) == ([2], [])


def test_on_a_llama_cached_reading_gives_what_one_forward_gives_and_decoding_equals_transformers(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, vocab_size=50,
        initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    target = CachedTransformers(tmp_path, layers=(2, 3, 3))
    prompt = [7, 11, 13, 17]

    target.read([*prompt, 5, 6])
    target.forget(4)
    logits, aux_hidden = target.read([19, 23])
    whole = target.model(torch.tensor([[*prompt, 19, 23]]), output_hidden_states=True)
    torch.testing.assert_close(logits, whole.logits[0, 4:], atol=1e-5, rtol=1e-5)
    expected = torch.cat([whole.hidden_states[layer][0, 4:] for layer in (2, 3, 3)], dim=-1)
    torch.testing.assert_close(aux_hidden, expected, atol=1e-5, rtol=1e-5)

    noise = torch.Generator().manual_seed(1)

    def propose(
        aux_hidden: torch.Tensor, input_ids: torch.Tensor, steps: int, choose: Choose
    ) -> tuple[list[int], torch.Tensor]:
        logits = torch.randn(steps, 50, generator=noise)
        return [choose(row) for row in logits], logits

    greedy = target.model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 4:].tolist()
    assert decode_plainly(target, prompt, max_new_tokens=20, stop_ids=()) == greedy
    decoded = decode(target, propose, torch.arange(50), prompt, steps=3, max_new_tokens=20, stop_ids=())
    assert decoded.output_ids == greedy
