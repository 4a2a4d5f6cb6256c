"""The keyword arguments of the functions of `assay`, for type checkers and editors.

Written by docs/make_option_types.py from the dataclasses that declare the options.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TypedDict


class CheckArgs(TypedDict, total=False):
    """Options of CheckOptions."""

    budget: float | None
    """Time that the run may take; it says what it leaves out."""
    quick: bool
    """One text per probe, in 60 s, or in 3 min on a slow server."""
    samples: int
    """Sampled texts per probe, beside a greedy one."""
    seed: int
    """First seed; recorded in the result."""
    concurrency: int
    """Streams whose speed is measured at once."""
    parallel: int
    """Probes that run at once."""
    repeats: int
    """Timed rounds after the warm-up."""
    probe: str | Sequence[str]
    """Run this probe only; may be given again."""
    longest_needle: int
    """Longest context that is searched for a needle, in tokens."""
    token_budget: float
    """Factor on every length limit, for models that reason at length."""
    no_thinking: bool
    """Ask the chat template not to reason."""
    run_code: bool
    """Run the code that the model wrote, in a sandbox."""
    run_code_unsafe: bool
    """--run-code=unsafe: run it also where the sandbox is incomplete."""
    no_throughput: bool
    """Do not measure speed."""
    suite: str
    """What to ask: texts of all kinds, or exact tool calls and JSON."""
    margin_answers: float | str
    """With a reference: share of right answers that may be lost and still be no worse."""
    need: str | Sequence[str]
    """What the server must be able to do: tools, streaming, reasoning, json; with commas."""
    all: bool
    """Measure everything, even after the verdict is certain."""
    model: str | None
    """Model to ask; default: the first the server lists."""
    reference: str | PathLike[str] | None
    """Result of an earlier healthy run (its --json) to compare with."""
    reference_engine: str | None
    """Trusted model to run here on the same prompts: hf:PATH."""
    api_key_env: str | None
    """Environment variable that holds the API key."""
    timeout: float
    """Seconds that one answer may take."""
    identity: str | PathLike[str] | None
    """Ask only whether it is the model of this reference (from --identity-out)."""
    identity_out: str | PathLike[str] | None
    """Write a reference of this server for --identity, and ask nothing else."""
    ready: bool
    """Ask only for one short text, within 10 s: for a readiness probe."""
    determinism: bool
    """Ask only whether the same request gives the same answer, alone and in batches."""


class WatchArgs(TypedDict, total=False):
    """Options of WatchOptions."""

    interval: float
    """Seconds from one round to the next; longer where a round would take more than --load."""
    load: float | str
    """Largest share of the server's time that the canary may take."""
    false_alarms: float
    """Largest number of false alarms of change per month, over all detectors."""
    listen: str
    """Where /metrics, /healthz and /health_generate are served; none opens no port."""
    webhook: str | None
    """URL that gets a JSON message for every alarm and every change of state."""
    rounds: int | None
    """Stop after so many rounds; by default it never ends."""
    new_baseline: bool
    """Forget what was learnt of this server and learn its model anew."""
    model: str | None
    """Model to ask; default: the first the server lists."""
    api_key_env: str | None
    """Environment variable that holds the API key."""
    timeout: float
    """Seconds that one answer may take."""


class VerifyArgs(TypedDict, total=False):
    """Options of VerifyOptions."""

    repo: str | None
    """Compare the files with this Hub repository."""
    revision: str | None
    """Branch, tag or commit (default: the recorded one, else main)."""
    manifest: str | PathLike[str] | None
    """Compare the files with this list of digests."""
    write_manifest: str | PathLike[str] | None
    """Write the list of digests to this file."""
    hash: str
    """Which files to hash: auto (all, but above 64 GiB only those with a digest to compare
    with), all, or none (headers only).
    """
    values: bool
    """Look at every stored value as well."""
    serve_args: str | None
    """Command line of `vllm serve` to check against the checkpoint, as one text."""
    engine_version: str | None
    """Engine that will serve it, e.g. vllm==0.32.0 (the default)."""
    compute_capability: float | None
    """CUDA compute capability of the GPU, e.g. 8.6."""
    target: str | None
    """Target model of this draft: a path or hub:ORG/NAME."""
    allow_unverified: bool
    """Accept files that have no digest to compare with."""
    no_digest_cache: bool
    """Hash every file again, also those hashed before."""
    workers: int | None
    """Threads (default: one per core)."""


class DoctorArgs(TypedDict, total=False):
    """Options of DoctorOptions."""

    ray: str
    """Spread the engines over a Ray cluster (HOST:PORT, auto), or over workers on this machine
    (no ADDRESS).
    """
    workers: int | str
    """Engines on the cluster; auto: as many as its GPUs, or its CPUs and the threads of each
    allow.
    """
    symptom: str | Sequence[str]
    """Look for this symptom only; may be given again. Default: what the first bad start shows."""
    budget: float
    """Time that the doctor may take."""
    seconds: float
    """Seconds of questions for each start."""
    concurrency: int
    """Requests at once in the burst."""
    fault_rate: float
    """A fault that shows in this share of starts must be found; 1: it shows in every one, so
    one good start is enough.
    """
    slower: float | str
    """Loss of speed that counts as a fault."""
    no_ladder: bool
    """Do not measure the speed of each acquitted setting."""
    command_template: str | None
    """Command of another engine, with {port} and {settings}."""
    reference_engine: str | None
    """Trusted model to compare with where the baseline fails: hf:PATH."""
    api_key_env: str | None
    """Environment variable that holds the API key."""
    health: str
    """Path that answers 200 once the server is ready."""
    start_timeout: float
    """Seconds that a start may take."""
    start_lock: str | PathLike[str] | None
    """File to lock while a server starts or ends, where other servers use the device."""
    seed: int
    """First seed."""
    no_tools: bool
    """Do not ask tool calls under load."""
    lint: bool
    """Read the command and the checkpoint only; launch nothing."""
    engine_version: str | None
    """Engine that the command runs, for --lint, e.g. vllm==0.32.0."""
    bundle: str | PathLike[str] | None
    """Write the evidence to this file (.tar.zst)."""
    issue: bool
    """Print a bug report with the minimal command."""
    fresh: bool
    """Forget what earlier doctors of this command measured."""


class SpecArgs(TypedDict, total=False):
    """Options of SpecOptions."""

    baseline: str | Sequence[str]
    """A source of the same kind to compare with, or a server for a real A/B run."""
    follow: bool
    """Keep reading a log as it grows."""
    seconds: float | None
    """Stop following after this many seconds."""
    model: str | None
    """The checkpoint: its head is examined as `assay verify` does."""
    num_speculative_tokens: int | None
    """Number of speculative tokens that was asked for; the source is checked against it."""
    temperature: float | None
    """Temperature of the traffic: a head is accepted less often where text is sampled."""
    cost_ratio: float | None
    """Cost of one draft token in target steps (default: measured, or 0.1)."""
    predict: str | None
    """Result of `assay compare` (or a total variation): predict acceptance beside that changed
    target.
    """
    interval: float
    """Seconds between the two scrapes."""
    requests: int
    """Requests of our own to send between the scrapes."""
    api_key_env: str | None
    """Environment variable with the API key."""
    timeout: float
    """Seconds for each request."""
    lossless: str | None
    """The same model without speculation: is the text the same?"""
    prompts: int
    """Greedy prompts."""
    samples: int
    """Sampled texts from each server."""


class CompareArgs(TypedDict, total=False):
    """Options of Plan."""

    threads: int | str
    """Threads of hf: and gguf: engines; auto: the cores that are free."""
    text: str | Sequence[str]
    """File, glob, FILE.jsonl, datasets:NAME, or self; may be given again. Left out: the English
    of Python's own documentation.
    """
    windows: int
    """Passages that are scored."""
    length: int
    """Tokens of a passage."""
    path: str
    """How windows are fed; decode reads the KV cache."""
    scored: str
    """All tokens but the first, or the second half of a window."""
    chunk: int
    """Tokens of a block on the chunked path."""
    batch: int | str
    """Windows that run together; auto: as many as fit in memory and still make it faster."""
    device: str
    """Device of hf: engines; auto: the GPU where there is one."""
    seed: int
    """Seed of the bootstrap, of noise and of sampled text."""
    no_floors: bool
    """Do not measure the floors."""
    margin_ppl: float | str
    """ACCEPT: Δppl within ± this."""
    margin_top1: float | str
    """ACCEPT: top-1 agreement at least this."""
    margin_kl: float
    """ACCEPT: mean KL at most this, in nats."""
    marginal_ppl: float | str
    """MARGINAL: Δppl within ± this."""
    marginal_top1: float | str
    """MARGINAL: top-1 agreement at least this."""
    marginal_kl: float
    """MARGINAL: mean KL at most this, in nats."""
    allow_marginal: bool
    """MARGINAL passes: exit code 0."""
    budget: float | None
    """Time that the run may take; it says what it leaves out."""
    quick: bool
    """A first answer: --budget 3."""
    all: bool
    """Score every passage, even after the verdict is certain; a number given by --windows does
    so too.
    """
    ray: str
    """Spread the engines over a Ray cluster (HOST:PORT, auto), or over workers on this machine
    (no ADDRESS).
    """
    workers: int | str
    """Engines on the cluster; auto: as many as its GPUs, or its CPUs and the threads of each
    allow.
    """
    greedy: int
    """Also let both sides generate N tokens greedily; 64 show most differences."""
    routing: bool
    """Mixtures of experts: which tokens change experts, and how much of KL that makes up."""
    control: str
    """Engine that no candidate may be worse than."""
    control_margin: float | str
    """Share of the control's difference that a candidate may add."""
    keep: bool
    """Keep the scored windows after the run."""
    rows: str | PathLike[str] | None
    """Also write one row per window into a Parquet file, for assay table."""


class RerunArgs(TypedDict, total=False):
    """Options of RerunOptions."""

    ray: str
    """Spread the engines over a Ray cluster (HOST:PORT, auto), or over workers on this machine
    (no ADDRESS).
    """
    workers: int | str
    """Engines on the cluster; auto: as many as its GPUs, or its CPUs and the threads of each
    allow.
    """
    allow_marginal: bool
    """MARGINAL passes: exit code 0."""
    keep: bool
    """Keep the scored windows after the run."""


class ReferenceArgs(TypedDict, total=False):
    """Options of ReferenceOptions."""

    threads: int | str
    """Threads of hf: and gguf: engines; auto: the cores that are free."""
    text: str | Sequence[str]
    """File, glob, FILE.jsonl, datasets:NAME, or self; may be given again. Left out: the English
    of Python's own documentation.
    """
    windows: int
    """Passages that are scored."""
    length: int
    """Tokens of a passage."""
    path: str
    """How windows are fed; decode reads the KV cache."""
    scored: str
    """All tokens but the first, or the second half of a window."""
    chunk: int
    """Tokens of a block on the chunked path."""
    batch: int | str
    """Windows that run together; auto: as many as fit in memory and still make it faster."""
    device: str
    """Device of hf: engines; auto: the GPU where there is one."""
    seed: int
    """Seed of the bootstrap, of noise and of sampled text."""
    no_floors: bool
    """Do not measure the floors."""
    ray: str
    """Spread the engines over a Ray cluster (HOST:PORT, auto), or over workers on this machine
    (no ADDRESS).
    """
    workers: int | str
    """Engines on the cluster; auto: as many as its GPUs, or its CPUs and the threads of each
    allow.
    """
    dtype: str
    """Type of the stored states; engine: as the engine has them."""
    format: str
    """assay (final states), or llama.cpp (its file of log-probabilities)."""


class PackArgs(TypedDict, total=False):
    """Options of PackOptions."""

    out: str | PathLike[str] | None
    """File to write; without it the argument is a pack, which is checked."""
    head: bool
    """Put the output head itself into the pack, and not its digest alone."""
    dtype: str
    """Type of the states; engine: as stored, float32 as float16."""
    key: str | PathLike[str] | None
    """File with a secret or an Ed25519 key (PEM, OpenSSH): sign the pack, or check who signed."""


class GateArgs(TypedDict, total=False):
    """Options of GateOptions."""

    server: str | None
    """Server to examine in place of the contract's."""
    api_key_env: str | None
    """Environment variable with the server's API key; it needs --server."""
    baseline: str | PathLike[str] | None
    """Result of the last good run (its --json): say what changed."""
    summary: str | PathLike[str] | None
    """Append a short Markdown summary to this file, such as $GITHUB_STEP_SUMMARY."""
    lint: bool
    """Only read the contract; examine nothing."""


class CardArgs(TypedDict, total=False):
    """Options of CardOptions."""

    out: str | PathLike[str]
    """Folder to write to."""
    readme: str | PathLike[str] | None
    """Put the section into this file as well, between two comments."""
    name: str | None
    """Name of the model in the card."""
    candidate: str | None
    """Candidate to show, where a report has several."""
    dataset: str | None
    """Benchmark on the Hub that the results belong to."""
    source: str | None
    """Where the reports can be read."""


class TableArgs(TypedDict, total=False):
    """Options of TableOptions."""

    against: str | None
    """Candidate that every other one is paired with, window by window."""
    sort: str
    """What the table is sorted by."""
    out: str | PathLike[str] | None
    """Write all rows into one Parquet file as well."""
    memory: int
    """MiB that DuckDB may take; more goes to the disk."""
