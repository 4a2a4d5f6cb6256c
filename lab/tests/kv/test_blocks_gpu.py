"""Blocks decoded by the kernels: coefficients bit by bit as on the CPU, on a GPU or in Triton's
interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("numba")

from assay.errors import AssayError
from assay_lab.kv.block_errors import BlockDamaged
from assay_lab.kv.block_tables import BlockTables
from assay_lab.kv.blocks import BlockCodec
from kv.tier_samples import WIDTH, drawn, sample, turned

pytestmark = pytest.mark.engine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANK = 7
"""Coefficients of a stream where the interpreter takes a hundredth of a second for each."""


def small_tables() -> BlockTables:
    """Of the first layer alone, with the first few coefficients; the first of them under a law that
    has low bits.
    """
    whole = sample().tables
    tensors = {n: t for n, t in whole.tensors.items() if n.startswith("0.")} | {
        "inv_freq": whole.tensors["inv_freq"]
    }
    for stream in "kv":
        for name, axis in (
            ("synthesis", 0),
            ("synthesis_scale", 0),
            ("analysis", 1),
            ("inner.laws", 1),
            ("inner.shrink", 1),
        ):
            table = tensors[f"0.{stream}.{name}"]
            tensors[f"0.{stream}.{name}"] = np.ascontiguousarray(
                np.take(table, np.arange(RANK), axis=axis)
            )
        tensors[f"0.{stream}.inner.laws"][:, 0] = 71
    return BlockTables(replace(whole.facts, layers=1), tensors)


def samples(cpu: BlockCodec, lengths: tuple[int, ...]) -> list[bytes]:
    """Blocks one after the other, with coefficients of all sizes and escapes among them."""
    plain, data, first = drawn(sum(lengths), 6)[:1], [], 0
    plain[0, 0, 6] = 400.0
    plain[0, 1, ::3] *= 40
    for i, tokens in enumerate(lengths):
        x = turned(cpu, plain[:, :, first : first + tokens], first).bfloat16()
        data.append(cpu.encode(x, first=first, key=bytes([i] * 32)))
        first += tokens
    return data


def test_the_kernels_find_the_coefficients_of_the_cpu_bit_by_bit() -> None:
    from assay_lab.kv.blocks_gpu import GpuBlockCodec

    cpu = BlockCodec(small_tables(), 1)
    gpu = GpuBlockCodec(cpu.tables, DEVICE, 2, group=32)
    data = samples(cpu, (9, 1, 4))
    keys = [bytes([i] * 32) for i in range(3)]
    found, wanted = gpu.decode(data, keys).cpu(), cpu.decode(data)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert torch.equal(found[:, :, :4], wanted[:, :, :4])
    assert (found.float() - wanted.float()).square().mean() < 2e-5 * wanted.float().square().mean()
    inputs = gpu._slots[0].inputs.view(torch.int16).cpu().numpy().view(np.uint16)
    column = escapes = 0
    for block in data:
        head = cpu.check(block)
        at, tokens = head.exact_at + 2 * head.exact * WIDTH * 2, head.tokens - head.exact
        for i, (size, stream) in enumerate(zip(head.sizes, cpu._streams.values(), strict=True)):
            exact = np.empty((stream.rank, tokens), np.uint16)
            place = [np.array([n]) for n in (at // 2, (at + size) // 2, tokens, 0)]
            cpu._read(stream, np.frombuffer(block, "<u2"), *place, exact)
            escapes += int(np.frombuffer(block, "<u4", 1, at)[0])
            at += size
            assert (
                inputs[gpu._rows[i] : gpu._rows[i] + stream.rank, column : column + tokens] == exact
            ).all()
        column += (tokens + 3) // 4 * 4
    assert escapes > 0
    # A block is refused before anything is launched; a forged checksum of a stream that no encoder
    # wrote afterwards.
    with pytest.raises(BlockDamaged, match="checksum"):
        gpu.decode([data[0][:-3] + b"\0\0\0"])
    gpu.check = lambda block, key=None, **_: cpu.check(data[2])  # type: ignore[method-assign]
    with pytest.raises(BlockDamaged, match="no code of its tables"):
        gpu.decode([data[2][:-2] + bytes([data[2][-2] ^ 1, data[2][-1]])])


class Paged:
    """Pages [pages, 2, heads, tokens, dim] of one layer, and where a kernel writes into them."""

    def __init__(self, pages: int, page: int, heads: int = 2, dim: int = WIDTH // 2) -> None:
        from assay_lab.kv.blocks_gpu import Target

        self.x = torch.full((pages, 2, heads, page, dim), -7.0, dtype=torch.bfloat16, device=DEVICE)
        of = self.x[0].cpu()
        starts = [
            [
                [h * of.stride(1) + t * dim + kv * of.stride(0) for h in range(heads)]
                for t in range(page)
            ]
            for kv in range(2)
        ]
        self.target = Target(self.x, torch.tensor(starts, device=DEVICE), self.x.stride(0))

    def tokens(self, pages: tuple[int, ...]) -> torch.Tensor:
        """[1, 2, tokens, width] of some pages."""
        return self.x[list(pages)].cpu().permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)[None]


def test_blocks_are_decoded_into_pages_and_a_bad_stream_is_found_afterwards() -> None:
    from assay_lab.kv.blocks_gpu import GpuBlockCodec
    from assay_lab.kv.tier.scheduler import Load, Save
    from assay_lab.kv.tier.store import BlockStore
    from assay_lab.kv.tier.transfer import TierWorker

    cpu = BlockCodec(small_tables(), 1)
    gpu = GpuBlockCodec(cpu.tables, DEVICE, 2, group=8)  # a group each
    data, keys = samples(cpu, (8, 8)), [bytes([i] * 32) for i in range(2)]
    store, paged, pages = BlockStore(None, 10**6), Paged(8, 4), (5, 2, 7, 1)
    mover = TierWorker(store, gpu, paged, 8, 4)  # type: ignore[arg-type]
    for key, block in zip(keys, data, strict=True):
        store.put(key, block)
    # From the middle of the first block to before the end of the second one.
    assert mover.load(Load("a", tuple(keys), 4, 12, pages[:3])) == mover.settle() == []
    wanted, held = cpu.decode(data, keys), paged.tokens(pages)
    assert (held[:, :, [0, 1, 2, 3, 12, 13, 14, 15]] == -7).all()
    assert torch.equal(held[:, :, 4:12], gpu.decode(data, keys).cpu()[:, :, 4:12])
    assert (held - wanted)[
        :, :, 4:12
    ].float().square().mean() < 2e-5 * wanted.float().square().mean()
    assert store.counters.loaded_tokens == 8 and store.counters.loaded_blocks == 2
    # A good checksum over a stream that no encoder wrote: known only when the device has come so
    # far.
    check = cpu.check
    gpu.check = lambda block, key=None, **_: check(block if len(block) != len(data[1]) else data[1])  # type: ignore[method-assign]
    store.put(keys[1], data[1][:-2] + bytes([data[1][-2] ^ 1, data[1][-1]]))
    assert mover.load(Load("b", tuple(keys), 0, 16, pages)) == [] and mover.settle() == [7, 1]
    counters = store.counters
    assert (counters.refused, counters.recomputed_tokens, counters.loaded_tokens) == (1, 8, 16)
    assert keys[1] not in store and keys[0] in store
    assert torch.equal(paged.tokens(pages)[:, :, :4], wanted[:, :, :4])  # the sinks
    mover.save([Save(keys[1], 8, pages[2:], "b")])
    assert counters.dropped == 1
    # A checksum that does not hold.
    gpu.check = check  # type: ignore[method-assign]
    store.put(keys[1], data[1][:-2] + bytes([data[1][-2] ^ 1, data[1][-1]]))
    assert mover.load(Load("c", tuple(keys), 0, 16, pages)) == [] and mover.settle() == [7, 1]
    store.put(keys[1], data[1])
    store.put(
        keys[0], data[0][:-9]
    )  # a header that does not fit is refused before anything is launched
    assert mover.load(Load("d", tuple(keys), 0, 16, pages)) == list(pages) and mover.settle() == []
    assert counters.refused == 3 and keys[1] in store and keys[0] not in store


def test_blocks_that_a_gpu_encoded_are_read_by_the_cpu() -> None:
    from assay_lab.kv.blocks_gpu import GpuBlockCodec
    from assay_lab.kv.encode_gpu import GpuEncoder

    cpu = BlockCodec(small_tables(), 1)
    plain = drawn(18, 6)[:1]
    plain[0, 0, 6], plain[0, 1, 12] = 400.0, 300.0
    x = turned(cpu, plain, 0).bfloat16()
    keys = [bytes([i] * 32) for i in range(2)]
    encoder = GpuEncoder(GpuBlockCodec(cpu.tables, DEVICE, 2, group=32))
    blocks = encoder.encode(x.to(DEVICE), [0, 9], keys)
    wanted = [cpu.encode(x[:, :, 9 * i : 9 * i + 9], first=9 * i, key=keys[i]) for i in range(2)]
    found, other = cpu.decode(blocks, keys), cpu.decode(wanted, keys)
    assert torch.equal(found[:, :, :4], x[:, :, :4])
    # A number at a tie may fall to the other side, so bytes are not compared.
    assert [len(b) for b in blocks] == pytest.approx([len(b) for b in wanted], rel=0.02)
    errors = [float((back.float() - x.float()).square().mean()) for back in (found, other)]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)
    assert any(np.frombuffer(cpu_escapes(cpu, b), "<u4").any() for b in blocks)
    x[0, 0, 3, 2] = float("inf")
    with pytest.raises(AssayError, match="infinity"):
        encoder.encode(x.to(DEVICE), [0, 9], keys)


def cpu_escapes(cpu: BlockCodec, block: bytes) -> bytes:
    """The counts of escapes of all sections."""
    head = cpu.check(block)
    ends = head.exact_at + 2 * head.exact * WIDTH * 2 + np.cumsum([0, *head.sizes])
    return b"".join(block[at : at + 4] for at in ends[:-1])
