"""Triton kernels of a captured round. Imported only where Triton is, by what calls them."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
# What a hidden score is: far below any, and differences of two of them are numbers.
_HIDDEN: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def _attended(q, k, v, seen, scale, best, total, mixed, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """One step of an online softmax: the greatest score, the weights' sum and the mixed values, with a block more."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC) * scale
    scores = tl.where(seen, scores, _HIDDEN)
    peak = tl.maximum(best, tl.max(scores, 1))
    weights, fade = tl.where(seen, tl.exp2(scores - peak[:, None]), 0.0), tl.exp2(best - peak)
    mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION, out_dtype=ACC)
    return peak, total * fade + tl.sum(weights, 1), mixed


@triton.jit
def attend_to_split(
    Q, K, V, WORDS, FIRST, LENGTHS, PART, PEAK, DONE, OUT,
    q_batch, q_head, q_node, k_batch, k_head, k_slot, v_batch, v_head,
    v_slot, o_batch, o_node, o_head, slots, scale,
    KV: tl.constexpr, G: tl.constexpr, N: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
    NODES: tl.constexpr, WINDOWED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries of one head of keys under one part of the keys, by online softmax; the last part is followed by the tree.

    Program (b KV + head, block of G N queries, part). Queries stand by their head of the group, then by their node.
    PART [B KV, SPLITS, G N, E] and PEAK [B KV, SPLITS, G N] take the mixed values and the log2 of the weights' sum, and
    the program that is the last of a block to be done, as counted in DONE [B KV blocks], joins them in OUT; it leaves
    the count at 0, as it was found. With one part, OUT is written at once and those three are not.
    """
    pair, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (pair // KV).to(tl.int64), (pair % KV).to(tl.int64)
    queries = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_query = queries < G * N
    node, q_heads = queries % N, head * G + queries // N
    d, e, n = tl.arange(0, WIDTH), tl.arange(0, OUT_WIDTH), tl.arange(0, BLOCK_K)
    q_at = Q + batch * q_batch + q_heads[:, None] * q_head + node[:, None] * q_node + d[None]
    q = tl.load(q_at, mask=is_query[:, None] & (d < D)[None], other=0.0)
    length = tl.load(LENGTHS + batch).to(tl.int32)
    begin = 0
    if WINDOWED:  # slots before the first one that any node of the row sees are not read
        first = tl.load(FIRST + batch * N + node, mask=is_query, other=0)
        places = tl.arange(0, NODES)
        begin = tl.min(tl.load(FIRST + batch * N + tl.minimum(places, N - 1)), 0).to(tl.int32) // BLOCK_K * BLOCK_K
    each = tl.cdiv(tl.cdiv(length - begin, BLOCK_K), SPLITS) * BLOCK_K
    low = begin + split * each
    high = tl.minimum(low + each, length)
    keys, values = K + batch * k_batch + head * k_head, V + batch * v_batch + head * v_head
    best = tl.full([BLOCK_Q], _HIDDEN, ACC)
    total = tl.zeros([BLOCK_Q], ACC)
    mixed = tl.zeros([BLOCK_Q, OUT_WIDTH], ACC)
    for start in range(low, high, BLOCK_K):
        slot = (start + n).to(tl.int64)
        there = slot < high
        k = tl.load(keys + slot[:, None] * k_slot + d[None], mask=there[:, None] & (d < D)[None], other=0.0)
        seen = there[None]
        if WINDOWED:
            seen = seen & (slot[None] >= first[:, None])
        v = tl.load(values + slot[:, None] * v_slot + e[None], mask=there[:, None] & (e < E)[None], other=0.0)
        best, total, mixed = _attended(q, k, v, seen, scale, best, total, mixed, ACC, PRECISION)
    if split == SPLITS - 1:
        for node_from in tl.static_range(0, N, BLOCK_K):
            word = tl.load(WORDS + (batch * N + node) * W + node_from // 64, mask=is_query, other=0)
            other = node_from + n
            there = other < N
            slot = (slots + other).to(tl.int64)
            k = tl.load(keys + slot[:, None] * k_slot + d[None], mask=there[:, None] & (d < D)[None], other=0.0)
            seen = there[None] & (((word[:, None] >> (other % 64).to(tl.int64)[None]) & 1) != 0)
            v = tl.load(values + slot[:, None] * v_slot + e[None], mask=there[:, None] & (e < E)[None], other=0.0)
            best, total, mixed = _attended(q, k, v, seen, scale, best, total, mixed, ACC, PRECISION)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    is_out = is_query[:, None] & (e < E)[None]
    to = OUT + batch * o_batch + node[:, None] * o_node + q_heads[:, None] * o_head + e[None]
    if SPLITS == 1:
        tl.store(to, mixed.to(OUT.dtype.element_ty), mask=is_out)
    else:
        base = pair.to(tl.int64) * SPLITS * G * N + queries
        place = base + split * G * N
        tl.store(PART + place[:, None] * E + e[None], mixed, mask=is_out)
        peak = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), _HIDDEN)
        tl.store(PEAK + place, peak, mask=is_query)
        tl.debug_barrier()  # all of this program's threads have written before one of them says so
        count = DONE + pair * tl.num_programs(1) + block
        if tl.atomic_add(count, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(count, 0)
            best = tl.full([BLOCK_Q], _HIDDEN, ACC)
            total = tl.zeros([BLOCK_Q], ACC)
            mixed = tl.zeros([BLOCK_Q, OUT_WIDTH], ACC)
            for part in range(SPLITS):  # from where all multiprocessors see what others wrote
                place = base + part * G * N
                other = tl.load(PEAK + place, mask=is_query, other=_HIDDEN, cache_modifier=".cg")
                values_of = PART + place[:, None] * E + e[None]
                peak = tl.maximum(best, other)
                fade, weight = tl.exp2(best - peak), tl.exp2(other - peak)
                mixed = mixed * fade[:, None]
                mixed += weight[:, None] * tl.load(values_of, mask=is_out, other=0.0, cache_modifier=".cg")
                total, best = total * fade + weight, peak
            tl.store(to, (mixed / total[:, None]).to(OUT.dtype.element_ty), mask=is_out)


@triton.jit
def _rotated(
    X, WEIGHT, COS, SIN, eps, d, HALF: tl.constexpr, NORMED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Both halves of a head [2 HALF] at X, normed by WEIGHT if it is, and rotated."""
    there = d < HALF
    one, two = tl.load(X + d, mask=there, other=0.0), tl.load(X + HALF + d, mask=there, other=0.0)
    if NORMED:  # rounded where the module rounds
        first, second = one.to(tl.float32), two.to(tl.float32)
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
        one = (first * scale).to(one.dtype) * tl.load(WEIGHT + d, mask=there, other=0.0)
        two = (second * scale).to(two.dtype) * tl.load(WEIGHT + HALF + d, mask=there, other=0.0)
    one, two = one.to(ACC), two.to(ACC)
    cos, cos_two = tl.load(COS + d, mask=there).to(ACC), tl.load(COS + HALF + d, mask=there).to(ACC)
    sin, sin_two = tl.load(SIN + d, mask=there).to(ACC), tl.load(SIN + HALF + d, mask=there).to(ACC)
    return one * cos - two * sin, two * cos_two + one * sin_two


@triton.jit
def write_heads(
    Q, K, V, Q_WEIGHT, K_WEIGHT, COS, SIN, KEYS, VALUES, COMPUTED, OUT,
    q_batch, q_node, k_batch, k_node, v_batch, v_node, c_batch, c_node, key_batch, key_head, key_slot,
    value_batch, value_head, value_slot, tokens, slots, size, eps,
    H: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr,
    NORMED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Queries normed and rotated to OUT [B, N, H, D], keys likewise and values to the cache. Program (token, head).

    Heads of queries come first, then those of keys and of values. The cache's slot follows a token's place in its row,
    or where SHARED in its tree of `size` nodes, which COMPUTED names.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    row, place = (token // tokens).to(tl.int64), (token % tokens).to(tl.int64)
    to_row, slot = row, slots + place
    if SHARED:
        node = tl.load(COMPUTED + token)
        to_row, slot = node // size, slots + node % size
    d = tl.arange(0, WIDTH)
    there = d < HALF
    cos, sin = COS + row * c_batch + place * c_node, SIN + row * c_batch + place * c_node
    if head < H:
        at = Q + row * q_batch + place * q_node + head * 2 * HALF
        one, two = _rotated(at, Q_WEIGHT, cos, sin, eps, d, HALF, NORMED, ACC)
        to = OUT + (token.to(tl.int64) * H + head) * 2 * HALF
        tl.store(to + d, one.to(OUT.dtype.element_ty), mask=there)
        tl.store(to + HALF + d, two.to(OUT.dtype.element_ty), mask=there)
    elif head < H + KV:
        of = head - H
        at = K + row * k_batch + place * k_node + of * 2 * HALF
        one, two = _rotated(at, K_WEIGHT, cos, sin, eps, d, HALF, NORMED, ACC)
        to = KEYS + to_row * key_batch + of * key_head + slot * key_slot
        tl.store(to + d, one.to(KEYS.dtype.element_ty), mask=there)
        tl.store(to + HALF + d, two.to(KEYS.dtype.element_ty), mask=there)
    else:
        of = head - H - KV
        at = V + row * v_batch + place * v_node + of * 2 * HALF
        to = VALUES + to_row * value_batch + of * value_head + slot * value_slot
        tl.store(to + d, tl.load(at + d, mask=there).to(VALUES.dtype.element_ty), mask=there)
        tl.store(to + HALF + d, tl.load(at + HALF + d, mask=there).to(VALUES.dtype.element_ty), mask=there)


@triton.jit
def multiply(
    X, WEIGHT, BIAS, NORM, ADDED, OUT, rows, eps,
    IN: tl.constexpr, WIDTH: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    ADDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """OUT [rows, WIDTH] = ADDED [rows, WIDTH] + norm(X [rows, IN]) WEIGHT^T + BIAS. Program (rows' block, columns').

    The rows' scale of a norm, which is known after their last number, is applied to the product. Where GATED, WEIGHT
    [2 WIDTH, IN] has the gate's rows before those that it is for, and OUT is silu(gate) * up.
    """
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    is_row, is_column = row < rows, column < WIDTH
    product = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    up = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, IN, BLOCK_K):
        there = start + k < IN
        x = tl.load(X + row[:, None] * IN + start + k[None], mask=is_row[:, None] & there[None], other=0.0)
        at = WEIGHT + column[:, None] * IN + start + k[None]
        is_weight = is_column[:, None] & there[None]
        weight = tl.load(at, mask=is_weight, other=0.0)
        if NORMED:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            x = (wide * tl.load(NORM + start + k, mask=there, other=0.0).to(tl.float32)[None]).to(x.dtype)
        product = tl.dot(x, tl.trans(weight), product, input_precision=PRECISION, out_dtype=ACC)
        if GATED:
            weight = tl.load(at + WIDTH * IN, mask=is_weight, other=0.0)
            up = tl.dot(x, tl.trans(weight), up, input_precision=PRECISION, out_dtype=ACC)
    if NORMED:
        scale = tl.rsqrt(squares / IN + eps).to(ACC)[:, None]
        product, up = product * scale, up * scale
    if BIASED:
        product += tl.load(BIAS + column, mask=is_column, other=0.0).to(ACC)[None]
    kind: tl.constexpr = OUT.dtype.element_ty
    if GATED:  # rounded where the modules round
        gate = product.to(kind).to(ACC)
        product = (gate / (1.0 + tl.exp(-gate))).to(kind).to(ACC) * up.to(kind).to(ACC)
    to, is_out = row[:, None] * WIDTH + column[None], is_row[:, None] & is_column[None]
    if ADDS:
        product = product.to(kind).to(ACC) + tl.load(ADDED + to, mask=is_out, other=0.0).to(ACC)
    tl.store(OUT + to, product.to(kind), mask=is_out)
