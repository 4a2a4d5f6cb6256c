"""KV-cache codecs at their real stored bytes, scored by teacher-forced decode, on four models.

    python kv_codecs.py --model qwen05 --device cuda --calibrate WIKI_VALID --text WIKI_TEST --specs kv_fresh.specs

The first half of each window is prefilled exactly, then the cache is replaced by what the codec
makes of it, and the second half is fed token by token (or `--block` at once, where each token sees
the same); the reference does the same with the bf16 cache. Calibrated on other text than it is
scored on: `wiki` is WikiText valid alone, `mixed` has other kinds too (`kv_texts.py`). Every row is
written as it is measured, and one that is there already is not measured again. Codecs are fitted
ahead by other processes (--jobs).

A file of SPECs may have sections, which begin with options of their own in brackets, such as
`[--length 4096 --windows 16]`, `[--text c --text json]` or `[--models qwen15]`: contexts, texts and
steps of one model by one command. With `--choose N` the smallest codec of a section that is
accepted on its windows is measured again on N fresh ones, which took no part in the choice. With
`--unseen FILE` all of them are measured on windows that no row of that file of results has seen:

    python kv_codecs.py --model qwen15 --specs kv_fresh.specs --windows 64 --batch 16 --block 512 --text WIKI_TEST \
        --unseen results/kv_models_qwen15.json --unseen results/kv_fixed_qwen15.json --out results/kv_fresh_qwen15.json
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import lzma
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import kv_texts
from assay.cli.progress import show
from assay.demo.models import build_gemma3, build_qwen05, build_qwen15, build_smollm2
from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import Engagement, Window
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.plan import Plan
from assay.fidelity.reference import plan_windows
from assay.fidelity.summary import summarise
from assay.fidelity.windows import blocks_of
from assay.runs import cache_dir, write_atomically
from assay.stats import Resampling
from assay.stats.equivalence import Margins
from assay_lab.kv import cache_bytes
from assay_lab.kv.cache_bytes import stream_facts
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.calibrate import CalibrationPlan, run_calibrate
from assay_lab.kv.calibration import Calibration, read_calibration
from assay_lab.kv.evaluator import CodecEvaluator, Fitting, Passages, ScoringSetup
from assay_lab.kv.fitters import Fitters, fitters
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.layer_coders import LayerCoders
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.spec import parse_spec

Facts = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
MODELS = {
    "smollm2": build_smollm2,
    "gemma3": build_gemma3,
    "qwen05": build_qwen05,
    "qwen15": build_qwen15,
}

# What engines offer, the plain baseline over its range, and the same with exact sinks and keys
# before RoPE.
PLAIN = ["bf16", "fp8", "fp8(format=e5m2)", "int(bits=4,group=32)"]
HADAMARD = [f"hadamard(bits={b})" for b in (6, 5, 4, 3.5, 3, 2.5, 2)]
AROUND = [f"prerope+sinks(n=4)+mean+hadamard(bits={b})" for b in (6, 5, 4, 3, 2.5, 2)]


def main() -> None:
    arguments = _parser().parse_args()
    arguments.ends = time.monotonic() + 60 * arguments.minutes
    cache_bytes.APART = arguments.apart
    if arguments.memory and arguments.device != "cpu":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(arguments.memory * 2**30 / whole)
    spec = f"hf:{MODELS[arguments.model]()}?device={arguments.device}&dtype={arguments.dtype}"
    table = (
        cache_dir("kv-calibration") / f"{arguments.model}-{arguments.calibration_name}.safetensors"
    )
    if not table.exists():
        _calibrate(arguments, spec, table)
    if arguments.calibrate_only:
        return
    layer_coders = Measuring(arguments, spec, table)
    try:
        found = list(sections(arguments))
        layer_coders.fit_ahead(
            [s for section, specs in found for s in specs if layer_coders.lacks(section, s)]
        )
        for section, specs in found:
            try:
                layer_coders.section(section, [str(parse_spec(spec)) for spec in specs])
            except AssayError as error:  # such as a context that the model has not
                print(f"left out: {error}", flush=True)
    finally:
        layer_coders.stack.close()


def sections(arguments: argparse.Namespace) -> Iterator[tuple[argparse.Namespace, list[str]]]:
    """The options and SPECs of every section of the file; what it does not say is as on the command
    line.
    """
    files = [file.read_text(encoding="utf-8").split("\n") for file in arguments.specs] or [
        [*PLAIN, *HADAMARD, *AROUND]
    ]
    found: list[tuple[argparse.Namespace, list[str]]] = [(arguments, [])]
    for line in (line.strip() for lines in files for line in lines):
        if line.startswith("["):
            own = _parser().parse_args(
                shlex.split(line.strip("[]")), namespace=_inherited(arguments, line)
            )
            found.append((own, []))
        elif line and not line.startswith("#"):
            found[-1][1].append(line)
    yield from (
        pair
        for pair in found
        if pair[1] and arguments.model in (pair[0].models or [arguments.model])
    )


def _inherited(arguments: argparse.Namespace, line: str) -> argparse.Namespace:
    inherited = copy(arguments)
    if "--text" in line:
        inherited.text = []
    return inherited


@dataclass
class Text:
    """The windows of one text at one length: those that codecs are measured on, and fresh ones
    behind a choice.
    """

    name: str
    lab: CodecEvaluator
    fresh: CodecEvaluator | None
    facts: dict[str, Any]


class Measuring:
    """One model with its calibration, and the rows so far."""

    def __init__(self, arguments: argparse.Namespace, spec: str, table: Path) -> None:
        self.out = arguments.out or RESULTS / f"kv_codecs_{arguments.model}.json"
        self.document: dict[str, Any] = (
            json.loads(self.out.read_text()) if self.out.exists() else {"rows": []}
        )
        self.spec = spec
        self.calibration = read_calibration(table)
        self.digest = sha256(table.read_bytes()).hexdigest()
        self.stack = ExitStack()
        self.scorer = HfScorer.load(spec)
        self.stack.callback(self.scorer.close)
        self.shape = cache_shape(self.scorer.engine.model)
        self.calibration.check_model(self.shape)
        # Coders do not depend on the length of the windows: those of a section serve all others.
        rotary = Rotary(self.scorer.engine.model, arguments.calibration_length)
        self.layer_coders = LayerCoders(self.shape, rotary, self.calibration)
        self.pool: Fitters = self.stack.enter_context(fitters(self.layer_coders, arguments.jobs))
        self._begun: dict[str, Any] = {}
        self._coders: dict[str, Any] = {}
        self._texts: dict[tuple[str, Any], Text] = {}

    def lacks(self, arguments: argparse.Namespace, spec: str) -> bool:
        """Whether a SPEC of a section is still to be measured on some text, as far as can be told
        before texts are read.
        """
        options = ("mode", "length", "block", "scored", "batch")
        key = {"codec": str(parse_spec(spec)), **{k: getattr(arguments, k) for k in options}}
        had = {
            row["text"]
            for row in self.document["rows"]
            if all(row.get(k) == v for k, v in key.items())
        }
        return not had.issuperset(Path(source).name for source in arguments.text)

    def fit_ahead(self, specs: list[str]) -> None:
        """Let other processes begin with all codecs, in their order."""
        for spec in specs if self.pool.pool else ():
            self._begin(str(parse_spec(spec)))

    def _begin(self, codec: str) -> Any:
        if codec not in self._begun:
            self._begun[codec] = self.pool.start(parse_spec(codec), range(self.shape.layers))
        return self._begun[codec]

    def coders(self, codec: str) -> Any:
        """The coders of all layers, fitted once."""
        if codec not in self._coders:
            self._coders[codec] = self._begin(codec)()
        return self._coders[codec]

    def section(self, arguments: argparse.Namespace, specs: list[str]) -> None:
        """Measure the SPECs of a section on each of its texts, as far as time and the model's
        positions go.
        """
        positions = getattr(
            self.scorer.engine.model.config.get_text_config(),
            "max_position_embeddings",
            arguments.length,
        )
        arguments.length = min(arguments.length, positions)
        cut = tuple(
            getattr(arguments, k)
            for k in ("windows", "choose", "length", "mode", "batch", "scored", "block")
        )
        for source in arguments.text:
            if (source, cut) not in self._texts:
                self._texts[source, cut] = self._text(arguments, source)
        texts = [self._texts[source, cut] for source in arguments.text]
        for codec in specs:
            for text in texts:
                if time.monotonic() > arguments.ends:
                    print("out of time")
                    return
                if self._row(arguments, text, codec) is None:
                    self._measure(arguments, text, codec)
        for text in texts if arguments.choose else ():
            rows = [row for s in specs if (row := self._row(arguments, text, s))]
            accepted = [row for row in rows if row["grade"] == "ACCEPT"]
            if accepted and len(rows) == len(specs) and time.monotonic() < arguments.ends:
                best = max(accepted, key=lambda row: row["bytes"]["ratio"])["codec"]
                if self._row(arguments, text, best, fresh=True) is None:
                    self._measure(arguments, text, best, chosen_from=specs)

    def _text(self, arguments: argparse.Namespace, source: str) -> Text:
        name, path = _evaluated(arguments, source)
        count = arguments.windows + arguments.choose
        plan = Plan(self.spec, (self.spec,), text=(path,), windows=count, length=arguments.length)
        windows, facts = plan_windows(plan, self.scorer.tokenizer)
        if seen := _seen(arguments, facts):
            plan = replace(plan, windows=count + len(seen))
            windows, facts = plan_windows(plan, self.scorer.tokenizer)
            windows, facts = unseen(windows, facts, seen, count)
        self.calibration.check_text(facts, windows)
        # Fresh windows lie between the others, so that both are spread over the text.
        step = len(windows) / max(1, arguments.choose)
        apart = {int((i + 0.5) * step) for i in range(arguments.choose)}
        setup = ScoringSetup(
            self.spec,
            Mode(arguments.mode),
            arguments.batch,
            arguments.block,
            arguments.length - arguments.scored + 1 if arguments.scored else None,
        )
        labs = [
            (
                CodecEvaluator(
                    self.scorer,
                    setup,
                    Passages(part),
                    Fitting(self.layer_coders, about=self.digest),
                    show,
                )
                if part
                else None
            )
            for part in (
                [w for i, w in enumerate(windows) if (i in apart) is fresh]
                for fresh in (False, True)
            )
        ]
        if labs[0] is None:
            raise SystemExit(f"{name} has too few windows of {arguments.length} tokens")
        return Text(name, labs[0], labs[1], facts)

    def _row(
        self, arguments: argparse.Namespace, text: Text, codec: str, fresh: bool = False
    ) -> Any:
        key = _key(arguments, text, codec, fresh)
        return next(
            (row for row in self.document["rows"] if all(row.get(k) == v for k, v in key.items())),
            None,
        )

    def _measure(
        self,
        arguments: argparse.Namespace,
        text: Text,
        codec: str,
        chosen_from: list[str] | None = None,
    ) -> None:
        lab = text.fresh if chosen_from and text.fresh else text.lab
        exact, began = lab.reference.read(), time.monotonic()
        try:
            if exact:
                lab.score_reference()
            exact_s = time.monotonic() - began
            measured = lab.measure(
                codec,
                coders=lambda: self.coders(codec),
                table_tokens=32_768,
                measure_windows=arguments.measured,
            )
        except AssayError as error:  # such as streams that do not give back what attention read
            print(f"{text.name} {arguments.length} {codec}: left out, {error}", flush=True)
            return
        if measured.bytes is None:
            raise SystemExit(f"no stream of {codec} was encoded")
        blocks = blocks_of(text.facts["places"])
        figures = summarise(measured.seen, Margins(), Resampling(2000, 0), blocks=blocks).to_json()
        named = (
            "grade",
            "dppl_pct",
            "kld",
            "top1_pct",
            "tokens",
            "windows",
            "clusters",
            "windows_needed",
            "ppl_reference",
        )
        row = {
            **_key(arguments, text, codec, chosen_from is not None),
            "bytes": measured.bytes.to_json(),
            **{k: figures[k] for k in named},
            "characters_per_token": text.facts["characters_per_token"],
            "apart": apart(measured.engagement),
            "fires": measured.engagement.fires,
            "fit_s": round(measured.seconds[0], 1),
            "score_s": round(measured.seconds[1], 1),
            **({"exact_s": round(exact_s, 1), "exact_windows": len(exact)} if exact else {}),
            **({"chosen_from": chosen_from} if chosen_from else {}),
        }
        self.document["rows"].append(row)
        self.document |= {"model": arguments.model, "machine": machine()}
        about = f"{text.name} {arguments.length}, {len(text.facts['places'])} windows"
        self.document.setdefault("texts", {})[about] = text.facts
        self.document.setdefault("calibrations", {})[arguments.calibration_name] = {
            k: self.calibration.provenance[k] for k in ("text", "samples", "sensitivity_windows")
        }
        self.out.write_text(
            json.dumps(self.document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        print(_line(row), flush=True)


def unseen(
    windows: list[Window], facts: Facts, seen: set[int], count: int
) -> tuple[list[Window], Facts]:
    """The first `count` windows that lie at no seen place, numbered anew, since clusters are looked
    up by their number.
    """
    kept = [i for i, place in enumerate(facts["places"]) if place not in seen][:count]
    places = [facts["places"][i] for i in kept]
    return [replace(windows[i], index=n) for n, i in enumerate(kept)], {
        **facts,
        "places": places,
        "unseen": True,
    }


def _seen(arguments: argparse.Namespace, facts: dict[str, Any]) -> set[int]:
    """Places of all windows of this text and this length that the rows of the `--unseen` files have
    seen.

    Files of version 0.1.0 do not tell places: their windows are the first ones.
    """
    seen: set[int] = set()
    for path in arguments.unseen:
        document = json.loads(path.read_text(encoding="utf-8"))
        first = range(max(row["windows"] for row in document["rows"]))
        for text in document["texts"].values():
            if all(text[k] == facts[k] for k in ("sha256", "windows_available")):
                seen |= set(text.get("places", first))
    return seen


def apart(engagement: Engagement) -> float:
    """The largest share, over streams, of the codec's squared error by which they differ from what
    attention read.
    """
    facts = [f for f in stream_facts(engagement).values() if f[0].sha256]
    return max(
        (sum(w.apart for w in f) / max(1e-30, sum(w.error for w in f)) for f in facts), default=0.0
    )


def _key(arguments: argparse.Namespace, text: Text, codec: str, fresh: bool) -> dict[str, Any]:
    return {
        "codec": codec,
        "mode": arguments.mode,
        "text": text.name,
        "length": arguments.length,
        "calibration": arguments.calibration_name,
        "dtype": arguments.dtype,
        "block": arguments.block,
        "scored": arguments.scored,
        "batch": arguments.batch,
        "fresh": fresh or (text.facts.get("unseen", False) and not arguments.choose),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=None,
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="smollm2")
    add("--device", default="cpu")
    add(
        "--dtype",
        default="auto",
        help="float32: without the rounding of bf16, which hides small errors",
    )
    add("--calibrate", type=Path, help="WikiText valid; needed where no calibration is kept")
    add("--calibration-name", choices=("wiki", "mixed"), default="mixed")
    add("--calibrate-only", action="store_true")
    add("--calibration-windows", type=int, default=96)
    add("--calibration-length", type=int, default=1024)
    add("--sensitivity", type=int, default=16, help="windows to measure the sensitivity on")
    add("--text", action="append", default=[], help="a file, pydoc, python, or NAME of --texts")
    add("--texts", type=Path, help="folder of further texts, NAME.txt.xz")
    add("--windows", type=int, default=128)
    add("--length", type=int, default=1024)
    add(
        "--scored",
        type=int,
        default=0,
        help="tokens at the end of a window that are scored; 0: its second half",
    )
    add(
        "--choose",
        type=int,
        default=0,
        help="fresh windows for the smallest codec that is accepted",
    )
    add(
        "--unseen",
        type=Path,
        action="append",
        default=[],
        help="results whose windows are left out",
    )
    add("--batch", type=int, default=16)
    add("--block", type=int, default=1, help="tokens that are fed together")
    add("--measured", type=int, default=12, help="windows whose streams are encoded")
    add(
        "--specs",
        type=Path,
        action="append",
        default=[],
        help="files with one SPEC a line, in place of the built-in list",
    )
    add(
        "--models",
        nargs="+",
        choices=MODELS,
        default=[],
        help="of a section: the models that it is for",
    )
    add("--minutes", type=float, default=1e9, help="begin no further row after so long")
    add("--tokens", type=int, default=8192, help="sampled tokens of the calibration")
    add("--mode", default="decode")
    add("--jobs", type=int, default=1, help="processes that fit codecs")
    add(
        "--apart",
        type=float,
        default=cache_bytes.APART,
        help="share from which streams are not what attention read",
    )
    add("--memory", type=float, default=0, help="GiB of a shared GPU that may be taken")
    add("--out", type=Path)
    return parser


def _calibrate(arguments: argparse.Namespace, spec: str, table: Path) -> Calibration:
    """The calibration file, by its plan."""
    source = arguments.calibrate
    if arguments.calibration_name == "mixed":
        source = cache_dir("kv-texts") / "mixed.txt"
        # Whole or not at all: several of these processes may run at once.
        write_atomically(source, kv_texts.mixed(arguments.calibrate.read_text(encoding="utf-8")))
    plan = CalibrationPlan(
        spec,
        table,
        text=(str(source),),
        windows=arguments.calibration_windows,
        length=arguments.calibration_length,
        batch=8,
        tokens=arguments.tokens,
        sensitivity=arguments.sensitivity,
    )
    run_calibrate(plan, show)
    return read_calibration(table)


def _evaluated(arguments: argparse.Namespace, source: str) -> tuple[str, str]:
    """Name of an evaluated text in the rows, and the source that `assay` reads."""
    packed = arguments.texts / f"{source}.txt.xz" if arguments.texts else None
    if packed and packed.exists():
        path = cache_dir("kv-texts") / f"{source}.txt"
        write_atomically(path, lzma.decompress(packed.read_bytes()).decode())
        return source, str(path)
    if source == "python":
        path = cache_dir("kv-texts") / "python.txt"
        write_atomically(path, kv_texts.python_source())
        return "python", str(path)
    return (source, source) if source == "pydoc" else (Path(source).name, source)


def _line(row: dict[str, Any]) -> str:
    change = row["dppl_pct"]
    return (
        f"{time.strftime('%X')} {row['text']} {row['length']}{' fresh' * row['fresh']}"
        f" {row['codec']}: {row['bytes']['ratio']:.2f}x KL {row['kld']['mean']:.5f} dppl"
        f" {change['value']:+.2f} [{change['lo']:+.2f}, {change['hi']:+.2f}] top-1"
        f" {row['top1_pct']['value']:.2f} {row['grade']} apart {row['apart']:.2g}"
        f" ({row.get('exact_s', 0)} + {row['fit_s']} + {row['score_s']} s)"
    )


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return describe() | {"gpu": gpu}


if __name__ == "__main__":
    main()
