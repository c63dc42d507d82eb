"""Stands in for the CPU build of sgl_kernel, which the public index does not carry.

SGLang imports many names from it. Those defined here are called, by position: matrix products and attention by all
serving (`../launch.py` sees to that), the rest by EAGLE-3 with chain drafts (`--speculative-eagle-topk 1`). Names and
signatures are those of sglang 0.5.23. Any other name can be imported, and says what is missing when it is called.

Everything is torch's own operators, called from Python. In each of a model's layers the batch is therefore the unit,
since a call costs as much as the work on one request; the bookkeeping, once a step, loops over requests.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

USUAL_BATCH = 32
"""Rows for which oneDNN chooses a weight's layout; others may use it too."""
GROUP_ROWS = 2048
"""Cache rows gathered at once; for SmolLM2 in float32, 3 MB of keys and values."""


def per_request(*columns: Tensor) -> Iterator[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


# Bookkeeping of the KV cache. `table` maps a request's positions to cache rows, [requests, positions].


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, starts: Tensor, ends: Tensor, locations: Tensor, _pool_len: int
) -> None:
    """Enters newly allocated cache rows into the table, request after request."""
    taken = 0
    for request, start, end in per_request(requests, starts, ends):
        table[request, start:end] = locations[taken : taken + end - start].to(table.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    requests: Tensor, table: Tensor, starts: Tensor, ends: Tensor, out: Tensor, _pool_len: int
) -> None:
    """Reads the cache rows of each request's new positions, laid end to end."""
    filled = 0
    for request, start, end in per_request(requests, starts, ends):
        out[filled : filled + end - start] = table[request, start:end].to(out.dtype)
        filled += end - start


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, table: Tensor, lengths: Tensor, out: Tensor, _pool_len: int, topk: int, steps: int
) -> None:
    """Reads the cache rows that the draft steps of each request may fill."""
    width = topk * steps
    for i, (request, length) in enumerate(per_request(requests, lengths)):
        out[i * width : (i + 1) * width] = table[request, length : length + width].to(out.dtype)


def build_draft_decode_metadata_cpu(
    table: Tensor, requests: Tensor, lengths: Tensor, topk: int, steps: int, _pool_len: int
) -> Tensor:
    """One table row a draft branch: the request's own positions, then the branch's draft positions."""
    rows = []
    for request, length in per_request(requests, lengths):
        for branch in range(topk):
            row = table[request].clone()
            first = length + branch * steps
            row[length : length + steps] = table[request, first : first + steps]
            rows.append(row)
    return torch.stack(rows)


def copy_all_layer_kv_cache_cpu(pointers: Tensor, strides: Tensor, destinations: Tensor, sources: Tensor) -> None:
    """Moves cache rows inside each layer's buffer; all sources are read before the first write, as ranges overlap."""
    for pointer, stride in per_request(pointers, strides):
        rows = [ctypes.string_at(pointer + source * stride, stride) for source in sources.tolist()]
        for destination, row in zip(destinations.tolist(), rows, strict=True):
            ctypes.memmove(pointer + destination * stride, row, stride)


# Drafting and verification. A chain is a tree in which every node has one child.


def build_tree_kernel_efficient_cpu(
    _parents: Tensor,
    _selected: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    _depth: int,
    drafts: int,
    _mask_mode: int,
) -> None:
    """Describes the chain: each draft token follows the one before and attends to all before it and to itself."""
    if topk != 1:
        raise NotImplementedError("the CPU stand-in drafts chains only: use --speculative-eagle-topk 1")
    batch = lengths.numel()
    steps = torch.arange(drafts)
    index.view(batch, drafts).copy_(torch.arange(batch)[:, None] * drafts + steps)
    children = steps + 1
    children[-1] = -1
    next_token.view(batch, drafts).copy_(children.expand(batch, -1))
    next_sibling.fill_(-1)
    positions.view(batch, drafts).copy_(lengths[:, None] + steps)
    mask.view(-1)[: batch * drafts * drafts].view(batch, drafts, drafts).copy_(steps[None, :] <= steps[:, None])


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accepts each chain's longest prefix that is the target's argmax, and the target's own token after it.

    SGLang passes these by keyword, its spelling included.
    """
    batch, drafts = candidates.shape
    wanted = target_predict.reshape(batch, drafts).to(predicts.dtype)
    out = predicts.view(-1)
    for row in range(batch):
        accepted = 0
        while accepted + 1 < accept_index.shape[1] and candidates[row, accepted + 1] == wanted[row, accepted]:
            accepted += 1
        nodes = retrive_index[row, : accepted + 1]
        accept_index[row, : accepted + 1] = nodes.to(accept_index.dtype)
        out[nodes.long()] = wanted[row, : accepted + 1]
        accept_token_num[row] = accepted


def fill_bonus_tokens_cpu(accepted: Tensor, counts: Tensor, bonus: Tensor, stride: int) -> None:
    """Picks each request's last accepted token, the one that the next draft starts from."""
    last = torch.arange(counts.numel()) * stride + counts.long() - 1
    bonus.copy_(accepted.reshape(-1)[last].to(bonus.dtype))


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, locations: Tensor, out: Tensor) -> None:
    """Gathers the cache rows of the accepted tokens."""
    kept = accept_index.reshape(-1)
    kept = kept[kept >= 0].long()
    out[: kept.numel()] = locations[kept].to(out.dtype)


# Operators, registered under torch.ops.sgl_kernel.


def weight_packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, _vnni: bool) -> Tensor:
    """A matrix product with float32 weights in oneDNN's own layout: for few rows it takes half of torch's time.

    The layout is made at a weight's first use and kept with it: new numbers written into a used weight go unseen.
    """
    if weight.dtype != torch.float32:
        return linear(x, weight, bias)
    if not hasattr(weight, "packed"):
        weight.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), USUAL_BATCH)
    return torch.ops.mkldnn._linear_pointwise(x, weight.packed, bias, "none", [], "")


@dataclass(frozen=True)
class Group:
    """Requests that attend in one call: as many new tokens each, and contexts of about one length."""

    tokens: Tensor
    """Places of the new tokens in the batch, [requests * new]."""
    rows: Tensor
    """Cache rows of the contexts, each padded to the longest with whatever the table holds, [requests * longest]."""
    bias: Tensor
    """0 where a new token sees a position, -inf elsewhere, [requests, 1, new, longest]."""


def group_members(lengths: list[int], new_lengths: list[int]) -> list[list[int]]:
    """Sorted, so that little is padding; small, so that gathered keys still stand in the CPU's cache when used."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (new_lengths[i], lengths[i])):
        if groups and new_lengths[groups[-1][0]] == new_lengths[i] and (len(groups[-1]) + 1) * lengths[i] <= GROUP_ROWS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def build_group(members: list[int], rows: Tensor, lengths: Tensor, new_lengths: Tensor, starts: Tensor) -> Group:
    longest, new = int(lengths[members].max()), int(new_lengths[members[0]])
    steps = torch.arange(new)
    seen = lengths[members, None] - new + 1 + steps
    hidden = torch.arange(longest) >= seen[:, :, None]
    return Group(
        tokens=(starts[members, None] + steps).flatten(),
        rows=rows[members, :longest].flatten(),
        bias=torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[:, None],
    )


class Grouping:
    """The groups of the batch at hand: each of its layers asks for the same ones, and only the first pays for them."""

    def __init__(self) -> None:
        self._batch: tuple[Tensor, ...] = ()
        self._groups: list[Group] = []

    def __call__(
        self, table: Tensor, requests: Tensor, lengths: Tensor, new_lengths: Tensor, starts: Tensor
    ) -> list[Group]:
        rows = table[:, : int(lengths.max())].index_select(0, requests)
        batch = (rows, lengths, new_lengths, starts)
        if not (self._batch and all(map(torch.equal, batch, self._batch))):
            self._batch = tuple(part.clone() for part in batch)  # SGLang writes into its own ones
            self._groups = [
                build_group(members, *batch) for members in group_members(lengths.tolist(), new_lengths.tolist())
            ]
        return self._groups


groups_of = Grouping()


def attend(q: Tensor, k_buffer: Tensor, v_buffer: Tensor, out: Tensor, groups: list[Group], scale: float) -> None:
    heads, kv_heads = q.shape[1], k_buffer.shape[1]
    for group in groups:
        requests, _, new, longest = group.bias.shape
        queries = q.index_select(0, group.tokens).view(requests, new, heads, -1).transpose(1, 2)
        if new == 1:  # the query heads of one key head become its rows: fewer, larger products
            queries = queries.reshape(requests, kv_heads, heads // kv_heads, -1)
        answers = scaled_dot_product_attention(
            queries,
            k_buffer.index_select(0, group.rows).view(requests, longest, kv_heads, -1).transpose(1, 2),
            v_buffer.index_select(0, group.rows).view(requests, longest, kv_heads, -1).transpose(1, 2),
            attn_mask=group.bias,
            scale=scale,
            enable_gqa=True,
        )
        out[group.tokens] = answers.reshape(requests, heads, new, -1).transpose(1, 2).flatten(0, 1)


def decode_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    _k_scale: float,
    _v_scale: float,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    locations: Tensor,
    _logits: Tensor,
    table: Tensor,
    requests: Tensor,
    lengths: Tensor,
    scale: float,
    *variants: Any,
) -> None:
    """One new token a request: stores its key and value, then attends to all of the request's positions."""
    refuse(*variants)
    if k is not None and v is not None:
        k_buffer[locations] = k.view(-1, *k_buffer.shape[1:])
        v_buffer[locations] = v.view(-1, *v_buffer.shape[1:])
    groups = groups_of(table, requests, lengths, torch.ones_like(lengths), torch.arange(lengths.numel()))
    attend(q, k_buffer, v_buffer, out, groups, scale)


def extend_attention(
    q: Tensor,
    _k: Tensor,
    _v: Tensor,
    out: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    _k_scale: float,
    _v_scale: float,
    table: Tensor,
    requests: Tensor,
    lengths: Tensor,
    new_lengths: Tensor,
    starts: Tensor,
    _max_new: int,
    scale: float,
    *variants: Any,
) -> None:
    """Several new tokens a request, causal; SGLang has already stored their keys and values."""
    refuse(*variants)
    groups = groups_of(table, requests, lengths, new_lengths, starts)
    attend(q, k_buffer, v_buffer, out, groups, scale)


def refuse(
    logit_cap: float,
    cross_attention: bool,
    window: int,
    _encoder_lengths: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None = None,
    causal: bool = True,
) -> None:
    """Attention here is plain and causal. What a model asks for beyond that would otherwise be left out in silence."""
    if logit_cap or cross_attention or window or sinks is not None or tree_mask is not None or not causal:
        raise NotImplementedError(
            "the CPU stand-in has plain causal attention only: serve this model with --attention-backend torch_native"
        )


torch.ops.sgl_kernel.weight_packed_linear = weight_packed_linear
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is not in the CPU stand-in: leave out the SGLang option that needs it."
        )

    return missing
