"""Step time and peak memory of the training-time test against specforge 0.2.0's, same weights and batch, one run.

    pip install --no-deps --target SOMEWHERE specforge==0.2.0 triton
    PYTHONPATH=SOMEWHERE python benchmarks/train_step.py

Hidden size 576, vocabulary 49,152, draft vocabulary 8,192, 7 steps, 2 sequences of 1,024 tokens with 300 prompt tokens
each. Every label is in the draft vocabulary, so that neither side is spared any work. Each side runs in a process of
its own. The loss is the published mask's, which is the rival's.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.drafter.initialise import set_vocabulary
from eagle3_ray.drafter.model import Eagle3Drafter
from eagle3_ray.drafter.packed import PackedBatch
from eagle3_ray.drafter.rollout import TargetHead, rollout
from eagle3_ray.drafter.vocabulary import DraftVocabulary

SEQUENCES, LENGTH, PROMPT, STEPS, DECAY = 2, 1024, 300, 7, 0.8
VOCAB, DRAFT_VOCAB, HIDDEN = 49152, 8192, 576
TARGET = {
    "hidden_size": HIDDEN,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "vocab_size": VOCAB,
}
SIDES = {"ours_fp32": torch.float32, "ours_bf16": torch.bfloat16, "rival": torch.float32}


def problem() -> tuple[Eagle3Drafter, PackedBatch, TargetHead]:
    torch.manual_seed(0)
    tokens = SEQUENCES * LENGTH
    drafter = Eagle3Drafter(DrafterConfig.from_target(TARGET, draft_vocab_size=DRAFT_VOCAB))
    # Tokens 1 and on are drafted: token 0 stands for "past the end" in the rival, which would be taught it.
    set_vocabulary(drafter, DraftVocabulary.inherited(torch.ones(DRAFT_VOCAB, dtype=torch.int64), VOCAB))
    lm_head = torch.randn(VOCAB, HIDDEN) * 0.05
    said = torch.randint(1, DRAFT_VOCAB + 1, (tokens,))  # by the target: always in the draft vocabulary
    lm_head[DRAFT_VOCAB + 1 :] *= 0.5
    batch = PackedBatch(
        input_ids=torch.randint(0, VOCAB, (tokens,)),
        aux_hidden=torch.randn(tokens, 3 * HIDDEN),
        last_hidden=lm_head[said] * 10,
        cu_seqlens=torch.arange(0, tokens + 1, LENGTH),
        loss_mask=(torch.arange(LENGTH) >= PROMPT).repeat(SEQUENCES),
    )
    return drafter, batch, TargetHead(torch.randn(VOCAB, HIDDEN) * 0.1, lm_head)


def our_step(dtype: torch.dtype) -> Callable[[], float]:
    drafter, batch, head = problem()
    head = TargetHead(head.embed_tokens.to(dtype), head.lm_head.to(dtype))

    def step() -> float:
        drafter.zero_grad()
        result = rollout(drafter, batch, head, STEPS, DECAY, published_mask=True, compute_dtype=dtype)
        loss = result.loss / len(batch.input_ids)
        loss.backward()
        return loss.item()

    return step


class TorchLoss:
    """The rival's loss without its Triton kernel, which needs a GPU: mean over positions of masked cross entropy."""

    @staticmethod
    def apply(logits: Tensor, target_p: Tensor, position_mask: Tensor) -> Tensor:
        return -(position_mask * target_p * logits.float().log_softmax(-1)).sum(-1).mean()


def rival_step() -> Callable[[], float]:
    import specforge.algorithms.eagle3.model as rival
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    rival.LogSoftmaxLoss = TorchLoss
    drafter, batch, head = problem()
    config = drafter.config.to_json()
    del config["norm_output"]  # false means no norm before the head there; in SGLang, and here, that norm is always
    theirs = LlamaForCausalLMEagle3(LlamaConfig(**config), attention_backend="sdpa")
    weights = {k: v for k, v in drafter.state_dict().items() if k != "aux_scale"}
    missing = theirs.load_state_dict(weights | {"embed_tokens.weight": head.embed_tokens}, strict=False)
    if missing.missing_keys or missing.unexpected_keys:
        raise RuntimeError(f"specforge's model has other tensors than ours: {missing}")
    theirs.embed_tokens.weight.requires_grad_(False)
    model = OnlineEagle3Model(theirs, length=STEPS, attention_backend="sdpa")

    def rows(x: Tensor) -> Tensor:
        return x.view(SEQUENCES, LENGTH, *x.shape[1:])

    def shifted(x: Tensor) -> Tensor:
        return torch.cat((rows(x)[:, 1:], torch.zeros_like(rows(x)[:, :1])), dim=1)

    def step() -> float:
        model.zero_grad()
        losses = model(
            input_ids=shifted(batch.input_ids),
            attention_mask=torch.ones(SEQUENCES, LENGTH),
            target=shifted(batch.last_hidden) @ head.lm_head.T,
            loss_mask=rows(batch.loss_mask).int()[..., None],
            hidden_states=rows(batch.aux_hidden),
        )[0]
        loss = torch.stack([step_loss * DECAY**i for i, step_loss in enumerate(losses)]).sum()
        loss.backward()
        return loss.item()

    return step


def measure(side: str, repeats: int) -> dict[str, float]:
    """Best of `repeats` after one step to warm up; memory is the growth of the peak over the problem itself."""
    step = rival_step() if side == "rival" else our_step(SIDES[side])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss, wall, cpu = step(), [], []
    for _ in range(repeats):
        started = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - started[0])
        cpu.append(time.process_time() - started[1])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"loss": loss, "step_s": min(wall), "cpu_s": min(cpu), "peak_mb": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.side:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
        print(json.dumps(measure(arguments.side, arguments.repeats)))
        return
    sides = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, "--repeats", str(arguments.repeats)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        sides[side] = json.loads(output.splitlines()[-1])
    rival = sides["rival"]
    ratios = {
        f"{side}_{name}": rival[field] / sides[side][field]
        for side in ("ours_fp32", "ours_bf16")
        for name, field in (("times_faster", "step_s"), ("times_less_cpu", "cpu_s"), ("times_less_memory", "peak_mb"))
    }
    difference = abs(sides["ours_fp32"]["loss"] - rival["loss"])
    print(json.dumps({"benchmark": "train_step", **ratios, "loss_difference": difference, **sides}))


if __name__ == "__main__":
    main()
