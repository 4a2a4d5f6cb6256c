"""Lines as the engines print them, from counts: the tests' own samples, and the inverse of the
parsers.
"""

from __future__ import annotations

from collections.abc import Sequence

from assay.speculation.combine import Evidence, combine
from assay.speculation.read import Reading


def read(*lines: str) -> Evidence:
    """The evidence in log lines."""
    reading = Reading()
    for line in lines:
        reading.line(line.encode())
    return combine(reading.settled())


def read_document(value: object) -> Evidence:
    reading = Reading()
    reading.document(value)
    return combine(reading.settled())


def read_metrics(*pages: str) -> Evidence:
    reading = Reading()
    for page in pages:
        reading.metrics(page)
    return combine(reading.settled())


def vllm_v1(
    per_position: Sequence[int],
    drafts: int,
    drafted: int | None = None,
    *,
    prefix: str = "(APIServer pid=7) ",
    time: str = "10-11 08:30:00",
    wording: str = "0.11",
) -> str:
    """One window in the wording of a version."""
    k, accepted = len(per_position), sum(per_position)
    drafted = drafts * k if drafted is None else drafted
    rate = 100 * accepted / drafted if drafted else float("nan")
    length = f"{1 + accepted / drafts:.2f}" if drafts else "nan"
    rates = ", ".join(f"{a / drafts:.3f}" if drafts else "nan" for a in per_position)
    counts = f"Accepted: {accepted} tokens, Drafted: {drafted} tokens"
    head = f"{prefix}INFO {time} "
    match wording:
        case "0.8.2":
            fraction = f"{rate / 100:.3f}"
            return (
                f"{head}[metrics.py:57] Speculative metrics: Draft acceptance rate: {fraction}, "
                f"Number of accepted tokens: {accepted}, Number of draft tokens: {drafted}, "
            )
        case "0.8.3":
            return (
                f"{head}[metrics.py:53] SpecDecoding metrics: Draft acceptance rate: {rate:.1f}%,"
                f" {counts}"
            )
        case "0.8.5":
            return (
                f"{head}[metrics.py:81] SpecDecoding metrics: Draft acceptance rate: {rate:.1f}%,"
                f" Mean acceptance length: {length}, {counts}, Per-position acceptance rate:"
                f" {rates}"
            )
        case "0.28":
            depth = f"Current speculative depth: {k}, "
        case _:
            depth = ""
    return (
        f"{head}[metrics.py:96] SpecDecoding metrics: Mean acceptance length: {length},"
        f" {depth}Accepted throughput: {accepted / 10:.2f} tokens/s, Drafted throughput:"
        f" {drafted / 10:.2f} tokens/s, {counts}, Per-position acceptance rate: {rates}, Avg Draft"
        f" acceptance rate: {rate:.1f}%"
    )


def vllm_engine(
    number: int, speed: float = 50.0, running: int = 1, prefix: str = "(APIServer pid=7) "
) -> str:
    """The line that vLLM prints before the window."""
    return (
        f"{prefix}INFO 10-11 08:30:00 [loggers.py:236] Engine {number:03d}: Avg prompt throughput:"
        f" 3.1 tokens/s, Avg generation throughput: {speed:.1f} tokens/s, Running: {running} reqs,"
        " Waiting: 0 reqs, GPU KV cache usage: 0.4%"
    )


def vllm_v0(accepted: int, drafted: int, emitted: int, k: int, words: str = "tokens") -> str:
    """V0's line of counts since start."""
    drafts = drafted // k
    return (
        "INFO 05-02 11:00:00 metrics.py:350] Speculative metrics: Draft acceptance rate:"
        f" {accepted / drafted:.3f}, System efficiency: {emitted / (drafts * (k + 1)):.3f}, Number"
        f" of speculative tokens: {k}, Number of accepted tokens: {accepted}, Number of draft"
        f" {words}: {drafted}, Number of emitted tokens: {emitted}."
    )


def sglang(
    length: float,
    rate: float | None = None,
    *,
    tokens: int = 400,
    running: int = 1,
    rank: str = "TP0",
    stop: str = ",",
) -> str:
    """A decode batch."""
    printed = "" if rate is None else f" accept rate: {rate:.2f},"
    return (
        f"[2026-03-04 10:00:00 {rank}] Decode batch{stop} #running-req: {running}, #token:"
        f" {tokens}, token usage: 0.02, accept len: {length:.2f},{printed} cuda graph: True, gen"
        " throughput (token/s): 88.10, #queue-req: 0"
    )


def llama_request(accepted: int, drafted: int, wording: str = "old", prefix: str = "") -> str:
    rate = accepted / drafted
    match wording:
        case "old":
            return (
                f"{prefix}draft acceptance rate = {rate:.5f} ({accepted:5d} accepted / {drafted:5d}"
                " generated)"
            )
        case _:
            return (
                f"{prefix}draft acceptance = {rate:.5f} ({accepted:5d} accepted / {drafted:5d}"
                " generated)"
            )


def llama_statistics(name: str, drafts: int, drafted: int, accepted: int, prefix: str = "") -> str:
    return (
        f"{prefix}statistics {name}: #calls(b,g,a) = 1 {drafts} {drafts}, #gen drafts = {drafts},"
        f" #acc drafts = {min(drafts, accepted)}, #gen tokens = {drafted}, #acc tokens ="
        f" {accepted}, dur(b,g,a) = 0.004, 9.1, 0.02 ms"
    )


def vllm_page(
    engines: dict[str, tuple[int, Sequence[int]]], generated: dict[str, int] | None = None
) -> str:
    """A metrics page: for each engine the drafts and the accepted tokens of each position."""
    lines = []
    for name, (drafts, per_position) in engines.items():
        own = f'engine="{name}",model_name="m"'
        drafted, accepted = drafts * len(per_position), sum(per_position)
        lines += [
            f"vllm:spec_decode_num_drafts_total{{{own}}} {float(drafts)}",
            f"vllm:spec_decode_num_drafts_created{{{own}}} 1.7600000001e+09",
            f"vllm:spec_decode_num_draft_tokens_total{{{own}}} {float(drafted)}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{own}}} {float(accepted)}",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{own},position="{i}"}} {float(a)}'
            for i, a in enumerate(per_position)
        ]
        if generated:
            lines.append(f"vllm:generation_tokens_total{{{own}}} {float(generated[name])}")
    return "# TYPE vllm:spec_decode_num_drafts_total counter\n" + "\n".join(lines) + "\n"
