"""Text that a target writes to questions of its own, for its draft head to learn from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.engines import full_spec
from assay.engines.ray_scorer import Pool
from assay.engines.vllm.path import packages_alone
from assay.errors import AssayError
from assay.runs import Kept

TEMPERATURES = (0.0, 0.7, 1.0)
"""Texts take turns: greedy text is what greedy decoding meets, sampled text leaves the beaten path.
"""


@dataclass(frozen=True)
class Written:
    """One text: prompt and answer in one list of ids, of which the first `begin` are the prompt."""

    kind: str
    ids: list[int]
    begin: int
    temperature: float


Write = Callable[[list[list[int]], int, float, int], list[list[int]]]
"""(prompts, most tokens, temperature, seed) → the tokens that were written after each."""


Spread = Callable[[Sequence[tuple[list[list[int]], int, float, int]]], Iterator[list[list[int]]]]
"""The arguments of several calls of a `Write` → what each of them writes, in order."""


def side_by_side(
    asked: Sequence[tuple[str, list[int]]],
    here: Write,
    tokens: int,
    temperatures: Sequence[float],
    kept: Kept | None,
    chunk: int,
    spread: Spread,
) -> Write:
    """What `generate_texts` may call in place of `here`: `spread` writes the chunks that are not
    kept side by side, and gives them in their order.
    """
    todo = {}
    for number, begin in enumerate(range(0, len(asked), chunk)):
        some = [ids for _, ids in asked[begin : begin + chunk]]
        t = temperatures[number % len(temperatures)]
        # Read, since a damaged one is written again.
        if kept is None or kept.get(["text", t, tokens, some]) is None:
            todo[number] = (some, tokens, t, number)
    answers = zip(todo, spread([*todo.values()]), strict=True)

    def write(ids: list[list[int]], tokens: int, temperature: float, seed: int) -> list[list[int]]:
        # Another run of the same plan may have kept a chunk meanwhile, whose answer is passed over.
        own = (answer for number, answer in answers if number == seed)
        return next(own) if seed in todo else here(ids, tokens, temperature, seed)

    return write


def generate_texts(
    asked: Sequence[tuple[str, list[int]]],
    write: Write,
    tokens: int,
    temperatures: Sequence[float],
    kept: Kept | None,
    enough: Callable[[int], bool] = lambda tokens: False,
    advance: Callable[[], None] = lambda: None,
    chunk: int = 64,
) -> list[Written]:
    """The answers to all prompts, `kept` in chunks so that an interrupted run goes on; ends early
    when `enough(tokens)`.
    """
    found: list[Written] = []
    for number, begin in enumerate(range(0, len(asked), chunk)):
        part, t = asked[begin : begin + chunk], temperatures[number % len(temperatures)]

        def measure(
            part: Sequence[tuple[str, list[int]]] = part, t: float = t, seed: int = number
        ) -> Any:
            out = write([ids for _, ids in part], tokens, t, seed)
            flat = np.array([i for ids in out for i in ids], dtype=np.int32)
            return {"ids": flat, "lengths": np.array([len(ids) for ids in out], dtype=np.int32)}

        rows = (
            measure()
            if kept is None
            else kept.have(["text", t, tokens, [ids for _, ids in part]], measure)
        )
        ends = np.cumsum(rows["lengths"])
        for (kind, ids), own in zip(part, np.split(rows["ids"], ends[:-1]), strict=True):
            if len(own) > 8:
                found.append(Written(kind, ids + own.tolist(), len(ids), t))
        advance()
        if enough(sum(len(w.ids) for w in found)):
            break
    return found


def on_workers(pool: Pool, model: str) -> Spread:
    """Write with the model in every worker of a cluster."""
    there = pool.scorer(full_spec(model))

    def unit(task: Any) -> Callable[[], tuple[str, tuple[Any, ...]]]:
        return lambda: ("run", (f"{__name__}:write_there", *task))

    return lambda tasks: pool.map(there.spec, [unit(task) for task in tasks])


def write_there(
    scorer: Any, asked: list[list[int]], tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """What `with_transformers` writes, by the engine of a worker."""
    return with_transformers(scorer.engine.model, scorer.engine.tokenizer)(
        asked, tokens, temperature, seed
    )


def with_transformers(model: Any, tokenizer: Any) -> Write:
    """Write with the model itself."""
    ends = end_ids(model, tokenizer)

    def write(
        asked: list[list[int]], tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        width = max(map(len, asked))
        pad = min(ends, default=0)
        device = model.device
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in asked], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in asked], device=device)
        drawn = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        torch.manual_seed(seed)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                pad_token_id=pad,
                eos_token_id=sorted(ends) or None,
                repetition_penalty=1.0,
                **drawn,
            )
        return [_up_to_end(row, ends) for row in out[:, width:].tolist()]

    return write


def with_vllm(python: Path, model: str, ends: frozenset[int], share: float = 0.4) -> Write:
    """Write with vLLM in a process of its own, which starts once a call: give it many prompts at
    once.

    AssayError with its last line where it cannot run.
    """

    def write(
        asked: list[list[int]], tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        with tempfile.TemporaryDirectory() as folder:
            job = Path(folder) / "job.json"
            plan = {
                "model": model,
                "prompts": asked,
                "tokens": tokens,
                "temperature": temperature,
                "seed": seed,
                "share": share,
                "ends": sorted(ends),
            }
            job.write_text(json.dumps(plan))
            code = (
                "import sys; from assay_lab.heads.text import vllm_child; vllm_child(sys.argv[1])"
            )
            alone = packages_alone(Path(folder) / "path")
            paths = [str(alone), os.environ.get("PYTHONPATH", "")]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            done = subprocess.run(
                [str(python), "-c", code, str(job)],
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            answer = job.with_suffix(".out")
            if done.returncode != 0 or not answer.exists():
                last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
                raise AssayError(
                    f"vLLM wrote no text: {last[:300]}",
                    finding_id="speculation.head_text",
                    remedy="leave --python out: transformers then writes the text",
                )
            rows: list[list[int]] = json.loads(answer.read_text())
            return rows

    return write


def vllm_child(job: str) -> None:
    """What the process of `with_vllm` does."""
    from vllm import LLM, SamplingParams

    plan: Mapping[str, Any] = json.loads(Path(job).read_text())
    longest = max(map(len, plan["prompts"])) + plan["tokens"] + 8
    options: dict[str, Any] = {
        "model": plan["model"],
        "max_model_len": longest,
        "enable_prefix_caching": False,
    }
    if torch.cuda.is_available():
        options["gpu_memory_utilization"] = plan["share"]
    engine = LLM(**options)
    drawn = SamplingParams(
        max_tokens=plan["tokens"],
        temperature=plan["temperature"],
        seed=None,
        stop_token_ids=plan["ends"],
        detokenize=False,
    )
    out = engine.generate(
        [{"prompt_token_ids": ids} for ids in plan["prompts"]], drawn, use_tqdm=False
    )
    Path(job).with_suffix(".out").write_text(
        json.dumps([list(o.outputs[0].token_ids) for o in out])
    )
    sys.stdout.flush()
    os._exit(0)  # workers that linger would keep the caller waiting


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ids = [*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id]
    return frozenset(int(i) for i in ids if i is not None)


def _up_to_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)


def draft_vocabulary(
    texts: Sequence[Written], vocab: int, wanted: int
) -> tuple[torch.Tensor, float]:
    """(the `wanted` most frequent written tokens as ascending ids, the share of written tokens that
    they cover).

    Places that no token of the text takes go to the lowest ids, which are bytes and frequent words
    in most tokenizers.
    """
    counts = np.zeros(vocab, dtype=np.int64)
    for text in texts:
        np.add.at(counts, np.array(text.ids[text.begin :]), 1)
    order = np.lexsort((np.arange(vocab), -counts))[:wanted]
    share = float(counts[order].sum() / max(counts.sum(), 1))
    return torch.from_numpy(np.sort(order)), share
