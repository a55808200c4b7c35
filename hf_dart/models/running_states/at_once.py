"""Convolutions and gated delta rules over a whole token tree in one call, as functions of tensors.

The delta rule [1, 2] of node i, with state S of the text before, decay exp(g), rate beta and correction u,

    S_i = exp(g_i) S_parent + k_i u_i,    u_i = beta_i (v_i - k_i exp(g_i) S_parent),    o_i = q_i S_i,

is unrolled along paths. With D_ij = exp(sum of g after j up to i) where j is i or an ancestor of it, else 0, and D_i
that from the text on,

    (1 + beta_i [k_i k_j D_ij], j above i) u = beta_i (v_i - k_i D_i S),    o_i = q_i D_i S + sum_j q_i k_j D_ij u_j:

one triangular solve, since parents come before their children.

[1] Yang, Wang, Zhang, Shen, Kim: Parallelizing Linear Transformers with the Delta Rule over Sequence Length (2024).
[2] Yang, Kautz, Hatamizadeh: Gated Delta Networks (2024).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from hf_dart.cache.states import After
from hf_dart.trees.tree import TreePaths


def convolution(
    inputs: Tensor,  # [B, N, C]
    text: Tensor,  # [B, C, W] the last inputs before the tree
    paths: TreePaths,
    weight: Tensor,  # [C, 1, K], K <= W + 1
    bias: Tensor | None,  # [C]
    activation: str | None = None,
) -> tuple[Tensor, After]:
    """Compute a causal convolution of each channel [B, N, C]: every node over the window that its path leaves."""
    (batch, nodes), (channels, width) = paths.parents.shape, text.shape[1:]
    here = inputs.transpose(1, 2).to(text.dtype)
    places = paths.windows(width).view(batch, 1, -1).expand(-1, channels, -1)
    before = torch.cat([text, here], dim=-1).gather(2, places).view(batch, channels, nodes, width)
    windows = torch.cat([before, here[..., None]], dim=-1).transpose(1, 2)  # [B, N, C, W + 1]
    last = windows[..., -weight.shape[-1] :].flatten(0, 1).to(weight.dtype)
    mixed = F.conv1d(last, weight, bias, groups=channels)
    if activation is not None:
        mixed = ACT2FN[activation](mixed)

    def after(at: Tensor) -> Tensor:
        return windows[torch.arange(batch, device=text.device), at.to(text.device), :, 1:]

    return mixed.view(batch, nodes, channels).to(inputs.dtype), after


def delta_rule(
    query: Tensor,  # [B, N, H / g, K]
    key: Tensor,  # [B, N, H / g, K]
    value: Tensor,  # [B, N, H, V]
    log_decay: Tensor,  # [B, N, H] of heads, or [B, N, H, K] of their channels
    rate: Tensor,  # [B, N, H]
    text: Tensor,  # [B, H, K, V] the state before the tree
    paths: TreePaths,
) -> tuple[Tensor, After]:
    """Compute a gated delta rule [B, N, H, V] over normalised queries and keys.

    In float32 (or wider, if the queries are), as the models' own, also under autocast.
    """
    with torch.autocast(text.device.type, enabled=False):
        dtype = torch.promote_types(query.dtype, torch.float32)
        (batch, nodes), heads, given = paths.parents.shape, value.shape[2], query.dtype
        query, key = (part.to(dtype) for part in (query, key))
        query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        query = query * query.shape[-1] ** -0.5
        query, key = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (query, key))
        query, key, value = (part.to(dtype).transpose(1, 2) for part in (query, key, value))  # [B, H, N, ...]
        rates, logs = rate.to(dtype).transpose(1, 2)[..., None], log_decay.to(dtype).reshape(batch, nodes, heads, -1)
        seen, state = paths.ancestors, text.to(dtype)
        # Sums over each stretch of a path by itself: differences of sums from the text on would cancel.
        decays = (paths.between.flatten(1, 2).to(dtype) @ logs.flatten(2)).exp()
        decays = decays.view(batch, nodes, nodes, heads, -1).permute(0, 3, 1, 2, 4) * seen[:, None, :, :, None]
        from_text = (seen.to(dtype) @ logs.flatten(2)).exp().view(batch, nodes, heads, -1).transpose(1, 2)
        if decays.shape[-1] == 1:
            corrections, reads = (part @ key.mT * decays[..., 0] for part in (key * rates, query))
        else:
            decayed = key[:, :, None] * decays
            corrections, reads = ((decayed @ part[..., None])[..., 0] for part in (key * rates, query))
        old = rates * (value - (key * from_text) @ state)
        new = torch.linalg.solve_triangular(corrections, old, upper=False, unitriangular=True)
        outputs = (query * from_text) @ state + reads @ new

    def after(at: Tensor) -> Tensor:
        with torch.autocast(text.device.type, enabled=False):
            above = seen[torch.arange(batch, device=text.device), at.to(text.device)]
            between = (above[:, None] & ~seen).to(dtype)  # [B, N, N], as those of the paths at this node
            decays = (between @ logs.flatten(2)).exp().view(logs.shape) * above[..., None, None]
            from_text = (above[:, None].to(dtype) @ logs.flatten(2)).exp().view(batch, *logs.shape[2:], 1)
            return (state * from_text + (key * decays.transpose(1, 2)).mT @ new).to(text.dtype)

    return outputs.transpose(1, 2).to(given), after
