"""What `assay doctor` is asked for: its options, and the symptoms that it can look for. Reading a command needs no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from assay.options import RayOptions, option

SYMPTOMS: Mapping[str, frozenset[str]] = {
    "text": frozenset({
        "prompts", "hard_texts", "degenerate_rate", "hidden_tokens", "same_answers", "answers", "server_counters", "died",
    }),
    "stutter": frozenset({"stutter"}),
    "bits": frozenset({"bits_per_byte", "depth"}),
    "tools": frozenset({"tools", "tool_form"}),
    "speculation": frozenset({"speculation"}),
    "speed": frozenset({"slower", "throughput"}),
}  # fmt: skip
SLOWER = 0.15
"""Share of the baseline's tokens a second that must be lost, beyond the interval, before a setting counts as slower."""


@dataclass(frozen=True)
class DoctorOptions(RayOptions):
    """What is looked for, and how long it may take."""

    VERB, AREA = "doctor", "server"

    symptom: tuple[str, ...] = option(
        (), "Look for this symptom only; may be given again. Default: what the first bad start shows.", choices=SYMPTOMS
    )
    budget: float = option(60.0, "Time that the doctor may take.", lo=0.05, hi=100_000, metavar="MINUTES", apart=True)
    seconds: float = option(60.0, "Seconds of questions for each start.", lo=3, hi=3600)
    concurrency: int = option(24, "Requests at once in the burst.", lo=2, hi=512)
    fault_rate: float = option(
        1 / 3,
        "Smallest share of starts that a fault shows in and must be found at; 1 needs one good start only.",
        lo=0.05,
        hi=1,
    )
    slower: float = option(0.15, "Loss of speed that counts as a fault.", lo=0.02, hi=0.9, form="fraction")
    ladder: bool = option(True, "Do not measure the speed of each acquitted setting.")
    command_template: str | None = option(
        None, "Command of another engine, with {port} and {settings}.", metavar="TEXT"
    )
    reference_engine: str | None = option(
        None, "Trusted model to compare with where the baseline fails: hf:PATH.", metavar="ENGINE", apart=True
    )
    api_key_env: str | None = option(None, "Environment variable that holds the API key.", metavar="NAME", apart=True)
    health: str = option("/health", "Path that answers 200 once the server is ready.", metavar="PATH", apart=True)
    start_timeout: float = option(600.0, "Seconds that a start may take.", lo=1, hi=86_400, apart=True)
    start_lock: Path | None = option(
        None, "File to lock while a server starts or ends, where other servers use the device.", apart=True
    )
    seed: int = option(0, "First seed.", lo=0, hi=2**31)
    tools: bool = option(True, "Do not ask tool calls under load.")
    lint: bool = option(False, "Read the command and the checkpoint only; launch nothing.", apart=True)
    engine_version: str | None = option(
        None, "Engine that the command runs, for --lint, e.g. vllm==0.32.0.", metavar="ENGINE==VERSION", apart=True
    )
    bundle: Path | None = option(None, "Write the evidence to this file (.tar.zst).", apart=True)
    issue: bool = option(False, "Print a bug report with the minimal command.", apart=True)
    fresh: bool = option(False, "Forget what an interrupted doctor of this command measured.", apart=True)
