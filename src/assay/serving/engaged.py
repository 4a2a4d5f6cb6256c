"""Did a setting take effect? Evidence from the log, the counters and the texts; "set and had no effect" is a finding."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from assay.serving.command import Setting
from assay.serving.symptoms import Observation


@dataclass(frozen=True)
class Engaged:
    """`yes` True: it took effect; False: it did not; None: nothing tells."""

    yes: bool | None
    evidence: str


_UNKNOWN = Engaged(None, "nothing in the log, the counters or the texts tells")
_IGNORED = re.compile(
    r"ignor|no effect|not (?:be )?used|will be unused|unused|unrecogni[sz]ed|unknown (?:argument|option)|has been disabled|"
    r"is disabled|disabling|falling back|not supported.{0,40}(?:using|fall)|no usable GPU|overrid(?:e|es|den)", re.IGNORECASE,
)  # fmt: skip
_CONFIG_NAMES = {
    "--max-num-seqs": "max_num_seqs", "--ubatch-size": "n_ubatch", "--batch-size": "n_batch", "--ctx-size": "n_ctx",
    "--flash-attn": "flash_attn", "--rope-freq-base": "freq_base", "--rope-freq-scale": "freq_scale", "--parallel": "n_seq_max",
    "--rope-scaling": "rope scaling", "--kv-unified": "kv_unified",
}  # fmt: skip
_SAME = {"on": "enabled", "off": "disabled", "true": "enabled", "false": "disabled"}


def engaged(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    """What the starts of the given command, and of one without the setting, say about it."""
    ignored = _ignored(setting, given.log)
    if ignored:
        return Engaged(False, f"log: {ignored}")
    special = _SPECIAL.get(setting.safe.kind if setting.safe.kind in ("draft", "adapter") else setting.name)
    if special is not None:
        found = special(setting, given, without)
        if found.yes is not None:
            return found
    return _in_log(setting, given.log)


def _flag_words(setting: Setting) -> tuple[str, ...]:
    bare = setting.name.lstrip("-")
    extra = {"n-gpu-layers": ("gpu-layers", "ngl", "GPU support")}.get(bare, ())
    return (bare, bare.replace("-", "_"), *extra)


def _ignored(setting: Setting, log: str) -> str:
    """The line of the log that says that the option is not used."""
    names = [n for n in _flag_words(setting) if len(n) > 2]
    pattern = re.compile("|".join(rf"(?<![\w-])-{{0,2}}{re.escape(n)}(?![\w-])" for n in names))
    for line in log.splitlines():
        said, named = pattern.subn("", line)  # --hf-overrides and --override-kv have the word in their names
        if named and _IGNORED.search(said) and "non-default args" not in line and "config:" not in line:
            return line.strip()[:240]
    return ""


def _in_log(setting: Setting, log: str) -> Engaged:
    """The engine's own account of its settings: `name=value` in vLLM's configuration, `name = value` in llama.cpp's."""
    key = _CONFIG_NAMES.get(setting.name, setting.name.lstrip("-").removeprefix("no-").replace("-", "_"))
    found = re.findall(rf"(?<![\w-]){re.escape(key)}['\"]?\s*[=:]\s*['\"]?([\w./+-]+)", log)
    found = [value.rstrip(".,") for value in found if value not in ("None", "null")]
    if not found or setting.value is None or setting.implicit:
        return _UNKNOWN
    if any(_same(value, setting.value) for value in found):
        return Engaged(True, f"log: {key}={setting.value}")
    return _UNKNOWN


def _same(found: str, want: str) -> bool:
    """Whether two words name one value: 100 and 100.0, on and enabled."""
    ours, theirs = (_SAME.get(word.strip().casefold(), word.strip().casefold()) for word in (found, want))
    with suppress(ValueError):
        return float(ours) == float(theirs)
    return ours == theirs


def _kv_dtype(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    want = (setting.value or "").casefold()
    stated = str(given.facts.get("kv_cache_dtype") or "").casefold()
    found = re.findall(r"(?:kv_cache_dtype|cache_dtype)['\"]?\s*[=:]\s*['\"]?([\w.]+)", given.log)
    line = next((w for w in (stated, *map(str.casefold, found)) if w and w not in ("auto", "none")), "")
    if line and (line.startswith(want[:3]) or want.startswith(line[:3])):
        return Engaged(True, f"the engine says kv_cache_dtype {line}")
    if stated == "auto" and want != "auto":
        return Engaged(False, "the engine says kv_cache_dtype auto")
    return _UNKNOWN


def _backend(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    """vLLM names the backend that it took, or says that it cannot take the one that was asked for."""
    want = re.escape(setting.value or "")
    for line in given.log.splitlines():
        if re.search(rf"Cannot use {want} (?:attention )?backend", line, re.IGNORECASE):
            return Engaged(False, f"log: {line.strip()[-200:]}")
        if re.search(rf"Using {want} (?:attention )?backend", line, re.IGNORECASE):
            return Engaged(True, f"log: {line.strip()[-200:]}")
    return _UNKNOWN


def _llama_kv(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    side = "K" if setting.name.endswith("-k") else "V"
    found = re.findall(rf"\b{side} \((\w+)\)", given.log)
    if not found:
        return _UNKNOWN
    return Engaged((setting.value or "").casefold() in map(str.casefold, found), f"log: {side} ({found[-1]})")


def _draft(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    drafted = sum(v for name, v in given.metrics.items() if "draft" in name and "accept" not in name)
    if drafted > 0 or given.acceptance is not None:
        rate = "" if given.acceptance is None else f", {given.acceptance:.0%} accepted"
        return Engaged(True, f"draft counters moved by {drafted:g}{rate}" if drafted else f"tokens were drafted{rate}")
    if given.health == "off" or any("spec_decode" in name for name in given.metrics):
        return Engaged(False, "no token was drafted")
    return _UNKNOWN


def _prefix(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    """Hits of the cache: of a prompt that was asked twice, else of all that was asked."""
    hits = given.facts.get("prefix_hits")
    if hits is not None:
        same = "the same answer" if given.facts.get("prefix_same") else "another answer"
        says = f"a prompt asked twice took {hits:g} tokens from the prefix cache and got {same}"
        return Engaged(hits > 0, says)
    moved = [v for name, v in given.metrics.items() if "prefix_cache_hits" in name and "external" not in name]
    return Engaged(True, f"prefix cache hits rose by {sum(moved):g} tokens") if sum(moved) > 0 else _UNKNOWN


def texts_of(seen: Observation) -> Mapping[tuple[str, str], str]:
    """Greedy texts by probe and form."""
    return {(p.name, s.variant): s.text_head for p in seen.record.probes for s in p.samples if s.greedy and s.text_head}


def _adapter(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    """An adapter whose output equals the base model's exactly is not applied."""
    if asked := given.facts.get("adapter_asked"):
        differ = given.facts["adapter_differ"]
        says = f"{differ} of {asked} greedy texts differ from those of the base model on the same server"
        return Engaged(bool(differ), says)
    if without is None:
        return _UNKNOWN
    ours, theirs = texts_of(given), texts_of(without)
    shared = [key for key in ours if key in theirs]
    if len(shared) < 5:
        return _UNKNOWN
    differ = sum(ours[key] != theirs[key] for key in shared)
    if differ:
        return Engaged(True, f"{differ} of {len(shared)} greedy texts differ from those of the base model")
    return Engaged(False, f"all {len(shared)} greedy texts equal those of the base model exactly")


_Judge = Callable[[Setting, Observation, Observation | None], Engaged]
_SPECIAL: Mapping[str, _Judge] = {
    "--kv-cache-dtype": _kv_dtype, "--cache-type-k": _llama_kv, "--cache-type-v": _llama_kv, "draft": _draft,
    "--enable-prefix-caching": _prefix, "--attention-backend": _backend, "adapter": _adapter,
}  # fmt: skip
