"""What 8-bit floats lose of a model's keys and values, layer by layer, under every way to scale
them.

    python kv_fp8_scales.py --model qwen15 --calibrate WIKI_VALID --text WIKI_TEST --out
    results/kv_fp8_scales.json

Keys after RoPE and values of 512 tokens of each text. The error is Σ(x − x̂)² over the variance Σ(x
− mean)² of a stream, mean over tokens; scales come from the first text and are judged on the
second.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kv_codecs import MODELS, machine

TOP = 448.0
PIECE, PIECES = 256, 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen15")
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--states", type=Path, help="keeps keys and values, and is read where it exists"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.states and arguments.states.exists():
        states = torch.load(arguments.states)
    else:
        states = captured(arguments)
        if arguments.states:
            torch.save(states, arguments.states)
    layers = 1 + max(layer for _, layer, _ in states)
    rows = [row(states, layer, stream) for layer in range(layers) for stream in "kv"]
    found = {"model": arguments.model, "tokens": PIECE * PIECES, "machine": machine(), "rows": rows}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    worst = max(rows, key=lambda r: r["error"]["one"])
    print(json.dumps(worst, indent=1))


def captured(arguments: argparse.Namespace) -> dict[tuple[str, int, str], torch.Tensor]:
    """Keys and values [pieces, KV heads, tokens, head_dim] by text, layer and stream."""
    path = str(MODELS[arguments.model]())
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    found: dict[tuple[str, int, str], list[torch.Tensor]] = {}
    for name, file in (("cal", arguments.calibrate), ("test", arguments.text)):
        ids = tokenizer(file.read_text(encoding="utf-8")[20_000:60_000]).input_ids[: PIECE * PIECES]
        for piece in torch.tensor(ids).reshape(PIECES, PIECE):
            cache = DynamicCache(config=model.config)
            with torch.inference_mode():
                model.base_model(input_ids=piece[None], past_key_values=cache, use_cache=True)
            for layer, held in enumerate(cache.layers):
                found.setdefault((name, layer, "k"), []).append(held.keys[0].clone())
                found.setdefault((name, layer, "v"), []).append(held.values[0].clone())
    return {key: torch.stack(parts) for key, parts in found.items()}


def row(
    states: dict[tuple[str, int, str], torch.Tensor], layer: int, stream: str
) -> dict[str, Any]:
    """One stream under every scale, and its channels that lie far from zero."""
    learnt, x = (states[name, layer, stream].float() for name in ("cal", "test"))
    head = learnt.abs().amax(dim=(0, 2, 3))[None, :, None, None]
    mean = learnt.mean(dim=(0, 2))[None, :, None]
    scales = {
        "one": torch.tensor(1.0),
        "tensor": head.max() / TOP,
        "head": head / TOP,
        "vllm": head.max() / (200.0 if stream == "k" else 100.0),
        **{f"head, {2 ** (i / 8):.2f} of it": head / TOP * 2 ** (i / 8) for i in range(1, 8)},
    }
    variance = (x - x.mean(dim=2, keepdim=True)).square().sum()
    far = (x.abs().amax(dim=(0, 2)) > 30).nonzero().tolist()
    return {
        "layer": layer,
        "stream": stream,
        "largest": x.abs().amax(dim=(0, 2, 3)).tolist(),
        "error": {
            n: float((x - rounded(x, s)).square().sum() / variance) for n, s in scales.items()
        },
        "error_without_mean": float(
            (x - mean - rounded(x - mean, torch.tensor(1.0))).square().sum() / variance
        ),
        "beyond_calibrated": float((x.abs() > head).float().mean()),
        "channels_beyond_30": len(far),
        "their_deviation": sorted(round(float(x[:, h, :, c].std()), 2) for h, c in far),
    }


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-TOP, TOP).to(torch.float8_e4m3fn).float() * scale


if __name__ == "__main__":
    main()
