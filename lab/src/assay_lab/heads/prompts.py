"""Questions of several kinds for a target to answer; some are held out from training.

A head learns to guess this target, so it is trained on what this target says. Prompts are chat
turns made from templates and topics, prose that begins passages of a text, and code that begins
functions of Python's own library: every machine has them. Every fifteenth prompt is held out:
heads are measured on those and never trained on them.
"""

from __future__ import annotations

import ast
import os
import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import torch

from assay.fidelity.text.sources import read_text

KINDS = ("chat", "code", "prose")
HELD_OUT = 15
"""One prompt of so many is held out; kinds take turns of four, so that all of them are."""


def chunk_of(target: Any) -> int:
    """Texts that are written, and kept, at once: one for each 36 MB of a GPU, which a model of 7B
    needs for 500 tokens.
    """
    if target.device.type != "cuda":
        return 64
    return max(
        64,
        min(4096, int(torch.cuda.get_device_properties(target.device).total_memory) // 36_000_000),
    )


_ASKED = """Explain {} to a beginner.|What is {}, and why does it matter?|
Write a short story about {}.|List five facts about {}.|Give me three tips about {}.|
Summarise the history of {} in one paragraph.|Write a poem about {}.|
What are the advantages and disadvantages of {}?|How does {} work?|Write a friendly email about {}.|
Compare {} with its closest alternative.|What common mistakes do people make with {}?|
Plan a lesson about {}.|Write a dialogue between two friends about {}.|Describe {} to a child.|
What questions would you ask an expert on {}?|Write an introduction for an essay on {}.|
Give a step-by-step guide to {}.|What is the future of {}?|
Write a product description that mentions {}.|Is {} overrated? Argue both sides.|
Write a JSON object that describes {}.|Make a table with three rows about {}.|
Write a Python class that models {}.|Explain the economics of {}."""
_TOPICS = """gravity|photosynthesis|the water cycle|volcanoes|black holes|vaccines|the human heart|
sleep|memory|dreams|climate change|recycling|solar panels|wind turbines|electric cars|bicycles|
trains|bridges|lighthouses|maps|compasses|clocks|the printing press|the telephone|radio|television|
the internet|search engines|social media|email|passwords|encryption|blockchain|databases|
spreadsheets|sorting algorithms|recursion|binary search|machine learning|neural networks|robots|
drones|satellites|the Moon|Mars|comets|telescopes|microscopes|atoms|electricity|magnets|batteries|
engines|steel|glass|paper|cotton|silk|coffee|tea|chocolate|bread|cheese|olive oil|rice|potatoes|
honey|salt|sugar|spices|gardening|composting|bees|ants|elephants|whales|penguins|wolves|cats|dogs|
horses|owls|sharks|dinosaurs|trees|forests|deserts|rivers|oceans|islands|mountains|glaciers|
earthquakes|hurricanes|rainbows|clouds|chess|football|swimming|running|yoga|hiking|photography|
painting|sculpture|jazz|the piano|the violin|opera|theatre|cinema|comics|novels|poetry|libraries|
museums|schools|universities|exams|teamwork|leadership|negotiation|time management|budgeting|taxes|
inflation|interest rates|stocks|insurance|marketing|start-ups|small businesses|remote work|
job interviews|public speaking|friendship|families|weddings|birthdays|holidays|travel|hotels|
airports|passports|languages|translation|grammar|handwriting|democracy|elections|constitutions|
courts|human rights|the Romans|ancient Egypt|the Renaissance|the Industrial Revolution|
the Silk Road|castles|pirates|knights|dragons|ghosts|time travel|probability|statistics|geometry|
algebra|prime numbers|infinity|logic puzzles|riddles|kites|toys|board games|video games"""


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split("|")]


def prompts(
    tokenizer: Any, count: int, sources: Sequence[str] = (), seed: int = 0
) -> list[tuple[str, list[int]]]:
    """`count` different prompts as (kind, token ids), the kinds in turn; half are chat. `sources`:
    text for prose.
    """
    rng = random.Random(seed)

    def mixed(items: list[str]) -> Iterator[str]:
        while items:  # again from the start where there are too few
            rng.shuffle(items)
            yield from items

    chat = [q.format(t) for q, t in product(_listed(_ASKED), _listed(_TOPICS))]
    functions = _functions()
    chat += [f"Write a Python function `{name}`. {about}" for name, about, _ in functions if about]
    prose = [p.strip() for p in re.split(r"\n\s*\n", read_text(sources).text) if len(p) > 160]
    streams = {
        "chat": mixed(chat),
        "prose": mixed(prose),
        "code": mixed([code for _, _, code in functions]),
    }
    found: list[tuple[str, list[int]]] = []
    for kind in islice(cycle(("chat", "prose", "chat", "code")), count):
        text = next(streams[kind])
        if kind == "chat" and tokenizer.chat_template:
            asked = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            found.append(
                (kind, list(tokenizer(text, add_special_tokens=False)["input_ids"])[-256:])
            )
        else:
            keep = rng.randint(12, 48) if kind == "prose" else 64
            found.append((kind, list(tokenizer(text)["input_ids"])[:keep]))
    return found


@cache
def _functions() -> tuple[tuple[str, str, str], ...]:
    """(name, first line of its docstring, how its code begins) of the functions in Python's
    library.
    """
    found = []
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
                found.append(
                    (node.name, about, "\n".join(lines[node.lineno - 1 : node.lineno + 5]))
                )
    return tuple(found)
