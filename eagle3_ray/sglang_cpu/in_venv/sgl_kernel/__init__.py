"""Stands in for the CPU build of sgl_kernel, which the public index does not carry.

Plain serving with torch_native attention imports many names from it and calls none. EAGLE-3 with chain drafts
(`--speculative-eagle-topk 1`) calls the functions defined here, by position; names and signatures are those of
sglang 0.5.23. Any other name can be imported, and says what is missing when it is called.

Everything is plain torch and loops over requests: exact and slow.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


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


# Attention, registered under torch.ops.sgl_kernel. Queries are [tokens, heads, head size].


def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    return scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )[0].transpose(0, 1)


def decode_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    _k_scale: object,
    _v_scale: object,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    locations: Tensor,
    _logits: Tensor,
    table: Tensor,
    requests: Tensor,
    lengths: Tensor,
    scale: float,
    *_unused: Any,
) -> None:
    """One new token a request: stores its key and value, then attends to all of the request's positions."""
    if k is not None and v is not None:
        k_buffer[locations] = k.view(-1, *k_buffer.shape[1:])
        v_buffer[locations] = v.view(-1, *v_buffer.shape[1:])
    for i, (request, length) in enumerate(per_request(requests, lengths)):
        rows = table[request, :length].long()
        out[i : i + 1] = attend(q[i : i + 1], k_buffer[rows], v_buffer[rows], scale)


def extend_attention(
    q: Tensor,
    _k: Tensor,
    _v: Tensor,
    out: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    _k_scale: object,
    _v_scale: object,
    table: Tensor,
    requests: Tensor,
    lengths: Tensor,
    new_lengths: Tensor,
    starts: Tensor,
    _max_new: int,
    scale: float,
    *_unused: Any,
) -> None:
    """Several new tokens a request, causal; SGLang has already stored their keys and values."""
    for request, length, new_length, start in per_request(requests, lengths, new_lengths, starts):
        rows = table[request, :length].long()
        causal = torch.arange(length)[None, :] <= torch.arange(length - new_length, length)[:, None]
        new = slice(start, start + new_length)
        out[new] = attend(q[new], k_buffer[rows], v_buffer[rows], scale, causal)


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
