"""What of a server's options and of a checkpoint no codec in its KV cache can work with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.kv.codec import Samples, Site
from assay.kv.hook import Mode
from assay.kv.spec import parse_spec

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-cc": "--compilation-config"}
_ONE = {
    "--tensor-parallel-size": "every worker would have a part of the heads, which a codec must see together",
    "--pipeline-parallel-size": "every worker would have a part of the layers, and none could tell that all were coded",
    "--decode-context-parallel-size": "every worker would hold a part of the tokens",
    "--prefill-context-parallel-size": "every worker would hold a part of the tokens",
}
_NEVER = {
    "--compilation-config": "compiled models and CUDA graphs run no hooks",
    "--no-enforce-eager": "compiled models and CUDA graphs run no hooks",
    "--speculative-config": "drafted tokens that are rejected have been coded already",
    "--kv-transfer-config": "a cache that comes from elsewhere was not coded here",
    "--async-scheduling": "tokens of a step that is not done yet cannot be told apart",
}


def option(options: Sequence[str], name: str) -> str | None:
    """The value of a server's option, `""` where it stands alone, None where it is not there. The last one counts."""
    found = None
    for position, word in enumerate(options):
        head, equals, value = word.partition("=")
        given = _SHORT.get(head, head).replace("_", "-")
        if given != name:
            continue
        following = options[position + 1] if position + 1 < len(options) else "-"
        found = value if equals else ("" if following.startswith("-") else following)
    return found


def needs_history(codec: str, mode: str) -> bool:
    """Whether tokens in the cache change later: blocks that become full, recent tokens, a prefix that is exact first."""
    if mode != Mode.INFORWARD:
        return True
    spec = parse_spec(codec)
    for stream in ("k", "v"):
        recipe = spec.of(stream)
        if recipe is None:
            continue
        if recipe.exact_last:
            return True
        try:
            coder = recipe.fit(Samples(Site(stream, 0, 1, 1, 64)))
        except (
            AssayError
        ):  # it must be calibrated, which is no matter of its blocks; suppose that it has some
            return True
        if coder.granularity > 1 or coder.exact_last:
            return True
    return False


def check_options(options: Sequence[str], *, history: bool) -> None:
    """AssayError for an option of vLLM's server with which numbers would be wrong."""
    for name, why in _ONE.items():
        if option(options, name) not in (None, "1"):
            raise _refused(f"{name} {option(options, name)}: {why}", f"leave {name} out, or give 1")
    for name, why in _NEVER.items():
        if option(options, name) is not None:
            raise _refused(f"{name}: {why}", f"leave {name} out")
    if any(word.startswith("-O") for word in options):
        raise _refused("-O: compiled models and CUDA graphs run no hooks", "leave -O out")
    if history and option(options, "--enable-prefix-caching") is not None:
        raise _refused(
            "--enable-prefix-caching: with this codec and mode tokens change after they are cached, so that another "
            "request would read a mixture",
            "leave it out, or use a codec that codes each token alone (such as hadamard) with --mode inforward",
        )
    kind = option(options, "--kv-cache-dtype")
    if kind not in (None, "auto", "bfloat16", "bf16"):
        raise _refused(
            f"--kv-cache-dtype {kind}: what the codec gives back would be rounded a second time",
            "leave it out: the codec is the cache's format",
        )


def check_checkpoint(model: str) -> None:
    """AssayError for a checkpoint at hand whose attention assay does not hook; a name on the hub is left to the worker."""
    config = _config(model)
    if config is None:
        return
    if not known_architecture(model):
        raise _refused(
            f"{(config.get('architectures') or ['?'])[0]} is no model whose attention assay hooks in vLLM",
            f"serve one of {', '.join(ARCHITECTURES)}, or measure the codec with hf:",
        )
    check_full_attention(model)


def known_architecture(model: str) -> bool:
    """Whether a checkpoint at hand is of a family whose attention in vLLM has been read."""
    return ((_config(model) or {}).get("architectures") or ["?"])[0] in ARCHITECTURES


def check_full_attention(model: str) -> None:
    """AssayError for a checkpoint at hand with layers of another kind than full attention."""
    config = _config(model) or {}
    if set(config.get("layer_types") or ()) - {"full_attention"} or config.get("use_sliding_window"):
        raise _refused(
            "the model has sliding-window layers, whose cache lets go of tokens that a codec still has to change",
            "measure the codec on it with hf:",
        )


def _config(model: str) -> dict[str, Any] | None:
    path = Path(model) / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _refused(what: str, remedy: str) -> AssayError:
    return AssayError(what, finding_id="kv.unsupported", remedy=remedy)
