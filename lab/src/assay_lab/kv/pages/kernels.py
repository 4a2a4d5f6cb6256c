"""The kernels of packed pages in Triton: prepare a step (code keys and values into pages, turn
queries), attend to pages with one query a request, combine what splits found, and unpack the pages
of requests for attention with many queries.

`assay_lab.kv.pages.layout` says what they compute; tests hold them against its reference in
Triton's interpreter.

Digits become fp16 numbers by a mask: a word & 0x000f is, read as fp16, the number n 2⁻²⁴, & 0x00f0
is 16 n 2⁻²⁴, and the upper half of a word shifted by six gives two more; tensor cores take such
small numbers as they are. Factors are in the tables (T). A word of two tokens or two columns fills
a register, and is in it as products want it. The offsets ½ − 2^(b−1) are the same for all tokens:
they are taken off once, from the sum of a query's numbers and from the sum of weights.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _code(z, g, half):
    """Codes 0 … 2 half − 1 of coefficients z [n, c] over gains g [n]; half [n, c]."""
    return tl.minimum(tl.maximum(tl.floor(z / g[:, None] + half), 0.0), 2 * half - 1)


@triton.jit
def _store(
    x_ptr, x_token, pages_ptr, page_bytes, slots_ptr, positions_ptr, trig_ptr, mean_ptr, first_ptr, analysis_ptr,  # noqa: E501
    weight_ptr, tokens, OFF_W: tl.constexpr, OFF_E: tl.constexpr, OFF_G: tl.constexpr, OFF_F: tl.constexpr,  # noqa: E501
    SLOT: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, FINER: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,  # noqa: E501
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    W: tl.constexpr = D // 4
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < tokens
    slot = tl.load(slots_ptr + rows, mask=live, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + rows, mask=live, other=0).to(tl.int64)
    live = live & (slot >= 0)
    c = tl.arange(0, D)
    x = tl.load(
        x_ptr + rows.to(tl.int64)[:, None] * x_token + head * D + c[None, :],
        mask=live[:, None],
        other=0.0,
    )
    mean = tl.broadcast_to(tl.load(mean_ptr + head * D + c)[None, :], (ROWS, D))
    if KEYS:
        turn = trig_ptr + position[:, None] * D + (c % HALF)[None, :]
        other = tl.load(mean_ptr + head * D + (c + HALF) % D) * tl.where(c < HALF, -1.0, 1.0)
        mean = mean * tl.load(turn) + other[None, :] * tl.load(turn + HALF)
    early = (position < 4)[:, None]
    own = tl.load(
        first_ptr + (head * 4 + tl.minimum(position, 3))[:, None] * D + c[None, :],
        mask=early,
        other=0.0,
    )
    r = x.to(tl.float32) - tl.where(early, own, mean)
    z = tl.dot(
        r,
        tl.load(analysis_ptr + head * D * D + c[:, None] * D + c[None, :]),
        input_precision="tf32x3",
    )
    weight = tl.load(weight_ptr + head * D + c)[None, :]
    parts = tl.where(early, 1.0 + 3 * FINER, 1.0)  # of a step
    z = z * parts
    half = tl.where(c < WIDE * W, 32.0, 8.0)[None, :] * parts

    top = tl.maximum(tl.max(tl.abs(z) / half, axis=1), 1e-6)
    best = tl.full([ROWS], float("inf"), tl.float32)
    gain = tl.full([ROWS], 1.0, tl.float32)
    for i in tl.static_range(6):
        # The parts 1, 0.91, … 0.55, as the reference tries them.
        g = tl.maximum(
            (top * ((100 - 9 * i) / 100)).to(tl.float16).to(tl.float32), 5.9604644775390625e-08
        )
        off = (_code(z, g, half) + 0.5 - half) * g[:, None] - z
        near = tl.sum(off * off * weight, axis=1)
        gain = tl.where(near < best, g, gain)
        best = tl.minimum(near, best)

    codes = _code(z, gain, half).to(tl.int32)
    finest = codes & 3
    codes = codes >> tl.where(early, 2 * FINER, 0)
    page = pages_ptr + (slot // BLOCK) * page_bytes + head * (BLOCK * SLOT)
    place = slot % BLOCK
    # Numbers of a word do not overlap, so that their sum is the word.
    upper = tl.where(c < WIDE * W, 2, 0)[None, :]
    words = tl.sum(tl.reshape((codes >> upper) << (c // W * 4)[None, :], (ROWS, 4, W)), axis=1)
    w = tl.arange(0, W)
    to = (page + OFF_W).to(tl.pointer_type(tl.int16)) + place * W
    tl.store(to[:, None] + w[None, :], words.to(tl.int16), mask=live[:, None])
    e = tl.arange(0, D // 8)[None, :]
    if WIDE > 0:
        lower = tl.reshape((codes & 3) << (c % 16 // 2 * 2)[None, :], (ROWS, D // 16, 8, 2))
        words = tl.reshape(tl.sum(lower, axis=2), (ROWS, D // 8)).to(tl.int16)
        E: tl.constexpr = WIDE * (W // 8)
        to = (page + OFF_E).to(tl.pointer_type(tl.int16))
        if KEYS:
            tl.store((to + place * E)[:, None] + e, words, mask=live[:, None] & (e < E))
        else:
            tl.store((to + place)[:, None] + e * BLOCK, words, mask=live[:, None] & (e < E))
    if FINER > 0:
        lower = tl.reshape(finest << (c % 16 // 2 * 2)[None, :], (ROWS, D // 16, 8, 2))
        words = tl.reshape(tl.sum(lower, axis=2), (ROWS, D // 8)).to(tl.int16)
        to = (page + OFF_F).to(tl.pointer_type(tl.int16)) + tl.minimum(position, 3) * (D // 8)
        tl.store(to[:, None] + e, words, mask=live[:, None] & early)
    tl.store((page + OFF_G).to(tl.pointer_type(tl.float16)) + place, gain.to(tl.float16), mask=live)


@triton.jit
def _offset(W: tl.constexpr, FIELD: tl.constexpr):
    """What is taken off digits of quarter FIELD, or off lower bits (FIELD = 4), times their place:
    [W] float32.
    """
    if FIELD < 4:
        found = tl.full(
            [W], 7.5 * (16 if FIELD % 2 == 1 else 1) * (4 if FIELD >= 2 else 1), tl.float32
        )
    else:
        found = 1.5 * (1 << (2 * (tl.arange(0, W) % 16 // 2 % 4))).to(tl.float32)
    return found


@triton.jit
def _turn(
    q_ptr, q_token, digits_ptr, waves_ptr, starts_ptr, pairs_ptr, mean_ptr, table_ptr, unit_ptr, scale, requests,  # noqa: E501
    D: tl.constexpr, WIDE: tl.constexpr, PAIR: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,  # noqa: E501
    ROWS: tl.constexpr,
):  # fmt: skip
    """What depends on queries alone: q Tᵀ in fp16 and the products with the mean of a pair, a row
    for each of their heads.
    """
    HALF: tl.constexpr = D // 2
    W: tl.constexpr = D // 4
    LINE: tl.constexpr = D + WIDE * W
    head = tl.program_id(1)
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = line // GROUP
    query = head * GROUP + line % GROUP
    there = request < requests
    begin = tl.load(starts_ptr + request, mask=there, other=0).to(tl.int64)
    # Padding of a CUDA graph has no query: what would be its row is behind all others.
    there = there & (tl.load(starts_ptr + request + 1, mask=there, other=0) > begin)
    live = there[:, None]
    c = tl.arange(0, D)
    w = tl.arange(0, W)
    j = tl.arange(0, PAIR)
    at = (q_ptr + begin * q_token + query * D)[:, None]
    q = tl.load(at + c[None, :], mask=live, other=0.0).to(tl.float16)
    unit = tl.load(unit_ptr + head) * scale
    line = (request * (HEADS * GROUP) + query).to(tl.int64)
    table = table_ptr + head * LINE * D + c[:, None]  # Tᵀ: channels of k down, digits across
    turned = (tl.dot(q, tl.load(table + c[None, :] * D)) * unit).to(tl.float16)
    tl.store(digits_ptr + line[:, None] * LINE + c[None, :], turned, mask=live)
    place = 7.5 * tl.where(c // W % 2 == 1, 16.0, 1.0) * tl.where(c >= 2 * W, 4.0, 1.0)
    base = -tl.sum(turned.to(tl.float32) * place[None, :], axis=1)
    for field in tl.static_range(4, 4 + WIDE):
        turned = (tl.dot(q, tl.load(table + (field * W + w)[None, :] * D)) * unit).to(tl.float16)
        tl.store(digits_ptr + line[:, None] * LINE + field * W + w[None, :], turned, mask=live)
        base -= tl.sum(turned.to(tl.float32) * _offset(W, 4)[None, :], axis=1)
    pair = tl.load(pairs_ptr + head * PAIR + j)[None, :]
    p1 = tl.load(at + pair, mask=live, other=0.0).to(tl.float32) * scale
    p2 = tl.load(at + HALF + pair, mask=live, other=0.0).to(tl.float32) * scale
    m1, m2 = tl.load(mean_ptr + head * D + pair), tl.load(mean_ptr + head * D + HALF + pair)
    wave = waves_ptr + line[:, None] * (2 * PAIR + 1)
    tl.store(wave + j[None, :], p1 * m1 + p2 * m2, mask=live)
    tl.store(wave + PAIR + j[None, :], p2 * m1 - p1 * m2, mask=live)
    tl.store(waves_ptr + line * (2 * PAIR + 1) + 2 * PAIR, base, mask=there)


@triton.jit(do_not_specialize=["tokens", "requests"])
def prepare_kernel(
    k_ptr, k_token, v_ptr, v_token, pages_ptr, page_bytes, slots_ptr, positions_ptr, trig_ptr,
    mean_k_ptr, first_k_ptr, analysis_k_ptr, weight_k_ptr, mean_v_ptr, first_v_ptr, analysis_v_ptr, weight_v_ptr,  # noqa: E501
    tokens, q_ptr, q_token, digits_ptr, waves_ptr, starts_ptr, pairs_ptr, table_k_ptr, unit_k_ptr, scale, requests,  # noqa: E501
    OFF_WK: tl.constexpr, OFF_WV: tl.constexpr, OFF_EK: tl.constexpr, OFF_EV: tl.constexpr, OFF_GK: tl.constexpr,  # noqa: E501
    OFF_GV: tl.constexpr, OFF_FK: tl.constexpr, OFF_FV: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WK: tl.constexpr,  # noqa: E501
    WV: tl.constexpr, FK: tl.constexpr, FV: tl.constexpr, PAIR: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,  # noqa: E501
):  # fmt: skip
    """Code keys and values [tokens, HEADS, D] into pages, and turn the queries of the first
    `requests` requests.

    Tables are [HEADS, D(, D)]. Grid (ROWS tokens, or rows of queries, whichever are more; KV heads;
    keys, values and queries).
    """
    if tl.program_id(2) == 0:
        if tl.program_id(0) * ROWS < tokens:
            _store(
                k_ptr,
                k_token,
                pages_ptr,
                page_bytes,
                slots_ptr,
                positions_ptr,
                trig_ptr,
                mean_k_ptr,
                first_k_ptr,
                analysis_k_ptr,
                weight_k_ptr,
                tokens,
                OFF_WK,
                OFF_EK,
                OFF_GK,
                OFF_FK,
                SLOT,
                BLOCK,
                D,
                WK,
                FK,
                True,
                ROWS,
            )
    elif tl.program_id(2) == 1:
        if tl.program_id(0) * ROWS < tokens:
            _store(
                v_ptr,
                v_token,
                pages_ptr,
                page_bytes,
                slots_ptr,
                positions_ptr,
                trig_ptr,
                mean_v_ptr,
                first_v_ptr,
                analysis_v_ptr,
                weight_v_ptr,
                tokens,
                OFF_WV,
                OFF_EV,
                OFF_GV,
                OFF_FV,
                SLOT,
                BLOCK,
                D,
                WV,
                FV,
                False,
                ROWS,
            )
    else:
        if tl.program_id(0) * ROWS < requests * GROUP:
            _turn(
                q_ptr,
                q_token,
                digits_ptr,
                waves_ptr,
                starts_ptr,
                pairs_ptr,
                mean_k_ptr,
                table_k_ptr,
                unit_k_ptr,
                scale,
                requests,
                D,
                WK,
                PAIR,
                GROUP,
                HEADS,
                ROWS,
            )


WORDS = """{ .reg .b32 t; shr.u32 t, $4, 6;
    and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0; and.b32 $2, t, 0x003c003c; and.b32 $3, t, 0x03c003c0; }"""  # noqa: E501
"""The four digits of two words, each where a number of fp16 has its last ten bits."""
LOWER = """{ .reg .b32 t, u; shr.u32 t, $1, 8; and.b32 u, $1, $2; lop3.b32 $0, t, $3, u, 0xea; }"""
"""Two bits of each of two words, in either half of the word as the masks say."""
WORDS, LOWER = tl.constexpr(WORDS), tl.constexpr(LOWER)


@triton.jit
def _upper(words, ASM: tl.constexpr):
    """Digits of words (int16) in fp16, times 2⁻²⁴ and 1, 16, 4 and 64."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            WORDS,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        # A shift that draws copies of the sign leaves them above what is kept.
        a, b = (
            (words & 0xF).to(tl.float16, bitcast=True),
            (words & 0xF0).to(tl.float16, bitcast=True),
        )
        half = words >> 6
        c, d = (
            (half & 0x3C).to(tl.float16, bitcast=True),
            (half & 0x3C0).to(tl.float16, bitcast=True),
        )
    return a, b, c, d


@triton.jit
def _lower(words, first, second, ASM: tl.constexpr):
    """Two bits of words in fp16: those that the mask `first` keeps, or `second` of the upper half;
    times 2⁻²⁴ and their place.
    """
    if ASM:
        found = tl.inline_asm_elementwise(
            LOWER, "=&r,r,r,r", [words, first, second], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        found = ((words & first) | (words >> 8 & second)).to(tl.float16, bitcast=True)
    return found


@triton.jit
def _masks(W: tl.constexpr):
    """What `_lower` takes for each of W columns."""
    t = tl.arange(0, W) % 16 // 2
    first = tl.where(t < 4, 3 << (2 * (t % 4)), 0).to(tl.int16)
    second = tl.where(t < 4, 0, 3 << (2 * (t % 4))).to(tl.int16)
    return first, second


@triton.jit(do_not_specialize=["table_row", "splits"])
def attend_kernel(
    digits_ptr, waves_ptr, part_ptr, sum_ptr, pages_ptr, page_bytes, table_ptr, table_row, starts_ptr, lengths_ptr,  # noqa: E501
    trig_ptr, pairs_ptr, near_ptr, step_ptr, splits,
    OFF_WK: tl.constexpr, OFF_WV: tl.constexpr, OFF_EK: tl.constexpr, OFF_EV: tl.constexpr, OFF_GK: tl.constexpr,  # noqa: E501
    OFF_GV: tl.constexpr, OFF_FK: tl.constexpr, OFF_FV: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WK: tl.constexpr,  # noqa: E501
    WV: tl.constexpr, FK: tl.constexpr, FV: tl.constexpr, PAIR: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,  # noqa: E501
    TILE: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The one query token of a request, the GROUP ≤ ROWS heads of a KV head at once, over a part of
    its pages.

    Tokens are down, heads across. The first FIRST tokens and the query's own are left to
    `combine_kernel`. Grid (requests, KV heads, splits).
    """
    W: tl.constexpr = D // 4
    LK: tl.constexpr = D + WK * W
    LV: tl.constexpr = D + WV * W
    E: tl.constexpr = W // 8
    head = tl.program_id(1)
    request = tl.program_id(0)
    length = tl.load(lengths_ptr + request)
    share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
    lo = tl.program_id(2) * share
    hi = tl.minimum(lo + share, length)
    if (tl.load(starts_ptr + request + 1) == tl.load(starts_ptr + request)) | (lo >= length):
        return
    row = tl.arange(0, ROWS)
    live = (row < GROUP)[None, :]
    w = tl.arange(0, W)
    e = tl.arange(0, E)
    j = tl.arange(0, PAIR)
    n = tl.arange(0, TILE)
    line = (request * HEADS + head) * GROUP + row
    at = digits_ptr + line[None, :] * LK + w[:, None]
    q0 = tl.load(at, mask=live, other=0.0)
    q1 = tl.load(at + W, mask=live, other=0.0)
    q2 = tl.load(at + 2 * W, mask=live, other=0.0)
    q3 = tl.load(at + 3 * W, mask=live, other=0.0)
    q4, q5 = q3, q3
    if WK > 0:
        q4 = tl.load(at + 4 * W, mask=live, other=0.0)
    if WK > 1:
        q5 = tl.load(at + 5 * W, mask=live, other=0.0)
    wave = waves_ptr + line[None, :] * (2 * PAIR + 1)
    on_cos = tl.load(wave + j[:, None], mask=live, other=0.0)
    on_sin = tl.load(wave + PAIR + j[:, None], mask=live, other=0.0)
    base = tl.broadcast_to(
        tl.load(wave + 2 * PAIR, mask=live, other=0.0) * 5.9604644775390625e-08, (TILE, ROWS)
    )
    # Angles are those of the tile's first token, which turn what is in `waves`, and the same from
    # there on.
    turn = trig_ptr + lo * D + tl.load(pairs_ptr + head * PAIR + j)[:, None]
    cos, sin = tl.load(turn), tl.load(turn + D // 2)
    on_cos, on_sin = on_cos * cos + on_sin * sin, on_sin * cos - on_cos * sin
    cos = tl.load(step_ptr + head * 2 * PAIR + j)[:, None]
    sin = tl.load(step_ptr + head * 2 * PAIR + PAIR + j)[:, None]
    near = near_ptr + (head * BLOCK + n)[:, None] * (2 * PAIR) + j[None, :]
    near_cos, near_sin = tl.load(near), tl.load(near + PAIR)
    first, second = _masks(W)

    biggest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    acc0, acc1 = tl.zeros([W, ROWS], tl.float32), tl.zeros([W, ROWS], tl.float32)
    acc2, acc3 = tl.zeros([W, ROWS], tl.float32), tl.zeros([W, ROWS], tl.float32)
    acc4, acc5 = tl.zeros([W, ROWS], tl.float32), tl.zeros([W, ROWS], tl.float32)
    for start in tl.range(lo, hi, TILE, num_stages=STAGES):
        block = tl.load(table_ptr + request.to(tl.int64) * table_row + start // BLOCK).to(tl.int64)
        page = pages_ptr + block * page_bytes + head * (BLOCK * SLOT)
        place = n
        if TILE < BLOCK:
            place += start % BLOCK
        words = tl.load(
            (page + OFF_WK).to(tl.pointer_type(tl.int16)) + place[:, None] * W + w[None, :]
        )
        k0, k1, k2, k3 = _upper(words, ASM)
        s = tl.dot(k0, q0, base)
        s = tl.dot(k1, q1, s)
        s = tl.dot(k2, q2, s)
        s = tl.dot(k3, q3, s)
        lows = (
            (page + OFF_EK).to(tl.pointer_type(tl.int16)) + place[:, None] * (WK * E) + e[None, :]
        )
        for field in tl.static_range(WK):
            lower = tl.reshape(tl.load(lows + field * E), (TILE, W // 16, 1, 2))
            lower = tl.reshape(tl.broadcast_to(lower, (TILE, W // 16, 8, 2)), (TILE, W))
            mask1, mask2 = (
                tl.broadcast_to(first[None, :], (TILE, W)),
                tl.broadcast_to(second[None, :], (TILE, W)),
            )
            s = tl.dot(_lower(lower, mask1, mask2, ASM), q4 if field == 0 else q5, s)
        fixed = tl.dot(near_cos, on_cos.to(tl.float16))
        fixed = tl.dot(near_sin, on_sin.to(tl.float16), fixed)
        on_cos, on_sin = on_cos * cos + on_sin * sin, on_sin * cos - on_cos * sin
        gain = (
            tl.load((page + OFF_GK).to(tl.pointer_type(tl.float16)) + place).to(tl.float32)
            * 16777216.0
        )
        token = start + n
        here = (token >= 4) & (token < length - 1)
        s = tl.where(here[:, None], s * gain[:, None] + fixed, -float("inf"))
        new = tl.maximum(biggest, tl.max(s, axis=0))
        p = tl.exp2(s - new[None, :])
        fade = tl.exp2(biggest - new)
        total = total * fade + tl.sum(p, axis=0)
        biggest = new
        gain = tl.load((page + OFF_GV).to(tl.pointer_type(tl.float16)) + place).to(tl.float32)
        p = p * tl.where(here, gain, 0.0)[:, None]
        weights = weights * fade + tl.sum(p, axis=0)
        p = p.to(tl.float16)
        words = tl.load(
            (page + OFF_WV).to(tl.pointer_type(tl.int16)) + place[None, :] * W + w[:, None]
        )
        v0, v1, v2, v3 = _upper(words, ASM)
        acc0 = tl.dot(v0, p, acc0 * fade[None, :])
        acc1 = tl.dot(v1, p, acc1 * fade[None, :])
        acc2 = tl.dot(v2, p, acc2 * fade[None, :])
        acc3 = tl.dot(v3, p, acc3 * fade[None, :])
        lows = (page + OFF_EV).to(tl.pointer_type(tl.int16)) + e[:, None] * BLOCK + place[None, :]
        for field in tl.static_range(WV):
            lower = tl.reshape(tl.load(lows + field * E * BLOCK), (W // 16, 1, 2, TILE))
            lower = tl.reshape(tl.broadcast_to(lower, (W // 16, 8, 2, TILE)), (W, TILE))
            mask1, mask2 = (
                tl.broadcast_to(first[:, None], (W, TILE)),
                tl.broadcast_to(second[:, None], (W, TILE)),
            )
            lower = _lower(lower, mask1, mask2, ASM)
            if field == 0:
                acc4 = tl.dot(lower, p, acc4 * fade[None, :])
            else:
                acc5 = tl.dot(lower, p, acc5 * fade[None, :])

    # [requests, HEADS, splits, GROUP, D + WV W], not yet over the sum.
    line = ((request * HEADS + head) * splits + tl.program_id(2)) * GROUP + row
    part = part_ptr + line.to(tl.int64)[None, :] * LV + w[:, None]
    tl.store(part, acc0, mask=live)
    tl.store(part + W, acc1, mask=live)
    tl.store(part + 2 * W, acc2, mask=live)
    tl.store(part + 3 * W, acc3, mask=live)
    if WV > 0:
        tl.store(part + 4 * W, acc4, mask=live)
    if WV > 1:
        tl.store(part + 5 * W, acc5, mask=live)
    tl.store(sum_ptr + line * 3, biggest, mask=row < GROUP)
    tl.store(sum_ptr + line * 3 + 1, total, mask=row < GROUP)
    tl.store(sum_ptr + line * 3 + 2, weights, mask=row < GROUP)


@triton.jit
def _digit(page, place, W: tl.constexpr, OFF: tl.constexpr, FIELD: tl.constexpr):
    """Digit FIELD of the words at places [n] of a page, [n, W] in float32, times its place."""
    words = tl.load(
        (page + OFF).to(tl.pointer_type(tl.int16)) + place[:, None] * W + tl.arange(0, W)[None, :]
    )
    half = words >> (0 if FIELD < 2 else 6)
    return (
        half & (0xF if FIELD == 0 else (0xF0 if FIELD == 1 else (0x3C if FIELD == 2 else 0x3C0)))
    ).to(tl.float32)


@triton.jit
def _fine(page, place, W: tl.constexpr, OFF: tl.constexpr, WIDE: tl.constexpr, FIELD: tl.constexpr, BLOCK: tl.constexpr,  # noqa: E501
          KEYS: tl.constexpr):  # fmt: skip
    """The lower two bits of wide channels of quarter FIELD at places [n] of a page, int16 [n, W],
    in their place.
    """
    column = tl.arange(0, W)
    word = FIELD * (W // 8) + column // 16 * 2 + column % 2
    at = (
        place[:, None] * (WIDE * (W // 8)) + word[None, :]
        if KEYS
        else word[None, :] * BLOCK + place[:, None]
    )
    first, second = _masks(W)
    words = tl.load((page + OFF).to(tl.pointer_type(tl.int16)) + at)
    return (words & first[None, :]) | (words >> 8 & second[None, :])


@triton.jit
def _more(
    page,
    place,
    W: tl.constexpr,
    OFF: tl.constexpr,
    WIDE: tl.constexpr,
    FIELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the finer part adds to digits of quarter FIELD at places [n] below FIRST, [n, W]
    float32.
    """
    found = (
        _fine(page, place, W, OFF, 4, FIELD, BLOCK, True).to(tl.float32)
        / _offset(W, 4)[None, :]
        * 1.5
        - 1.5
    )
    return found * (
        0.25 * (16 if FIELD % 2 == 1 else 1) * (4 if FIELD >= 2 else 1) / (4 if FIELD < WIDE else 1)
    )


@triton.jit(do_not_specialize=["table_row", "splits"])
def combine_kernel(
    q_ptr, q_token, k_ptr, k_token, v_ptr, v_token, digits_ptr, waves_ptr, part_ptr, sum_ptr, out_ptr, out_token,  # noqa: E501
    pages_ptr, page_bytes, table_ptr, table_row, starts_ptr, lengths_ptr, first_k_ptr, first_v_ptr, mean_ptr,  # noqa: E501
    table_v_ptr, unit_ptr, scale, splits,
    OFF_WK: tl.constexpr, OFF_WV: tl.constexpr, OFF_EK: tl.constexpr, OFF_EV: tl.constexpr, OFF_GK: tl.constexpr,  # noqa: E501
    OFF_GV: tl.constexpr, OFF_FK: tl.constexpr, OFF_FV: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WK: tl.constexpr,  # noqa: E501
    WV: tl.constexpr, FK: tl.constexpr, FV: tl.constexpr, PAIR: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,  # noqa: E501
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Of one request and query head: add the splits up with the first tokens, out of their page,
    and the query's own token, whose key and value are at hand as they are; and turn the sum back
    into values. Grid (requests, query heads)."""
    W: tl.constexpr = D // 4
    LK: tl.constexpr = D + WK * W
    LV: tl.constexpr = D + WV * W
    request = tl.program_id(0)
    query = tl.program_id(1)
    head = query // GROUP
    begin = tl.load(starts_ptr + request).to(tl.int64)
    length = tl.load(lengths_ptr + request)
    if (tl.load(starts_ptr + request + 1) == begin) | (length < 1):
        return
    c = tl.arange(0, D)
    w = tl.arange(0, W)
    p = tl.arange(0, 4)
    q = tl.load(q_ptr + begin * q_token + query * D + c).to(tl.float32) * scale
    own_k = tl.load(k_ptr + begin * k_token + head * D + c).to(tl.float32)
    own_v = tl.load(v_ptr + begin * v_token + head * D + c).to(tl.float32)
    first_k = tl.load(first_k_ptr + (head * 4 + p)[:, None] * D + c[None, :])
    first_v = tl.load(first_v_ptr + (head * 4 + p)[:, None] * D + c[None, :])
    line = request * (HEADS * GROUP) + query
    block = tl.load(table_ptr + request.to(tl.int64) * table_row).to(tl.int64)
    page = pages_ptr + block * page_bytes + head * (BLOCK * SLOT)
    gain_k = tl.load((page + OFF_GK).to(tl.pointer_type(tl.float16)) + p).to(tl.float32)
    gain_v = tl.load((page + OFF_GV).to(tl.pointer_type(tl.float16)) + p).to(tl.float32)
    s = tl.zeros([4], tl.float32) + tl.load(waves_ptr + line * (2 * PAIR + 1) + 2 * PAIR)
    for field in tl.static_range(4):
        turned = tl.load(digits_ptr + line * LK + field * W + w).to(tl.float32)
        found = _digit(page, p, W, OFF_WK, field)
        if FK > 0:
            found += _more(page, p, W, OFF_FK, WK, field, BLOCK)
        s += tl.sum(found * turned[None, :], axis=1)
    for field in tl.static_range(WK):
        turned = tl.load(digits_ptr + line * LK + (4 + field) * W + w).to(tl.float32)
        s += tl.sum(
            _fine(page, p, W, OFF_EK, WK, field, BLOCK, True).to(tl.float32) * turned[None, :],
            axis=1,
        )
    s = s * gain_k + tl.sum(first_k * q[None, :], axis=1)
    early = p < length - 1
    s = tl.where(early, s, -float("inf"))
    own = tl.sum(own_k * q)

    share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
    split = tl.arange(0, SPLITS)
    there = split * share < length
    at = ((request * HEADS + head) * splits + split) * GROUP + query % GROUP
    top = tl.load(sum_ptr + at * 3, mask=there, other=-1e30)
    most = tl.maximum(tl.maximum(tl.max(top, axis=0), tl.max(s, axis=0)), own)
    factor = tl.exp2(top - most)
    first_w = tl.exp2(s - most)
    own_w = tl.exp2(own - most)
    later = tl.sum(factor * tl.load(sum_ptr + at * 3 + 1, mask=there, other=0.0), axis=0)
    total = later + tl.sum(first_w, axis=0) + own_w
    factor, first_w, own_w = factor / total, first_w / total, own_w / total
    first_g = first_w * tl.where(early, gain_v, 0.0)
    weights = tl.sum(
        factor * tl.load(sum_ptr + at * 3 + 2, mask=there, other=0.0), axis=0
    ) + tl.sum(first_g, axis=0)
    part = part_ptr + at.to(tl.int64)[:, None] * LV + w[None, :]
    factor = factor * 16777216.0
    # Over their sum of weights digits are small numbers, which fp16 holds; a product on tensor
    # cores has sixteen rows, all the same.
    over = 1.0 / tl.maximum(weights, 1e-30)
    y = tl.zeros([16, D], tl.float32)
    for field in tl.static_range(4 + WV):
        some = tl.sum(
            tl.load(part + field * W, mask=there[:, None], other=0.0) * factor[:, None], axis=0
        )
        if field < 4:
            found = _digit(page, p, W, OFF_WV, field)
            if FV > 0:
                found += _more(page, p, W, OFF_FV, WV, field, BLOCK)
            some += tl.sum(found * first_g[:, None], axis=0)
            some = some * over - _offset(W, field)
        else:
            some += tl.sum(
                _fine(page, p, W, OFF_EV, WV, field - 4, BLOCK, False).to(tl.float32)
                * first_g[:, None],
                axis=0,
            )
            some = some * over - _offset(W, 4)
        row = table_v_ptr + (head * LV + field * W + w)[:, None] * D + c[None, :]
        y = tl.dot(tl.broadcast_to(some.to(tl.float16)[None, :], (16, W)), tl.load(row), y)
    y = tl.sum(y, axis=0) * (weights * tl.load(unit_ptr + head) / 16) + tl.load(
        mean_ptr + head * D + c
    ) * (later / total)
    y += tl.sum(first_v * first_w[:, None], axis=0) + own_v * own_w
    tl.store(out_ptr + begin * out_token + query * D + c, y.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["table_row", "first_request"])
def unpack_kernel(
    k_ptr, v_ptr, pages_ptr, page_bytes, table_ptr, table_row, lengths_ptr, places_ptr, trig_ptr,
    mean_k_ptr, mean_v_ptr, first_k_ptr, first_v_ptr, table_k_ptr, table_v_ptr, unit_k_ptr, unit_v_ptr,  # noqa: E501
    first_request,
    OFF_WK: tl.constexpr, OFF_WV: tl.constexpr, OFF_EK: tl.constexpr, OFF_EV: tl.constexpr, OFF_GK: tl.constexpr,  # noqa: E501
    OFF_GV: tl.constexpr, OFF_FK: tl.constexpr, OFF_FV: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WK: tl.constexpr,  # noqa: E501
    WV: tl.constexpr, FK: tl.constexpr, FV: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys after RoPE and values of requests, out of pages into [tokens, HEADS, D]; `places_ptr`
    says at which row each begins.

    Grid (tiles, KV heads, requests).
    """
    HALF: tl.constexpr = D // 2
    head = tl.program_id(1)
    request = first_request + tl.program_id(2)
    length = tl.load(lengths_ptr + request)
    start = tl.program_id(0) * TILE
    if start >= length:
        return
    n = tl.arange(0, TILE)
    c = tl.arange(0, HALF)
    token = start + n
    block = tl.load(table_ptr + request.to(tl.int64) * table_row + start // BLOCK).to(tl.int64)
    page = pages_ptr + block * page_bytes + head * (BLOCK * SLOT)
    place = start % BLOCK + n
    live = (token < length)[:, None]
    early = (token < 4)[:, None]
    to = (
        (tl.load(places_ptr + tl.program_id(2)) + token).to(tl.int64)[:, None] * (HEADS * D)
        + head * D
        + c[None, :]
    )
    own = head * 4 * D + tl.minimum(token, 3)[:, None] * D + c[None, :]
    turn = trig_ptr + token.to(tl.int64)[:, None] * D + c[None, :]
    cos, sin = tl.load(turn, mask=live, other=0.0), tl.load(turn + HALF, mask=live, other=0.0)
    mean1 = tl.load(mean_k_ptr + head * D + c)[None, :]
    mean2 = tl.load(mean_k_ptr + head * D + HALF + c)[None, :]
    unit = tl.load(unit_k_ptr + head)
    first, second = _unpacked(
        page,
        place,
        table_k_ptr,
        head,
        unit,
        early,
        OFF_WK,
        OFF_EK,
        OFF_GK,
        OFF_FK,
        D,
        WK,
        FK,
        BLOCK,
        True,
    )
    first += tl.where(
        early, tl.load(first_k_ptr + own, mask=early, other=0.0), mean1 * cos - mean2 * sin
    )
    second += tl.where(
        early, tl.load(first_k_ptr + own + HALF, mask=early, other=0.0), mean2 * cos + mean1 * sin
    )
    kind = k_ptr.dtype.element_ty
    tl.store(k_ptr + to, first.to(kind), mask=live)
    tl.store(k_ptr + to + HALF, second.to(kind), mask=live)
    mean1 = tl.load(mean_v_ptr + head * D + c)[None, :]
    mean2 = tl.load(mean_v_ptr + head * D + HALF + c)[None, :]
    unit = tl.load(unit_v_ptr + head)
    first, second = _unpacked(
        page,
        place,
        table_v_ptr,
        head,
        unit,
        early,
        OFF_WV,
        OFF_EV,
        OFF_GV,
        OFF_FV,
        D,
        WV,
        FV,
        BLOCK,
        False,
    )
    first += tl.where(early, tl.load(first_v_ptr + own, mask=early, other=0.0), mean1)
    second += tl.where(early, tl.load(first_v_ptr + own + HALF, mask=early, other=0.0), mean2)
    tl.store(v_ptr + to, first.to(kind), mask=live)
    tl.store(v_ptr + to + HALF, second.to(kind), mask=live)


@triton.jit
def _unpacked(page, place, table_ptr, head, unit, early, OFF_W: tl.constexpr, OFF_E: tl.constexpr, OFF_G: tl.constexpr,  # noqa: E501
              OFF_F: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, FINER: tl.constexpr, BLOCK: tl.constexpr,  # noqa: E501
              KEYS: tl.constexpr):  # fmt: skip
    """Both halves [n, D / 2] of the residuals at places [n] of a page, float32."""
    HALF: tl.constexpr = D // 2
    W: tl.constexpr = D // 4
    c = tl.arange(0, HALF)
    w = tl.arange(0, W)
    row = table_ptr + head * ((D + WIDE * W) * D) + w[:, None] * D + c[None, :]
    first = tl.zeros([place.shape[0], HALF], tl.float32)
    second = tl.zeros([place.shape[0], HALF], tl.float32)
    for field in tl.static_range(4 + WIDE):
        if field < 4:
            digits = _digit(page, place, W, OFF_W, field) - _offset(W, field)[None, :]
            if FINER > 0:
                digits += tl.where(early, _more(page, place % 4, W, OFF_F, WIDE, field, BLOCK), 0.0)
        else:
            digits = _fine(page, place, W, OFF_E, WIDE, field - 4, BLOCK, KEYS).to(tl.float32)
            digits = digits - _offset(W, 4)[None, :]
        digits = digits.to(tl.float16)
        first = tl.dot(digits, tl.load(row + field * W * D), first)
        second = tl.dot(digits, tl.load(row + field * W * D + HALF), second)
    gain = (
        tl.load((page + OFF_G).to(tl.pointer_type(tl.float16)) + place).to(tl.float32)[:, None]
        * unit
    )
    return first * gain, second * gain
