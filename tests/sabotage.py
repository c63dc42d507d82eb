"""Ways in which a capture of hidden states goes wrong in practice, done to a real one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from eagle3_ray.target.protocol import States, Target, TargetParts, TokenSequence
from eagle3_ray.target.transformers_backend import TransformersTarget

Change = Callable[[list[States], Sequence[TokenSequence]], list[States]]


class Sabotaged:
    """`target`, with `change` done to whatever it captures."""

    def __init__(self, target: Target, change: Change) -> None:
        self.layers = target.layers
        self._target = target
        self._change = change

    def capture(self, sequences: Sequence[TokenSequence]) -> list[States]:
        return self._change(self._target.capture(sequences), sequences)

    def prefill(self, sequences: Sequence[TokenSequence]) -> None:
        self._target.prefill(sequences)

    def close(self) -> None:
        self._target.close()


def rows(states: States, keep: slice) -> States:
    return replace(states, aux_hidden=states.aux_hidden[keep], last_hidden=states.last_hidden[keep])


def swapped_sequences(found: list[States], asked: Sequence[TokenSequence]) -> list[States]:
    """The engine's answers come back in another order, under the names that were asked for."""
    return [replace(s, sequence_id=q.sequence_id) for s, q in zip(reversed(found), asked, strict=True)]


def shifted_rows(found: list[States], _asked: Sequence[TokenSequence]) -> list[States]:
    """Offsets into the packed batch are off by one row from the second sequence on."""
    moved = [replace(s, aux_hidden=s.aux_hidden.clone(), last_hidden=s.last_hidden.clone()) for s in found]
    for before, after in zip(found, moved[1:], strict=False):
        after.aux_hidden[:] = torch.cat([before.aux_hidden[-1:], after.aux_hidden[:-1]])
        after.last_hidden[:] = torch.cat([before.last_hidden[-1:], after.last_hidden[:-1]])
    return moved


def one_for_all(found: list[States], asked: Sequence[TokenSequence]) -> list[States]:
    return [replace(found[0], sequence_id=q.sequence_id) for q in asked]


def last_chunk_only(found: list[States], _asked: Sequence[TokenSequence]) -> list[States]:
    return [rows(s, slice(len(s.last_hidden) // 2, None)) for s in found]


def cache_hits() -> Change:
    """What was captured before comes from the prefix cache: its rows are not computed again."""
    seen: set[bytes] = set()

    def change(found: list[States], asked: Sequence[TokenSequence]) -> list[States]:
        cut = [rows(s, slice(-1, None)) if q.ids.tobytes() in seen else s for s, q in zip(found, asked, strict=True)]
        seen.update(q.ids.tobytes() for q in asked)
        return cut

    return change


def two_layers(found: list[States], _asked: Sequence[TokenSequence]) -> list[States]:
    return [replace(s, aux_hidden=s.aux_hidden[:, : s.last_hidden.shape[1] * 2]) for s in found]


def a_layer_twice(found: list[States], _asked: Sequence[TokenSequence]) -> list[States]:
    return [
        replace(s, aux_hidden=torch.cat([s.aux_hidden.chunk(3, dim=1)[k] for k in (0, 1, 1)], dim=1)) for s in found
    ]


def last_for_a_layer(found: list[States], _asked: Sequence[TokenSequence]) -> list[States]:
    return [replace(s, aux_hidden=torch.cat([*s.aux_hidden.chunk(3, 1)[:2], s.last_hidden], dim=1)) for s in found]


CHANGES: dict[str, Callable[[], Change]] = {
    "sequences swapped": lambda: swapped_sequences,
    "rows shifted": lambda: shifted_rows,
    "one for all": lambda: one_for_all,
    "chunked prefill": lambda: last_chunk_only,
    "cache hits": cache_hits,
    "two layers": lambda: two_layers,
    "a layer twice": lambda: a_layer_twice,
    "the last state for a layer": lambda: last_for_a_layer,
}


def off_by_one(folder: Path, layers: tuple[int, ...], number: int, by: int, dtype: str) -> Target:
    """A target that says `layers` and captures the neighbour of one of them."""
    wrong = tuple(layer + by * (n == number) for n, layer in enumerate(layers))
    target = Sabotaged(TransformersTarget(folder, wrong, dtype, device="cpu"), lambda found, _asked: found)
    target.layers = layers
    return target


def before_the_norm(folder: Path, layers: tuple[int, ...], dtype: str) -> Target:
    """A target whose last state did not go through the final norm."""
    target = TransformersTarget(folder, layers, dtype, device="cpu")
    target._decoder.norm = torch.nn.Identity()
    return target


def other_head(parts: TargetParts) -> TargetParts:
    """The head of a fine-tuned sister: 3% noise."""
    torch.manual_seed(0)
    noise = torch.randn_like(parts.lm_head.float()) * parts.lm_head.float().std() * 0.03
    return replace(parts, lm_head=(parts.lm_head.float() + noise).to(parts.lm_head.dtype))
