"""Blocks decoded by the kernels: coefficients bit by bit as on the CPU, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("numba")

from assay.errors import AssayError
from assay.lab.kv.blocks import BlockCodec, BlockDamaged, BlockTables
from kv.tier_samples import WIDTH, drawn, sample, turned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANK = 7
"""Coefficients of a stream where the interpreter takes a hundredth of a second for each."""


def small_tables() -> BlockTables:
    """Of the first layer alone, with the first few coefficients; the first of them under a law that has low bits."""
    whole = sample().tables
    tensors = {n: t for n, t in whole.tensors.items() if n.startswith("0.")} | {"inv_freq": whole.tensors["inv_freq"]}
    for stream in "kv":
        for name, axis in (
            ("synthesis", 0),
            ("synthesis_scale", 0),
            ("analysis", 1),
            ("inner.laws", 1),
            ("inner.shrink", 1),
        ):
            table = tensors[f"0.{stream}.{name}"]
            tensors[f"0.{stream}.{name}"] = np.ascontiguousarray(np.take(table, np.arange(RANK), axis=axis))
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


@pytest.mark.parametrize("merged", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_kernels_find_the_coefficients_of_the_cpu_bit_by_bit(merged: bool) -> None:
    from assay.lab.kv.blocks_gpu import GpuBlockCodec

    cpu = BlockCodec(small_tables(), 1)
    gpu = GpuBlockCodec(cpu.tables, DEVICE, 2, group=32)
    gpu.settings |= {"sections": 4, "merged": merged}
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
            assert (inputs[gpu._rows[i] : gpu._rows[i] + stream.rank, column : column + tokens] == exact).all()
        column += (tokens + 3) // 4 * 4
    assert escapes > 0
    # A block is refused before anything is launched; a forged checksum of a stream that no encoder wrote afterwards.
    with pytest.raises(BlockDamaged, match="checksum"):
        gpu.decode([data[0][:-3] + b"\0\0\0"])
    gpu.check = lambda block, key=None: cpu.check(data[2])  # type: ignore[method-assign]
    with pytest.raises(BlockDamaged, match="no code of its tables"):
        gpu.decode([data[2][:-2] + bytes([data[2][-2] ^ 1, data[2][-1]])])


def test_blocks_that_a_gpu_encoded_are_read_by_the_cpu() -> None:
    from assay.lab.kv.blocks_gpu import GpuBlockCodec
    from assay.lab.kv.encode_gpu import GpuEncoder

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
