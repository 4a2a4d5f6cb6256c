"""The recipe known as KakeyaTurbo v1.3, with the norm that its decoder lost.

Each block of `block` tokens of one head: mean μ and principal components U in half precision;
coefficients c = U (x − μ); spherical K-means centres g_s of their directions; t = ⟨c, g_s⟩ and
residual e = c − t g_s; e padded to a power of two L, signs and Hadamard, z = √L H σ e / ‖e‖, levels
of `bits` bits; values |z| > `outlier` apart. Decoding gives c' = t g_s + ‖e‖ e'. The published
decoder of keys took 1 for ‖e‖ (it kept ‖x‖, which it never read), so that its error hardly depended
on bits: `published_norm=true` does the same, to keys and values alike.

Unlike there: coefficients see the rounded t; a shared basis is a calibrated table, so that it can
be streamed; no block is dropped; segments take ⌈log₂ k⌉ bits and outlier channels log₂ L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from assay.errors import UsageError
from assay_lab.kv.codecs.base import BlockCoder, Codec, Parts, Stage
from assay_lab.kv.codecs.fields import from_halves, to_halves
from assay_lab.kv.codecs.samples import Samples, Site, Tables, need_table
from assay_lab.kv.codecs.stream import damaged
from assay_lab.quantisation.hadamard import wht
from assay_lab.quantisation.levels import empirical_levels, gaussian_levels
from assay_lab.quantisation.nearest import nearest_level
from assay_lab.quantisation.packing import pack, packed_bytes, unpack
from assay_lab.quantisation.randomness import random_normal, random_signs, random_words

# Principal components and spherical K-means of many small sets of rows at once, as the `kakeya`
# codec uses them.


OVERSAMPLE, POWER_ITERATIONS = 8, 2
SEED_OF_SKETCH = 0x9E3779B97F4A7C15


def exact_basis(centred: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[sets, n, d] → rows of components [sets, d, d] by falling variance, and the variances [sets,
    d].
    """
    if centred.is_cuda:
        gram = _gram(centred)
        values, vectors = (t.float() for t in eigh_batched(gram / max(1, centred.shape[1])))
    else:
        values, vectors = torch.linalg.eigh(centred.mT @ centred / max(1, centred.shape[1]))
    return vectors.flip(-1).mT.contiguous(), values.flip(-1).clamp_min(0)


def random_basis(centred: torch.Tensor, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by a random sketch (Halko, Martinsson, Tropp 2011) with power iterations: [sets,
    rank, d].

    Fewer rows come back where the sets are smaller. Variances are those inside the sketch.
    """
    _, n, d = centred.shape
    rank = min(rank, d, n)
    width = min(rank + OVERSAMPLE, d, n)
    omega = _sketch(seed ^ SEED_OF_SKETCH, n, width).to(centred.device)
    if centred.is_cuda:
        return random_basis_of_grams(centred, omega, rank)
    sketch = centred.mT @ omega
    for _ in range(POWER_ITERATIONS):
        left = torch.linalg.qr(centred @ sketch)[0]
        sketch = torch.linalg.qr(centred.mT @ left)[0]
    q = torch.linalg.qr(sketch)[0]
    _, singular, right = torch.linalg.svd(centred @ q, full_matrices=False)
    rows = right @ q.mT
    return rows[:, :rank].contiguous(), (singular.square() / n)[:, :rank]


def random_basis_of_grams(
    centred: torch.Tensor, omega: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`random_basis` by products and [d, d] matrices alone: the form for a GPU, where batched QR
    and SVD are loops.

    With A the centred rows and S = Aᵀ A, one power iteration takes the span of Z to that of S Z,
    and the SVD of A Q is the eigendecomposition of Qᵀ S Q. Squares are kept in float64, which loses
    nothing of float32 rows.
    """

    gram = _gram(centred)
    q = _orthonormal(centred.double().mT @ omega.double())
    for _ in range(POWER_ITERATIONS):
        q = _orthonormal(gram @ q)
    values, vectors = eigh_batched(q.mT @ gram @ q)
    rows = (q @ vectors.flip(-1)[..., :rank]).mT
    return (
        rows.float().contiguous(),
        (values.flip(-1).clamp_min(0) / centred.shape[1])[:, :rank].float(),
    )


def _orthonormal(z: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns of z [sets, d, r], float64: Cholesky QR, three times
    (Fukaya and others 2020).

    The first time with a shift, so that columns which depend on others do no harm.
    """
    z = z / z.norm(dim=1, keepdim=True).clamp_min(1e-30)
    for shift in (1e-13, 1e-15, 0.0):
        square = z.mT @ z
        square.diagonal(dim1=1, dim2=2).add_(shift * z.shape[-1] + 1e-30)
        lower, _ = torch.linalg.cholesky_ex(square)
        z = torch.linalg.solve_triangular(lower.mT, z, upper=True, left=False)
    return z


def _gram(rows: torch.Tensor) -> torch.Tensor:
    """Aᵀ A of rows [sets, n, d], float64."""
    wide = rows.double()
    return wide.mT @ wide


@lru_cache(maxsize=8)
def _sketch(seed: int, n: int, width: int) -> torch.Tensor:
    """The random directions [n, width] that every set is sketched with."""
    return random_normal(seed, n * width).reshape(n, width)


def ranks(variances: torch.Tensor, ratio: float, cap: int) -> torch.Tensor:
    """The fewest components with `ratio` of the variance [sets], at most `cap` (0: no cap), at
    least 1.
    """
    total = variances.sum(dim=-1, keepdim=True)
    enough = variances.cumsum(dim=-1) >= ratio * total * (1 - 1e-6)
    enough[..., -1] = True
    found = enough.int().argmax(dim=-1) + 1
    found[total[..., 0] <= 1e-30] = 1
    return found.clamp_max(cap) if cap else found


def spherical_centres(rows: torch.Tensor, k: int, seed: int, iterations: int = 32) -> torch.Tensor:
    """Unit centres [sets, k, r] of the directions of rows [sets, n, r], a direction and its
    opposite being one.

    Starts farthest-first (by signed cosine) from a row drawn by `seed`; then a row belongs to the
    centre of largest
    |cosine| and a centre becomes the normalised sum of its rows, turned to its side. A centre
      without rows stays.
    """
    length = rows.norm(dim=-1, keepdim=True)
    real = length > 1e-20
    unit = torch.where(real, rows / length.clamp_min(1e-20), 0.0)
    sets, n, _ = rows.shape
    chosen = torch.full((sets,), int(random_words(seed, 1)[0] % max(n, 1)), device=rows.device)
    every = torch.arange(sets, device=rows.device)
    centres, nearest = [unit[every, chosen]], torch.full((sets, n), -2.0, device=rows.device)
    for _ in range(k - 1):
        cosine = (unit @ centres[-1][..., None])[..., 0]
        nearest = torch.maximum(nearest, cosine)
        chosen = torch.where(real[..., 0], nearest, 2.0).argmin(dim=-1)
        centres.append(unit[every, chosen])
    found, before = torch.stack(centres, dim=1), None
    for turn in range(iterations):
        cosine = unit @ found.mT
        member = cosine.abs().argmax(dim=-1)
        # Iterating on changes nothing where no row moves; a GPU that others share is asked less
        # often, as each answer waits.
        if before is not None and not (unit.is_cuda and turn % 8) and torch.equal(member, before):
            break
        before = member
        sums = _sums(unit, member, cosine)
        size = sums.norm(dim=-1, keepdim=True)
        found = torch.where(size > 1e-12, sums / size.clamp_min(1e-12), found)
    return found


def _sums(unit: torch.Tensor, member: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
    """The rows of each centre, turned to its side and added up [sets, k, r].

    A GPU has to sort to add in a fixed order, so there memberships become a matrix and the sums one
    product.
    """
    side = cosine.gather(-1, member[..., None]).sign()
    if unit.is_cuda:
        return torch.zeros_like(cosine).scatter(-1, member[..., None], side).mT @ unit
    sets = torch.arange(unit.shape[0])[:, None].expand_as(member)
    sums = torch.zeros(unit.shape[0], cosine.shape[-1], unit.shape[-1])
    return sums.index_put((sets, member), unit * side, accumulate=True)


# Eigenvectors of many small symmetric matrices at once, by Jacobi rotations that are plain batched
# products.
#
# LAPACK's routines as torch calls them on a GPU go through a batch one matrix after the other once
# it is larger than 32; thousands of blocks of a cache then take seconds. Here each round turns n /
# 2 disjoint pairs of coordinates of every matrix (round-robin order, Brent and Luk, SIAM J. Sci.
# Stat. Comput. 6 (1985) 69), n − 1 rounds are a sweep over all pairs, and after six to nine sweeps
# nothing is left beside the diagonal.

SWEEPS = 30
"""More than is ever needed: convergence is quadratic."""


def eigh_batched(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.linalg.eigh` of symmetric [sets, n, n]: values [sets, n] rising, vectors in columns
    [sets, n, n].

    Stops when the largest value beside the diagonal is below n rounding errors of the largest of
    the matrix.
    """
    sets, n, _ = matrices.shape
    odd = n % 2
    # A coordinate more, with nothing in it, makes the number of pairs whole.
    a = torch.nn.functional.pad(matrices, (0, odd, 0, odd))
    width = n + odd
    half = width // 2
    vectors = torch.eye(width, dtype=a.dtype, device=a.device).repeat(sets, 1, 1)
    pair, stay, cross = (t.to(a.device) for t in _round(half))
    stay, cross = stay.to(a.dtype), cross.to(a.dtype)
    limit = width * torch.finfo(a.dtype).eps * a.abs().amax(dim=(1, 2))
    for _ in range(SWEEPS):
        if width < 2 or bool((_beside(a) <= limit).all()):
            break
        for _ in range(width - 1):
            angle = _angles(a, half)[:, None, pair]
            turn = angle.cos() * stay + angle.sin() * cross
            a = turn.mT @ a @ turn
            vectors = vectors @ turn
    values, vectors = a.diagonal(dim1=1, dim2=2), vectors[:, :n]
    if odd:
        # The empty coordinate never mixes with others; it goes to the end, where it is cut off.
        empty = vectors.abs().amax(dim=1) == 0
        values = torch.where(empty, torch.inf, values)
    values, rising = values.sort(dim=-1)
    vectors = vectors.gather(2, rising[:, None].expand(-1, n, -1))
    return values[:, :n], vectors[..., :n]


def _angles(a: torch.Tensor, half: int) -> torch.Tensor:
    """The angles [sets, half], at most π / 4, that coordinates i and half + i are turned by to make
    a[i, half + i] 0.
    """
    first, second = a.diagonal(dim1=1, dim2=2).split(half, dim=1)
    between = a[:, :half, half:].diagonal(dim1=1, dim2=2)
    # 0 / 0 is a pair with nothing between and nothing to choose; x / 0 is π / 4.
    ratio = (2 * between / (second - first)).nan_to_num(0.0, torch.inf, -torch.inf)
    return ratio.atan() / 2


def _round(half: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which pair each coordinate of the next round comes from [n], and the matrices [n, n] that
    carry cosines and sines.

    The rotation of coordinates i and half + i by θ has cos θ on the diagonal, sin θ at (i, half +
    i) and −sin θ at (half + i, i). Its columns are put into the order of the next round: all but
    the first move on by one around the table.
    """
    top, bottom = list(range(half)), list(range(half, 2 * half))
    order = torch.tensor(top + bottom if half == 1 else [0, half, *top[1:-1], *bottom[1:], top[-1]])
    eye = torch.eye(2 * half)
    swapped = torch.cat([-eye[half:], eye[:half]]).T
    return order % half, eye[:, order], swapped[:, order]


def _beside(a: torch.Tensor) -> torch.Tensor:
    """The largest value beside the diagonal of each matrix [sets]."""
    return (a - torch.diag_embed(a.diagonal(dim1=1, dim2=2))).abs().amax(dim=(1, 2))


# The codec.


@dataclass(frozen=True)
class Kakeya(Codec):
    """`variance` is the share of variance that sets the rank, `rank` a cap on it (0: none),
    `outlier` 0 is off.

    `pca=random` is the sketch of rank `rank`, half of head_dim where that is 0.
    """

    name = "kakeya"
    single_heads = True
    summary = "PCA, spherical K-means and Hadamard residuals by block: KakeyaTurbo v1.3, repaired"
    bits: int = 3
    k: int = 16
    variance: float = 1.0
    rank: int = 0
    pca: Literal["exact", "random"] = "exact"
    basis: Literal["block", "shared"] = "block"
    levels: Literal["gaussian", "calibrated"] = "gaussian"
    outlier: float = 0.0
    skeleton: Literal["fp16", "fp32"] = "fp16"
    block: int = 512
    seed: int = 0xCAFEBABE
    published_norm: bool = False

    def __post_init__(self) -> None:
        if not (
            1 <= self.bits <= 8
            and 1 <= self.k <= 65536
            and 0 < self.variance <= 1
            and self.rank >= 0
        ):
            raise UsageError(
                f"{self}: bits is 1 to 8, k at least 1, variance in (0, 1], rank not negative",
                finding_id="kv.spec",
            )
        if self.block < 1 or (self.outlier and self.outlier < 1):
            raise UsageError(
                f"{self}: block is at least 1, outlier 0 or at least 1 (in deviations)",
                finding_id="kv.spec",
            )

    @property
    def joins_heads(self) -> bool:
        return self.basis == "shared" or self.levels == "calibrated"

    def fit(self, samples: Samples) -> BlockCoder:
        tables: Tables = {}
        if self.basis == "shared":
            rows = samples.need_x(str(self)).cpu().flatten(0, 1)[None]
            mean = rows.mean(dim=1)
            cap = self.rank_cap(samples.site.head_dim)
            found = (
                exact_basis if self.pca == "exact" else lambda r: random_basis(r, cap, self.seed)
            )
            components, variances = found(rows - mean[:, None])
            kept = int(ranks(variances, self.variance, cap)[0])
            kind = np.float16 if self.skeleton == "fp16" else np.float32
            tables["mean"] = mean[0].numpy().astype(np.float32)
            tables["basis"] = components[0, :kept].numpy().astype(kind)
        if self.levels == "calibrated" and self.bits in samples.levels:
            tables["levels"] = samples.levels[self.bits].cpu().numpy()
        elif self.levels == "calibrated":
            plain = KakeyaCoder(samples.site, replace(self, levels="gaussian"), tables)
            x = samples.need_x(str(self)).cpu()
            size = min(self.block, x.shape[1])
            whole = x[:, : x.shape[1] // size * size].unflatten(1, (-1, size)).transpose(0, 1)
            z: torch.Tensor = plain.residuals(whole)
            tables["levels"] = empirical_levels(z.numpy(), 2**self.bits).astype(np.float32)
        return KakeyaCoder(samples.site, self, tables)

    def restore(self, site: Site, tables: Tables) -> BlockCoder:
        needed = ["mean", "basis"] * (self.basis == "shared") + ["levels"] * (
            self.levels == "calibrated"
        )
        return KakeyaCoder(
            site, self, {name: need_table(tables, name, str(self), site) for name in needed}
        )

    def rank_cap(self, head_dim: int) -> int:
        """The largest rank: of the sketch, half of head_dim unless given."""
        if self.pca == "random":
            return min(self.rank or max(head_dim // 2, 8), head_dim)
        return min(self.rank, head_dim)


# Bytes of a `kakeya` block: its heads one after the other.
#
#     u16 rank | mean, basis, centres (unless the basis is shared: centres alone) | segments, packed | t, norm as fp16 with
#     an exponent byte each | levels, packed | where outliers are on: counts per token u16, channels packed, values fp16
#
# Means and centres in fp16 have an exponent byte of their own; a basis needs none.


def pack_set(parts: Sequence[torch.Tensor], codec: Kakeya) -> bytes:
    """One head of one block."""
    rank_, mean, basis, centres, segment, t, t_exponent, norm, norm_exponent, codes, apart, kept = (
        parts
    )
    rank = int(rank_)
    length = _payload_length(rank)
    out = [rank.to_bytes(2, "little")]
    if codec.basis == "block":
        out += [_floats(mean, codec), _floats(basis[:rank], codec)]
    out.append(_floats(centres[:, :rank], codec))
    out.append(_raw(pack(segment, _segment_bits(codec, centres.shape[0]))))
    for half, exponent in ((t, t_exponent), (norm, norm_exponent)):
        out += [_raw(half), int(exponent).to_bytes(1, "little", signed=True)]
    out.append(_raw(pack(codes[:, :length].flatten(), codec.bits)))
    if codec.outlier:
        where = apart[:, :length]
        out.append(_raw(where.sum(dim=1).to(torch.int16)))
        out.append(_raw(pack(where.nonzero()[:, 1], _channel_bits(length))))
        out.append(_raw(kept[:, :length][where]))
    return b"".join(out)


def unpack_blocks(
    payloads: Sequence[bytes],
    tokens: int,
    site: Site,
    codec: Kakeya,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
) -> Parts:
    """The codes of all blocks; AssayError where a payload is too short, too long or contradicts
    itself.
    """
    sets = []
    for payload in payloads:
        reader = _Reader(payload)
        sets += [_unpack_set(reader, tokens, site, codec, shared) for _ in range(site.heads)]
        reader.end()
    wide = max(int(s[0]) for s in sets)
    long = _payload_length(wide)
    columns = []
    for i, column in enumerate(zip(*sets, strict=True)):
        # Sets of a smaller rank are filled up with zeros.
        pad = {2: (0, 0, 0, wide), 3: (0, wide), 9: (0, long), 10: (0, long), 11: (0, long)}.get(i)
        if pad:
            axis = -2 if i == 2 else -1
            column = tuple(
                torch.nn.functional.pad(t, (*pad[:-1], pad[-1] - t.shape[axis])) for t in column
            )
        columns.append(torch.stack(column).unflatten(0, (len(payloads), site.heads)))
    return tuple(columns)


def _unpack_set(
    reader: _Reader,
    tokens: int,
    site: Site,
    codec: Kakeya,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
) -> Parts:
    rank = int.from_bytes(reader.take(2), "little")
    if not 1 <= rank <= site.head_dim or (shared is not None and rank != shared[1].shape[0]):
        raise damaged(f"a block claims the rank {rank} for vectors of {site.head_dim}")
    length, k = _payload_length(rank), min(codec.k, tokens)
    if shared is None:
        mean = reader.floats((site.head_dim,), codec)
        basis = reader.floats((rank, site.head_dim), codec)
    else:
        mean, basis = shared
    centres = reader.floats((k, rank), codec)
    segment = reader.packed(tokens, _segment_bits(codec, k)).clamp_max(k - 1)
    halves = []
    for _ in range(2):
        halves += [reader.halves(tokens), torch.tensor(reader.exponent(), dtype=torch.int8)]
    codes = reader.packed(tokens * length, codec.bits).reshape(tokens, length).to(torch.uint8)
    apart = torch.zeros(tokens, length, dtype=torch.bool)
    kept = torch.zeros(tokens, length, dtype=torch.float16)
    if codec.outlier:
        counts = reader.values(tokens, torch.int16).long()
        if bool((counts < 0).any()) or bool((counts > length).any()):
            raise damaged("a block counts more outliers than it has channels")
        total = int(counts.sum())
        rows = torch.arange(tokens).repeat_interleave(counts)
        channels = reader.packed(total, _channel_bits(length)).long().clamp_max(length - 1)
        apart[rows, channels] = True
        kept[rows, channels] = reader.halves(total)
    return torch.tensor(rank), mean, basis, centres, segment, *halves, codes, apart, kept


class _Reader:
    """Takes a payload apart from its front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise damaged(f"a block ends after {len(self._data)} bytes, {size} more were due")
        self._at += size
        return self._data[self._at - size : self._at]

    def end(self) -> None:
        if self._at != len(self._data):
            raise damaged(f"a block has {len(self._data) - self._at} bytes too many")

    def values(self, count: int, kind: torch.dtype) -> torch.Tensor:
        raw = self.take(count * kind.itemsize)
        return torch.frombuffer(bytearray(raw), dtype=kind) if raw else torch.empty(0, dtype=kind)

    def halves(self, count: int) -> torch.Tensor:
        return self.values(count, torch.float16)

    def exponent(self) -> int:
        return int.from_bytes(self.take(1), "little", signed=True)

    def packed(self, count: int, width: int) -> torch.Tensor:
        return unpack(self.values(packed_bytes(count, width), torch.uint8), width, count)

    def floats(self, shape: tuple[int, ...], codec: Kakeya) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        if codec.skeleton == "fp32":
            return self.values(count, torch.float32).reshape(shape)
        exponent = torch.tensor([self.exponent()])
        return from_halves(self.halves(count)[None], exponent)[0].reshape(shape)


def _floats(x: torch.Tensor, codec: Kakeya) -> bytes:
    """Values of the skeleton, which are rounded already."""
    if codec.skeleton == "fp32":
        return _raw(x)
    half, exponent = to_halves(x[None])
    return int(exponent).to_bytes(1, "little", signed=True) + _raw(half)


def _raw(x: torch.Tensor) -> bytes:
    return bytes(x.contiguous().numpy().tobytes())


def _payload_length(rank: int) -> int:
    return 1 << (rank - 1).bit_length()


def _segment_bits(codec: Kakeya, k: int) -> int:
    return max(1, (k - 1).bit_length())


def _channel_bits(length: int) -> int:
    return max(1, (length - 1).bit_length())


# Coding of blocks for the `kakeya` codec; its formulas stand in `kakeya`.
#
# Codes are tensors over sets (blocks × heads): `rank` [G], mean, basis, centres, and per token the
# segment, t, norm, levels and outliers. What lies beyond a set's rank, or its padded length L, is
# zero and is not packed.


@dataclass(frozen=True)
class _Analysis:
    """Everything up to the levels: c = U (x − μ), `near` = t g_s, `residual` = c − t g_s of length
    `size`, z of it.
    """

    rank: torch.Tensor
    mean: torch.Tensor
    basis: torch.Tensor
    centres: torch.Tensor
    segment: torch.Tensor
    t: tuple[torch.Tensor, torch.Tensor]
    c: torch.Tensor
    near: torch.Tensor
    residual: torch.Tensor
    size: torch.Tensor
    z: torch.Tensor

    def rows(self, c: torch.Tensor) -> torch.Tensor:
        """Tokens [G, n, d] of coefficients."""
        return self.mean[:, None] + c @ self.basis


class KakeyaCoder(BlockCoder):
    """Blocks of one head are coded on their own; `tables` may hold a shared basis and levels."""

    def __init__(self, site: Site, codec: Kakeya, tables: Tables) -> None:
        super().__init__(site)
        self.granularity = self.block_tokens = codec.block
        self.codec = codec
        self._tables = tables
        levels = tables.get("levels", gaussian_levels(2**codec.bits))
        self._levels = torch.tensor(levels, dtype=torch.float32)
        self._signs = random_signs(codec.seed, 1 << (site.head_dim - 1).bit_length())

    @property
    def tables(self) -> Tables:
        return dict(self._tables)

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        rows = x.float().flatten(0, 1)
        a = self._analysed(rows)
        codes = nearest_level(a.z, self._levels.to(a.z.device))
        apart = (
            a.z.abs() > self.codec.outlier
            if self.codec.outlier
            else torch.zeros_like(a.z, dtype=torch.bool)
        )
        kept = torch.where(apart, a.z, 0.0).half()
        told = _length(rows) if self.codec.published_norm else a.size
        norm = to_halves(told[..., 0])
        parts = (a.rank, a.mean, a.basis, a.centres, a.segment, *a.t, *norm, codes, apart, kept)
        return tuple(part.unflatten(0, x.shape[:2]) for part in parts)

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        heads = parts[0].shape[:2]
        (
            rank,
            mean,
            basis,
            centres,
            segment,
            t,
            t_exponent,
            norm,
            norm_exponent,
            codes,
            apart,
            kept,
        ) = (part.flatten(0, 1) for part in parts)
        z = self._z(codes, apart, kept)
        factor = from_halves(norm, norm_exponent)[..., None]
        if self.codec.published_norm:
            factor = torch.ones_like(factor)
        residual = self._turned_back(z, rank, centres.shape[-1]) * factor
        near = from_halves(t, t_exponent)[..., None] * self._chosen(centres, segment)
        rows = mean[:, None] + (near + residual) @ basis
        return rows.unflatten(0, heads)

    def residuals(self, x: torch.Tensor) -> torch.Tensor:
        """Rotated unit residuals of blocks, those of this very recipe, flat: what levels are fitted
        to.
        """
        a = self._analysed(x.float().flatten(0, 1))
        return a.z[self._used(a)]

    def stages(self, x: torch.Tensor, side: torch.Tensor | None = None) -> list[Stage]:
        """pca leaves out components and rounds the skeleton; kmeans and wht lose nothing; levels;
        norm as stored.
        """
        shape, nan = x.shape[:2], torch.nan
        a = self._analysed(x.float().flatten(0, 1))
        parts = self.quantise(x)
        codes, apart, kept = (part.flatten(0, 1) for part in parts[9:])
        used = self._used(a)
        unit = torch.where(
            used[..., : a.residual.shape[-1]], a.residual / a.size.clamp_min(1e-30), nan
        )
        energy = a.c.square().sum((1, 2)).clamp_min(1e-30)
        explained = 1 - a.residual.square().sum((1, 2)) / energy
        outliers = apart.sum((1, 2)) / used.sum((1, 2))

        def stage(
            name: str, c: torch.Tensor, values: torch.Tensor | None, **figures: torch.Tensor
        ) -> Stage:
            taken = None if values is None else values.flatten(1).unflatten(0, shape)
            found = {k: v.unflatten(0, shape) for k, v in figures.items()}
            return Stage(name, a.rows(c).unflatten(0, shape), taken, found)

        def coded(z: torch.Tensor) -> torch.Tensor:
            return a.near + self._turned_back(z, a.rank, a.c.shape[-1]) * a.size

        return [
            stage("pca", a.c, None, rank=a.rank.float()),
            stage("kmeans", a.near + a.residual, unit, explained=explained),
            stage("wht", coded(a.z), torch.where(used, a.z, nan)),
            stage("levels", coded(self._z(codes, apart, kept)), None, outliers=outliers),
            Stage("norm", self.dequantise(parts)),
        ]

    def pack(self, parts: Parts) -> list[bytes]:
        return [
            b"".join(pack_set([p[i, j].cpu() for p in parts], self.codec) for j in range(h))
            for i, h in [(i, self.site.heads) for i in range(parts[0].shape[0])]
        ]

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        return unpack_blocks(payloads, tokens, self.site, self.codec, self._shared())

    def _analysed(self, rows: torch.Tensor) -> _Analysis:
        """Rows [G, n, d] through skeleton, segments and rotation."""
        mean, basis, rank = self._skeleton(rows)
        c = (rows - mean[:, None]) @ basis.mT
        centres = self._stored(spherical_centres(c, min(self.codec.k, c.shape[1]), self.codec.seed))
        cosine = c @ centres.mT
        segment = cosine.abs().argmax(dim=-1)
        t = to_halves(cosine.gather(-1, segment[..., None])[..., 0])
        near = from_halves(*t)[..., None] * self._chosen(centres, segment)
        residual = c - near
        size = _length(residual)
        z = self._turned(residual, size, rank)
        return _Analysis(rank, mean, basis, centres, segment, t, c, near, residual, size, z)

    def _chosen(self, centres: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
        """The centre of each row's segment [G, n, R]."""
        return centres.gather(1, segment.long()[..., None].expand(-1, -1, centres.shape[-1]))

    def _used(self, a: _Analysis) -> torch.Tensor:
        """Which coordinates of z are within their set's padded length [G, n, L]."""
        used = torch.arange(a.z.shape[-1], device=a.z.device) < _padded(a.rank)[:, None]
        return used[:, None].expand_as(a.z)

    def _z(self, codes: torch.Tensor, apart: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """What levels and outliers stand for."""
        return torch.where(apart, kept.float(), self._levels.to(codes.device)[codes.int()])

    def _shared(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.codec.basis != "shared":
            return None
        mean, basis = (
            torch.from_numpy(self._tables[name].astype("float32")) for name in ("mean", "basis")
        )
        return mean, basis

    def _skeleton(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean [G, d], basis [G, R, d] with zeros beyond the rank, rank [G], as they are stored."""
        shared = self._shared()
        if shared is not None:
            mean, basis = (t.to(rows.device) for t in shared)
            rank = torch.full((rows.shape[0],), basis.shape[0], device=rows.device)
            return mean.expand(rows.shape[0], -1), basis.expand(rows.shape[0], -1, -1), rank
        codec = self.codec
        mean = self._stored(rows.mean(dim=1))
        centred = rows - mean[:, None]
        # Shares of variance do not change with the scale, and squares of huge values would
        # overflow.
        scale = centred.abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-30)
        cap = codec.rank_cap(self.site.head_dim)
        if codec.pca == "exact":
            basis, variances = exact_basis(centred / scale)
        else:
            basis, variances = random_basis(centred / scale, cap, codec.seed)
        rank = ranks(variances, codec.variance, cap)
        basis = basis[:, : int(rank.max())]
        used = torch.arange(basis.shape[1], device=rows.device) < rank[:, None]
        return mean, self._stored(basis) * used[..., None], rank

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        """Rounded as the skeleton is stored, float32."""
        return x if self.codec.skeleton == "fp32" else from_halves(*to_halves(x))

    def _turned(
        self, residual: torch.Tensor, size: torch.Tensor, rank: torch.Tensor
    ) -> torch.Tensor:
        """[G, n, R] → z [G, n, L of the largest], zero beyond each set's own L."""
        lengths = _padded(rank)
        top = int(lengths.max())
        unit = torch.nn.functional.pad(
            residual / size.clamp_min(1e-30), (0, top - residual.shape[-1])
        )
        z = torch.zeros_like(unit)
        for length in lengths.unique().tolist():
            chosen = lengths == length
            part = unit[chosen][..., :length] * self._signs[:length].to(unit.device)
            z[chosen] = torch.nn.functional.pad(wht(part) * length**0.5, (0, top - length))
        return z

    def _turned_back(self, z: torch.Tensor, rank: torch.Tensor, width: int) -> torch.Tensor:
        """z → unit residuals [G, n, width], zero beyond the rank."""
        lengths = _padded(rank)
        found = torch.zeros(*z.shape[:2], max(width, z.shape[-1]), device=z.device)
        for length in lengths.unique().tolist():
            chosen = lengths == length
            part = wht(z[chosen][..., :length]) / length**0.5 * self._signs[:length].to(z.device)
            found[chosen] = torch.nn.functional.pad(part, (0, found.shape[-1] - length))
        used = torch.arange(width, device=z.device) < rank[:, None]
        return found[..., :width] * used[:, None]


def _length(rows: torch.Tensor) -> torch.Tensor:
    """‖row‖ [..., 1], without overflow of squares."""
    top = rows.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
    return (rows / top).norm(dim=-1, keepdim=True) * top


def _padded(rank: torch.Tensor) -> torch.Tensor:
    """The next power of two of each rank."""
    return torch.tensor([1 << (int(r) - 1).bit_length() for r in rank.tolist()], device=rank.device)
