"""Whether a sequence is what the target would say: its recorded log-probabilities against those of its states.

One wrong token anywhere before an answer token changes that token's log-probability. So this finds a stripped
`<think>`, a re-tokenised answer, another template or checkpoint, without knowing what any of them look like.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from eagle3_ray.target.protocol import CaptureError, States, TargetParts, TokenSequence

WINDOW = 8
FEWEST_FOR_ALL = 16
_VOCAB_CHUNK = 1 << 15
_ROW_CHUNK = 1 << 10


@dataclass(frozen=True)
class Score:
    """How well an answer of `tokens` tokens fits its states, which were computed in `dtype`.

    Differences are absolute, in nats, between recorded and recomputed log-probabilities: their mean, and the mean of
    the worst WINDOW neighbours. `relative_difference` is their sum over 1 + the sum of the tokens' doubts 1 - p:
    rounding moves a log-probability in proportion to its doubt, so this figure varies least between honest answers.
    They are None where nothing was recorded. `argmax_agreement` is the share of tokens that the target finds
    likeliest, `mean_logprob` their mean log-probability under the target.
    """

    tokens: int
    dtype: str
    greedy: bool
    mean_difference: float | None
    worst_window: float | None
    relative_difference: float | None
    argmax_agreement: float
    mean_logprob: float
    likeliest: torch.Tensor = field(repr=False, compare=False)
    """What the target finds likeliest in place of each of the tokens, int64 [tokens]: training asks for it, too."""


@dataclass(frozen=True)
class Limit:
    """Beyond any of these a sequence is not the target's own."""

    mean_difference: float
    worst_window: float
    relative_difference: float
    argmax_agreement: float  # at least so much, of greedy answers
    median_relative_difference: float  # of many sequences


@dataclass(frozen=True)
class OnPolicyLimits:
    """Limits by the dtype of the target's states.

    Of 120 honest answers of SmolLM2-135M from SGLang, 3 to 40 tokens, half greedy and half at 0.7, the worst were:

    | states from            | mean_difference | worst_window | relative_difference | argmax_agreement |
    | ---------------------- | --------------- | ------------ | ------------------- | ---------------- |
    | float32, SGLang        | 1.5e-5          | 1.5e-5       |                     | 1.0              |
    | float32, transformers  | 1.5e-5          | 1.5e-5       |                     | 1.0              |
    | bfloat16, SGLang       | 0.065           | 0.073        | 0.13                | 0.946            |
    | bfloat16, transformers | 0.046 (of 30)   | 0.094        |                     | 0.950            |

    In float32 every kind of corruption in tests/corruptions.py is found in every sequence tried, the mildest by a
    factor of 30. In bfloat16 a second BOS, a prompt that lacks its first tokens or its system message, or a sister
    checkpoint (2% noise in its weights) can hide in the rounding of one sequence; done to all of them they raise the
    median, which is what `reason_for_all` looks at. 1% of noise lies at its limit of 0.12: a median of 0.125 was seen.
    An engine that generates in another precision than the states are computed in (float8, int4) needs other limits.
    """

    float32: Limit = Limit(
        mean_difference=1e-3,
        worst_window=5e-3,
        relative_difference=1e-2,
        argmax_agreement=0.99,
        median_relative_difference=3e-3,
    )
    bfloat16: Limit = Limit(
        mean_difference=0.13,
        worst_window=0.2,
        relative_difference=0.3,
        argmax_agreement=0.85,
        median_relative_difference=0.12,
    )

    def reason(self, score: Score) -> str | None:
        """Why the sequence must not train, or None."""
        if score.tokens == 0:
            return "no answer token"
        limit = self.float32 if score.dtype == "float32" else self.bfloat16
        found = f"over {score.tokens} tokens"
        if score.mean_difference is not None and score.mean_difference > limit.mean_difference:
            return (
                f"log-probabilities differ from the recorded ones by {score.mean_difference:.3g} nats {found}, "
                f"limit {limit.mean_difference:g}"
            )
        if score.worst_window is not None and score.worst_window > limit.worst_window:
            return (
                f"log-probabilities of {WINDOW} neighbours differ from the recorded ones by {score.worst_window:.3g} "
                f"nats, limit {limit.worst_window:g}"
            )
        if score.relative_difference is not None and score.relative_difference > limit.relative_difference:
            return (
                f"log-probabilities differ from the recorded ones by {score.relative_difference:.3g} of the "
                f"tokens' doubt {found}, limit {limit.relative_difference:g}"
            )
        if score.greedy and score.argmax_agreement < limit.argmax_agreement:
            return (
                f"only {score.argmax_agreement:.1%} of a greedy answer are the target's first choice {found}, "
                f"limit {limit.argmax_agreement:.0%}"
            )
        return None

    def reason_for_all(self, scores: Collection[Score]) -> str | None:
        """Why all of these sequences are suspicious together, or None; fewer than FEWEST_FOR_ALL say nothing."""
        found = [score.relative_difference for score in scores if score.relative_difference is not None]
        if len(found) < FEWEST_FOR_ALL:
            return None
        limit = self.float32 if next(iter(scores)).dtype == "float32" else self.bfloat16
        if median(found) <= limit.median_relative_difference:
            return None
        return (
            f"half of {len(found)} sequences differ from their recorded log-probabilities by more than "
            f"{median(found):.3g} of the tokens' doubt, limit {limit.median_relative_difference:g}: all were generated "
            "with another template, BOS, checkpoint or precision than they are captured with"
        )


def on_policy(
    states: States,
    sequence: TokenSequence,
    recorded: Any,
    parts: TargetParts,
    *,
    temperature: float,
) -> Score:
    """Scores the answer of `sequence`; `recorded` are its log-probabilities [answer tokens], or None.

    sglang 0.5.23 (layers/sampler.py) records log_softmax(logits / temperature), before top-p and top-k, and of a greedy
    answer (temperature 0) log_softmax(logits). A server with SGLANG_RETURN_ORIGINAL_LOGPROB never divides: score its
    answers with temperature 1 or 0. Computes in float32 where `parts.lm_head` lies.

    Raises:
        CaptureError: states, ids and recorded values are not of one length, or a value is not finite.
    """
    answer = sequence.ids[sequence.prompt_tokens :]
    if len(states.last_hidden) != len(sequence.ids) or (recorded is not None and len(recorded) != len(answer)):
        raise CaptureError(
            f"Sequence {sequence.sequence_id}: {len(states.last_hidden)} states, {len(sequence.ids)} ids and "
            f"{'no' if recorded is None else len(recorded)} recorded log-probabilities of {len(answer)} answer tokens."
        )
    first = max(sequence.prompt_tokens, 1)  # nothing predicts the very first token
    labels = torch.from_numpy(sequence.ids[first:]).long()
    scale = temperature or 1.0
    logprobs, top = label_logprobs(states.last_hidden[first - 1 : -1], labels, parts, scale)
    mean_difference = worst = relative = None
    if recorded is not None and len(labels):
        said = torch.as_tensor(recorded, dtype=torch.float32)[first - sequence.prompt_tokens :]
        difference = (logprobs - said).abs()
        if not bool(torch.isfinite(difference).all()):
            raise CaptureError(f"Sequence {sequence.sequence_id}: a log-probability is not finite.")
        mean_difference = float(difference.mean())
        relative = float(difference.sum() / (1 + (1 - logprobs.exp()).sum()))
        worst = float(difference.unfold(0, min(WINDOW, len(difference)), 1).mean(dim=1).max())
    return Score(
        tokens=len(labels),
        dtype=str(states.last_hidden.dtype).removeprefix("torch."),
        greedy=temperature == 0,
        mean_difference=mean_difference,
        worst_window=worst,
        relative_difference=relative,
        argmax_agreement=float((top == labels).float().mean()) if len(labels) else 1.0,
        mean_logprob=float(logprobs.mean()) if len(labels) else 0.0,
        likeliest=top,
    )


def label_logprobs(
    last_hidden: torch.Tensor, labels: torch.Tensor, parts: TargetParts, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Post-norm states [n, H] and the tokens that follow [n] -> their log-probabilities and the likeliest tokens, [n].

    float32 on the CPU. The logits [n, V] never exist whole: rows and vocabulary are taken in chunks.
    """
    head = parts.lm_head
    cap = parts.config.get("final_logit_softcapping")
    logprobs, tops = [], []
    for rows, row_labels in zip(last_hidden.split(_ROW_CHUNK), labels.split(_ROW_CHUNK), strict=True):
        if not len(rows):
            continue
        x, wanted = rows.to(head.device, torch.float32), row_labels.to(head.device)
        norms, best, arg, own = [], [], [], torch.empty(len(x), device=head.device)
        for start in range(0, len(head), _VOCAB_CHUNK):
            logits = x @ head[start : start + _VOCAB_CHUNK].float().T
            if cap:
                logits = torch.tanh(logits / cap) * cap
            logits /= temperature
            norms.append(logits.logsumexp(dim=1))
            value, index = logits.max(dim=1)
            best.append(value)
            arg.append(index + start)
            here = (wanted >= start) & (wanted < start + logits.shape[1])
            own[here] = logits[here, wanted[here] - start]
        logprobs.append((own - torch.stack(norms).logsumexp(dim=0)).cpu())
        winner = torch.stack(best).argmax(dim=0, keepdim=True)
        tops.append(torch.stack(arg).gather(0, winner)[0].cpu())
    if not logprobs:
        return torch.empty(0), torch.empty(0, dtype=torch.long)
    return torch.cat(logprobs), torch.cat(tops)
