"""`assay heads train`: the target writes text, a head learns to guess it, and what it accepts is
measured as it learns.
"""

from __future__ import annotations

import ast
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.engines import full_spec
from assay.engines.hf.engine import HfEngine
from assay.engines.hf.spec import parse_hf
from assay.engines.ray_scorer import Pool
from assay.engines.vllm.path import packages_alone
from assay.errors import AssayError, UsageError
from assay.fidelity.text.sources import read_text
from assay.progress import NO_PROGRESS, Progress
from assay.runs import Kept, cache_path
from assay.stats import Interval, cluster_proportion, cluster_ratio
from assay.verdict import Chart, Finding, Metric, Point, Report, Series, Severity, Table, Verdict
from assay_lab.heads.export import cannot_write, target_facts, write_head
from assay_lab.heads.model import (
    AnyHead,
    Head,
    HeadConfig,
    MtpHead,
    Walk,
    batches,
    draft,
    losses,
    observe,
    padded,
    walk,
)
from assay_lab.options import HeadTrainPlan

CHECKPOINT = "checkpoint.pt"
KEEP_SECONDS = 60.0
"""Between two checkpoints."""
MEASURED = 8
"""Times that acceptance is measured while a head learns."""
WARM_UP = 0.04


# Acceptance on texts that the target wrote.


@dataclass(frozen=True)
class Acceptance:
    """Over steps of speculative decoding: shares accepted by position and tokens a step, clustered
    by prompt.
    """

    positions: tuple[Interval, ...]
    tokens_per_step: Interval
    steps: int
    prompts: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, walks: Sequence[Walk]) -> Acceptance | None:
        """None where no text was long enough for a step. Position j counts against all steps, as
        vLLM's log does.
        """
        walks = [w for w in walks if w.steps]
        if not walks:
            return None
        steps = [w.steps for w in walks]
        by = list(zip(*(w.accepted for w in walks), strict=True))
        return cls(
            tuple(cluster_proportion(own, steps).interval for own in by),
            cluster_ratio([w.steps + sum(w.accepted) for w in walks], steps).interval,
            sum(steps), len(walks), tuple(map(sum, by)),
        )  # fmt: skip


def accepted(
    head: AnyHead, target: Any, texts: Sequence[Written], depth: int, tokens: int, embed: Any = None
) -> list[Walk]:
    """What `depth` greedy drafts a step get accepted of each text; `tokens` of a batch; `embed` in
    place of the target's.
    """
    ids = [t.ids for t in texts]
    walks: dict[int, Walk] = {}
    for part in batches(ids, tokens):
        seen = observe(
            target, *padded([ids[i] for i in part], target.device), head.config.aux_layers
        )
        with autocast(target):
            drafts = draft(head, target, seen, depth, embed).tolist()
        for i, own in zip(part, drafts, strict=True):
            walks[i] = walk(ids[i], own, texts[i].begin)
    return [walks[i] for i in range(len(texts))]


def autocast(target: Any) -> torch.autocast:
    """The head's weights are float32; its products have the target's type."""
    return torch.autocast(
        target.device.type, dtype=torch.bfloat16, enabled=target.dtype == torch.bfloat16
    )


# Training.


@dataclass
class Run:
    """A run as its checkpoint holds it. `spent` seconds of training, and the curves by step."""

    plan: dict[str, Any]
    step: int = 0
    spent: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    acceptance: list[dict[str, Any]] = field(default_factory=list)


def _save(path: Path, run: Run, head: AnyHead, optimizer: torch.optim.Optimizer) -> None:
    partial = path.with_suffix(".partial")
    try:
        torch.save(
            {"run": vars(run), "head": head.state_dict(), "optimizer": optimizer.state_dict()},
            partial,
        )
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError for a full disk
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(path, error, f" (at step {run.step})") from error
        reason = OSError(0, str(error).partition("\n")[0][:120])
        raise cannot_write(path, reason, f" (at step {run.step})") from error


def _load(path: Path, plan: dict[str, Any], head: AnyHead, optimizer: torch.optim.Optimizer) -> Run:
    """The run to go on with. UsageError where the checkpoint is of another plan, AssayError where
    it is damaged.
    """
    if not path.exists():
        return Run(plan)
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        theirs = held["run"]["plan"]
    except Exception as error:  # a pickle or zip that is damaged raises what it likes
        raise AssayError(
            f"the checkpoint {path} is damaged",
            finding_id="speculation.head_checkpoint",
            remedy="delete it: training then begins again, on the text that is kept",
        ) from error
    if wrong := sorted(k for k in {*theirs, *plan} if theirs.get(k) != plan.get(k)):
        raise UsageError(
            f"{path} is of another run: it differs in {', '.join(wrong)}",
            remedy="name another folder with --out, or delete the checkpoint",
            finding_id="speculation.usage",
        )
    head.load_state_dict(held["head"])
    optimizer.load_state_dict(held["optimizer"])
    return Run(**held["run"])


def _order(texts: Sequence[Written], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch, in an order of their own."""
    found = list(batches([t.ids for t in texts], tokens))
    np.random.default_rng([seed, epoch]).shuffle(found)
    return found


def train(
    head: AnyHead, target: Any, texts: Sequence[Written], held: Sequence[Written], plan: HeadTrainPlan, out: Path, facts: dict[str, Any],
    advance: Any = lambda: None,
) -> tuple[Run, bool]:  # fmt: skip
    """Train to the end, or until an interrupt, and say which: (the run, whether it is done). The
    checkpoint is in `out`.

    AssayError for a loss that is no number, and for a disk that is full.
    """
    weights = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        weights,
        lr=plan.lr,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        fused=target.device.type == "cuda",
    )
    path = out / CHECKPOINT
    run = _load(path, facts, head, optimizer)
    limit = plan.minutes * 60 if plan.minutes else math.inf
    orders: dict[int, list[list[int]]] = {}
    began, kept_at = time.monotonic() - run.spent, time.monotonic()
    recent: list[Any] = []

    def share() -> float:
        return min(1.0, max(run.step / plan.steps, (time.monotonic() - began) / limit))

    def note() -> None:
        if recent:
            loss = torch.stack([x.by_step for x in recent]).mean(0)
            agree = torch.stack([x.agreement for x in recent]).mean(0)
            run.curve.append(
                {
                    "step": run.step,
                    "loss": [round(x, 4) for x in loss.tolist()],
                    "agreement": [round(x, 4) for x in agree.tolist()],
                }
            )
            recent.clear()
            if not math.isfinite(run.curve[-1]["loss"][0]):
                raise AssayError(
                    f"the loss is no number at step {run.step} of {plan.steps}",
                    finding_id="speculation.head_diverges",
                    remedy=(
                        f"lower --lr (it was {plan.lr:g}), or look for NaN in the target: assay"
                        " verify MODEL --values"
                    ),
                )

    try:
        while (done := share()) < 1.0:
            per = len(orders.setdefault(0, _order(texts, plan.batch_tokens, plan.seed, 0)))
            epoch = run.step // per
            order = orders.setdefault(epoch, _order(texts, plan.batch_tokens, plan.seed, epoch))
            ids, mask = padded([texts[i].ids for i in order[run.step % per]], target.device)
            rate = (
                min(done / WARM_UP, 0.5 * (1 + math.cos(math.pi * done)))
                if limit < math.inf
                else (
                    min(
                        (run.step + 1) / (WARM_UP * plan.steps),
                        0.5 * (1 + math.cos(math.pi * done)),
                    )
                )
            )
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * max(rate, 0.01)
            seen = observe(target, ids, mask, head.config.aux_layers)
            with autocast(target):
                found = losses(head, target, seen, plan.depth)
            optimizer.zero_grad(set_to_none=True)
            found.total.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            run.step += 1
            run.spent = time.monotonic() - began
            recent.append(found)
            advance()
            if len(recent) >= 20:
                note()
            if share() >= (len(run.acceptance) + 1) / MEASURED and held:
                note()
                _measure(run, head, target, held, plan)
            if time.monotonic() - kept_at > KEEP_SECONDS:
                note()  # a checkpoint never holds a loss that is no number
                _save(path, run, head, optimizer)
                kept_at = time.monotonic()
        note()
    except KeyboardInterrupt:
        note()
        _save(path, run, head, optimizer)
        return run, False
    return run, True


def _measure(
    run: Run, head: AnyHead, target: Any, held: Sequence[Written], plan: HeadTrainPlan
) -> None:
    part = [t for t in held if not t.temperature][:96]
    found = Acceptance.of(accepted(head, target, part, plan.depth, plan.batch_tokens))
    if found is not None:
        run.acceptance.append(
            {
                "step": run.step,
                "positions": [i.value for i in found.positions],
                "tokens_per_step": found.tokens_per_step.value,
            }
        )


# The verb.


def run_train(plan: HeadTrainPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Write text, train, export, measure. Goes on where an interrupted run of the same plan
    stopped.
    """
    if plan.ray and plan.python:
        raise plan.usage(
            "--python writes the text with one vLLM, --ray with transformers in workers",
            "give one of the two",
        )
    spec = parse_hf(plan.model)
    folder = Path(spec.model)
    out = plan.out or cache_path("heads") / folder.name
    if out.resolve() == folder.resolve():
        raise plan.usage(
            "--out is the folder of the target, whose files the head's would replace",
            "name another folder",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(out, error) from error
    with HfEngine.load(spec) as engine:
        target, tokenizer = engine.model, engine.tokenizer
        target.requires_grad_(False)
        HeadConfig.of_target(
            target, plan.draft_vocab, plan.intermediate, plan.kind
        )  # refuse before text is written
        source = target_facts(folder)
        texts, held, kept = _texts(plan, out, spec.model, target, tokenizer, source, progress)
        torch.manual_seed(plan.seed)
        if plan.kind == "mtp":
            head: AnyHead = MtpHead(HeadConfig.of_target(target, 0, plan.intermediate, plan.kind))
            covered = 1.0
        else:
            vocab = target.config.vocab_size
            ids, covered = draft_vocabulary(texts, vocab, plan.draft_vocab or vocab)
            head = Head(HeadConfig.of_target(target, len(ids), plan.intermediate), ids)
        config = head.config
        with torch.no_grad():
            first = observe(
                target, *padded([t.ids for t in texts[:8]], target.device), config.aux_layers
            )
            rms = first.aux[first.mask].float().view(-1, len(config.aux_layers), config.hidden_size)
        head.to(target.device).start(target, rms.square().mean(-1).median(0).values.sqrt())
        facts = plan.facts() | {"model": source, "text_tokens": sum(len(t.ids) for t in texts)}
        facts = {k: list(v) if isinstance(v, tuple) else v for k, v in facts.items()}
        with progress("training the head", plan.steps) as advance:
            run, done = train(head, target, texts, held, plan, out, facts, advance)
        training = {
            "target": source,
            "plan": facts,
            "steps": run.step,
            "seconds": round(run.spent, 1),
            "covered": covered,
            "loss_curve": run.curve,
            "acceptance_curve": run.acceptance,
        }
        greedy = [t for t in held if not t.temperature]
        walks = accepted(head, target, greedy, plan.depth, plan.batch_tokens)
    by = {
        kind: Acceptance.of([w for w, t in zip(walks, greedy, strict=True) if t.kind == kind])
        for kind in KINDS
    }
    by = {"all": Acceptance.of(walks)} | by
    training["acceptance"] = {k: vars(a) for k, a in by.items() if a is not None}
    size = write_head(out, head, _plain(training), target=folder)
    if done:
        (out / CHECKPOINT).unlink(missing_ok=True)
    return _report(plan, out, run, done, by, training, size, kept)


def _plain(training: dict[str, Any]) -> dict[str, Any]:
    from assay.verdict import jsonable

    result: dict[str, Any] = jsonable(training)
    return result


def _texts(
    plan: HeadTrainPlan,
    out: Path,
    model: str,
    target: Any,
    tokenizer: Any,
    source: dict[str, str],
    progress: Progress,
) -> tuple[list[Written], list[Written], Kept]:
    """(texts to train on, texts held out, where they are kept)."""
    asked = prompts(tokenizer, plan.prompts, plan.text, plan.seed)
    apart = [p for i, p in enumerate(asked) if i % HELD_OUT == 0]
    rest = [p for i, p in enumerate(asked) if i % HELD_OUT]
    write, chunk = with_transformers(target, tokenizer), chunk_of(target)
    if plan.python:
        ends = end_ids(target, tokenizer)
        write, chunk = with_vllm(Path(plan.python), model, ends), -(-len(rest) // len(TEMPERATURES))
    kept = Kept(out / "text", ["heads", source, "vllm" if plan.python else "transformers"])
    limit = time.monotonic() + (plan.text_minutes * 60 if plan.text_minutes else math.inf)
    with ExitStack() as stack:
        spread = None
        if plan.ray:
            pool = stack.enter_context(Pool(plan.ray, plan.workers, progress))
            spread = on_workers(pool, plan.model)
        advance = stack.enter_context(
            progress("the target writes text", -(-len(rest) // chunk) + 1)
        )
        held = written(
            apart,
            with_transformers(target, tokenizer),
            plan.tokens,
            (0.0,),
            kept,
            advance=advance,
            chunk=chunk,
        )
        texts = written(
            rest,
            write,
            plan.tokens,
            TEMPERATURES,
            kept,
            lambda n: time.monotonic() > limit,
            advance,
            chunk,
            spread,
        )
    if not texts:
        raise AssayError(
            "the target wrote nothing to learn from: every answer ended within 8 tokens",
            finding_id="speculation.head_text",
            remedy="look at its text: assay check URL",
        )
    return texts, held, kept


def _report(
    plan: HeadTrainPlan, out: Path, run: Run, done: bool, by: dict[str, Acceptance | None], training: dict[str, Any], size: int, kept: Kept
) -> Report:  # fmt: skip
    whole = by["all"]
    findings = list(kept.notices("speculation"))
    if not done:
        findings.append(
            Finding(
                "speculation.interrupted",
                Severity.WARNING,
                f"interrupted at step {run.step} of {plan.steps}: the same command goes on from"
                " there",
            )
        )
    if training["covered"] < 0.97:
        findings.append(
            Finding(
                "speculation.draft_vocabulary",
                Severity.WARNING,
                f"the draft vocabulary covers {100 * training['covered']:.1f} % of what the target"
                " writes",
                remedies=("raise --draft-vocab: what it lacks is never accepted",),
            )
        )
    metrics = [
        Metric("head", str(out), note=f"{size / 1e6:.1f} MB, {run.step} steps in {run.spent:.0f} s")
    ]
    rows = []
    for kind, a in by.items():
        if a is not None:
            rows.append(
                [kind, *(percent(p) for p in a.positions), ratio(a.tokens_per_step), str(a.prompts)]
            )
    if whole is not None:
        metrics += [
            Metric("position 0", percent(whole.positions[0]), note="held-out prompts, greedy"),
            Metric(
                "tokens per step", ratio(whole.tokens_per_step), note=f"{plan.depth} drafts a step"
            ),
        ]
    columns = ["text", *(f"position {j}" for j in range(plan.depth)), "tokens per step", "prompts"]
    note = "Share of all steps whose drafts were right up to this position; intervals by prompt."
    blocks: list[Any] = [
        Table("Accepted of greedy text", columns, rows, frozenset(range(1, len(columns))), note)
    ]
    if run.curve:
        blocks += [
            Chart(
                "Loss by step of the chain",
                "line",
                [
                    Series(f"step {j}", [Point(c["step"], c["loss"][j]) for c in run.curve])
                    for j in range(plan.depth)
                ],
                "steps of training",
                "cross-entropy",
            ),
            Chart(
                "Accepted by position while training",
                "line",
                [
                    Series(
                        f"position {j}",
                        [Point(a["step"], a["positions"][j]) for a in run.acceptance],
                    )
                    for j in range(plan.depth)
                ],
                "steps of training",
                "share",
            ),
        ]
    held = "assay verify HEAD" + ("" if plan.kind == "mtp" else " --target MODEL")
    verdict = Verdict.PASS if done and whole is not None else Verdict.INCONCLUSIVE
    return Report(
        command="heads train",
        verdict=verdict,
        subject={"model": training["target"]["name"], "kind": plan.kind},
        findings=findings,
        results={"head": str(out), "bytes": size, **training, "done": done},
        headline=metrics,
        blocks=blocks,
        interrupted=not done,
        summary="" if findings else f"the head is trained: hold it against its target with {held}",
    )


def percent(i: Interval) -> str:
    """A share with its interval."""
    return f"{100 * i.value:.1f} % [{100 * max(i.lo, 0):.1f}, {100 * min(i.hi, 1):.1f}]"


def ratio(i: Interval) -> str:
    """A ratio with its interval."""
    return f"{i.value:.2f} [{i.lo:.2f}, {i.hi:.2f}]"


# Text that the target writes itself: prompts of three kinds, answered by vLLM where there is one,
# else by transformers.
#
# A head learns to guess this target, so it is trained on what this target says. Prompts are chat
# turns made from templates and topics, prose that begins passages of a text, and code that begins
# functions of Python's own library: every machine has them. Every fifteenth prompt is held out:
# heads are measured on those and never trained on them.


KINDS = ("chat", "code", "prose")
HELD_OUT = 15
"""One prompt of so many is held out; kinds take turns of four, so that all of them are."""
TEMPERATURES = (0.0, 0.7, 1.0)
"""Texts take turns: greedy text is what greedy decoding meets, sampled text leaves the beaten path.
"""


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
    spread: Spread | None = None,
) -> list[Written]:  # fmt: skip
    """The answers to all prompts, `kept` in chunks so that an interrupted run goes on; ends early
    when `enough(tokens)`.

    `spread` writes the chunks that are not kept side by side, and gives them in their order.
    """
    found: list[Written] = []
    if spread:
        todo, here = {}, write
        for number, begin in enumerate(range(0, len(asked), chunk)):
            some, t = (
                [ids for _, ids in asked[begin : begin + chunk]],
                temperatures[number % len(temperatures)],
            )
            if (
                kept is None or kept.get(["text", t, tokens, some]) is None
            ):  # read, as a damaged one is to be written again
                todo[number] = (some, tokens, t, number)
        answers = zip(todo, spread([*todo.values()]), strict=True)

        def write(
            ids: list[list[int]], tokens: int, temperature: float, seed: int
        ) -> list[list[int]]:
            # Another run of the same plan may have kept a chunk meanwhile, whose answer is passed
            # over then.
            own = (answer for number, answer in answers if number == seed)
            return next(own) if seed in todo else here(ids, tokens, temperature, seed)

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


Spread = Callable[[Sequence[tuple[list[list[int]], int, float, int]]], Iterator[list[list[int]]]]
"""The arguments of several calls of a `Write` → what each of them writes, in order."""


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
                "import sys; from assay_lab.heads.train import vllm_child; vllm_child(sys.argv[1])"
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
