"""Text that the target writes itself: prompts of three kinds, answered by vLLM where there is one, else by transformers.

A head learns to guess this target, so it is trained on what this target says. Prompts are chat turns made from templates and
topics, prose that begins passages of a text, and code that begins functions of Python's own library: every machine has them.
Every fifteenth prompt is held out: heads are measured on those and never trained on them.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.errors import AssayError
from assay.fidelity.text import read_text
from assay.runs import Kept

KINDS = ("chat", "code", "prose")
HELD_OUT = 15
"""One prompt of so many is held out; kinds take turns of four, so that all of them are."""
TEMPERATURES = (0.0, 0.7, 1.0)
"""Texts take turns: greedy text is what greedy decoding meets, sampled text leaves the beaten path."""
CHUNK = {"cpu": 64, "cuda": 2048}
"""Texts that are written, and kept, at once, by device."""

_ASKED = """Explain {} to a beginner.|What is {}, and why does it matter?|Write a short story about {}.|
List five facts about {}.|Give me three tips about {}.|Summarise the history of {} in one paragraph.|Write a poem about {}.|
What are the advantages and disadvantages of {}?|How does {} work?|Write a friendly email about {}.|
Compare {} with its closest alternative.|What common mistakes do people make with {}?|Plan a lesson about {}.|
Write a dialogue between two friends about {}.|Describe {} to a child.|What questions would you ask an expert on {}?|
Write an introduction for an essay on {}.|Give a step-by-step guide to {}.|What is the future of {}?|
Write a product description that mentions {}.|Is {} overrated? Argue both sides.|Write a JSON object that describes {}.|
Make a table with three rows about {}.|Write a Python class that models {}.|Explain the economics of {}."""
_TOPICS = """gravity|photosynthesis|the water cycle|volcanoes|black holes|vaccines|the human heart|sleep|memory|dreams|
climate change|recycling|solar panels|wind turbines|electric cars|bicycles|trains|bridges|lighthouses|maps|compasses|clocks|
the printing press|the telephone|radio|television|the internet|search engines|social media|email|passwords|encryption|
blockchain|databases|spreadsheets|sorting algorithms|recursion|binary search|machine learning|neural networks|robots|drones|
satellites|the Moon|Mars|comets|telescopes|microscopes|atoms|electricity|magnets|batteries|engines|steel|glass|paper|cotton|
silk|coffee|tea|chocolate|bread|cheese|olive oil|rice|potatoes|honey|salt|sugar|spices|gardening|composting|bees|ants|
elephants|whales|penguins|wolves|cats|dogs|horses|owls|sharks|dinosaurs|trees|forests|deserts|rivers|oceans|islands|mountains|
glaciers|earthquakes|hurricanes|rainbows|clouds|chess|football|swimming|running|yoga|hiking|photography|painting|sculpture|
jazz|the piano|the violin|opera|theatre|cinema|comics|novels|poetry|libraries|museums|schools|universities|exams|teamwork|
leadership|negotiation|time management|budgeting|taxes|inflation|interest rates|stocks|insurance|marketing|start-ups|
small businesses|remote work|job interviews|public speaking|friendship|families|weddings|birthdays|holidays|travel|hotels|
airports|passports|languages|translation|grammar|handwriting|democracy|elections|constitutions|courts|human rights|the Romans|
ancient Egypt|the Renaissance|the Industrial Revolution|the Silk Road|castles|pirates|knights|dragons|ghosts|time travel|
probability|statistics|geometry|algebra|prime numbers|infinity|logic puzzles|riddles|kites|toys|board games|video games"""


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split("|")]


def prompts(
    tokenizer: Any, count: int, sources: Sequence[str] = (), seed: int = 0
) -> list[tuple[str, list[int]]]:
    """`count` different prompts as (kind, token ids), the kinds in turn; half are chat. `sources`: text for prose."""
    rng = random.Random(seed)

    def mixed(items: list[str]) -> Iterator[str]:
        while items:  # again from the start where there are too few
            rng.shuffle(items)
            yield from items

    chat = [q.format(t) for q, t in product(_listed(_ASKED), _listed(_TOPICS))]
    functions = list(_functions())
    chat += [f"Write a Python function `{name}`. {about}" for name, about, _ in functions if about]
    prose = [p.strip() for p in re.split(r"\n\s*\n", read_text(sources).text) if len(p) > 160]
    streams = {"chat": mixed(chat), "prose": mixed(prose), "code": mixed([code for _, _, code in functions])}
    found: list[tuple[str, list[int]]] = []
    for kind in islice(cycle(("chat", "prose", "chat", "code")), count):
        text = next(streams[kind])
        if kind == "chat" and tokenizer.chat_template:
            asked = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            found.append((kind, list(tokenizer(text, add_special_tokens=False)["input_ids"])[-256:]))
        else:
            keep = rng.randint(12, 48) if kind == "prose" else 64
            found.append((kind, list(tokenizer(text)["input_ids"])[:keep]))
    return found


def _functions() -> Iterator[tuple[str, str, str]]:
    """(name, first line of its docstring, how its code begins) of the functions in Python's library."""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > 5:
                about = (ast.get_docstring(node) or "").partition("\n")[0]
                yield node.name, about, "\n".join(lines[node.lineno - 1 : node.lineno + 5])


@dataclass(frozen=True)
class Written:
    """One text: prompt and answer in one list of ids, of which the first `begin` are the prompt."""

    kind: str
    ids: list[int]
    begin: int
    temperature: float


Write = Callable[[list[list[int]], int, float, int], list[list[int]]]
"""(prompts, most tokens, temperature, seed) → the tokens that were written after each."""


def written(
    asked: Sequence[tuple[str, list[int]]], write: Write, tokens: int, temperatures: Sequence[float], kept: Kept | None,
    enough: Callable[[int], bool] = lambda tokens: False, advance: Callable[[], None] = lambda: None, chunk: int = 64,
) -> list[Written]:  # fmt: skip
    """The answers to all prompts, `kept` in chunks so that an interrupted run goes on; ends early when `enough(tokens)`."""
    found: list[Written] = []
    for number, begin in enumerate(range(0, len(asked), chunk)):
        part, t = asked[begin : begin + chunk], temperatures[number % len(temperatures)]

        def measure(part: Sequence[tuple[str, list[int]]] = part, t: float = t, seed: int = number) -> Any:
            out = write([ids for _, ids in part], tokens, t, seed)
            flat = np.array([i for ids in out for i in ids], dtype=np.int32)
            return {"ids": flat, "lengths": np.array([len(ids) for ids in out], dtype=np.int32)}

        rows = (
            measure() if kept is None else kept.have(["text", t, tokens, [ids for _, ids in part]], measure)
        )
        ends = np.cumsum(rows["lengths"])
        for (kind, ids), own in zip(part, np.split(rows["ids"], ends[:-1]), strict=True):
            if len(own) > 8:
                found.append(Written(kind, ids + own.tolist(), len(ids), t))
        advance()
        if enough(sum(len(w.ids) for w in found)):
            break
    return found


def with_transformers(model: Any, tokenizer: Any) -> Write:
    """Write with the model itself."""
    ends = end_ids(model, tokenizer)

    def write(asked: list[list[int]], tokens: int, temperature: float, seed: int) -> list[list[int]]:
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
                input_ids=ids, attention_mask=mask, max_new_tokens=tokens, pad_token_id=pad, eos_token_id=sorted(ends) or None,
                repetition_penalty=1.0, **drawn,
            )  # fmt: skip
        return [_up_to_end(row, ends) for row in out[:, width:].tolist()]

    return write


def with_vllm(python: Path, model: str, ends: frozenset[int], share: float = 0.4) -> Write:
    """Write with vLLM in a process of its own, which starts once a call: give it many prompts at once.

    AssayError with its last line where it cannot run.
    """

    def write(asked: list[list[int]], tokens: int, temperature: float, seed: int) -> list[list[int]]:
        with tempfile.TemporaryDirectory() as folder:
            job = Path(folder) / "job.json"
            plan = {
                "model": model, "prompts": asked, "tokens": tokens, "temperature": temperature, "seed": seed,
                "share": share, "ends": sorted(ends),
            }  # fmt: skip
            job.write_text(json.dumps(plan))
            code = "import sys; from assay.lab.heads.text import vllm_child; vllm_child(sys.argv[1])"
            paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            done = subprocess.run(
                [str(python), "-c", code, str(job)], env=env, capture_output=True, text=True, check=False
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
        max_tokens=plan["tokens"], temperature=plan["temperature"], seed=None, stop_token_ids=plan["ends"], detokenize=False
    )  # fmt: skip
    out = engine.generate([{"prompt_token_ids": ids} for ids in plan["prompts"]], drawn, use_tqdm=False)
    Path(job).with_suffix(".out").write_text(json.dumps([list(o.outputs[0].token_ids) for o in out]))
    sys.stdout.flush()
    os._exit(0)  # workers that linger would keep the caller waiting


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ids = [*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id]
    return frozenset(int(i) for i in ids if i is not None)


def _up_to_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)


def draft_vocabulary(texts: Sequence[Written], vocab: int, wanted: int) -> tuple[torch.Tensor, float]:
    """(the `wanted` most frequent written tokens as ascending ids, the share of written tokens that they cover).

    Places that no token of the text takes go to the lowest ids, which are bytes and frequent words in most tokenizers.
    """
    counts = np.zeros(vocab, dtype=np.int64)
    for text in texts:
        np.add.at(counts, np.array(text.ids[text.begin :]), 1)
    order = np.lexsort((np.arange(vocab), -counts))[:wanted]
    share = float(counts[order].sum() / max(counts.sum(), 1))
    return torch.from_numpy(np.sort(order)), share
