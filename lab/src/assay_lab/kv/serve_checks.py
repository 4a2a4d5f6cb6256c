"""Options of a server and checkpoints with which a codec in the KV cache would be wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.spec import parse_spec

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-cc": "--compilation-config",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "--spec-method": "--speculative-config",
    "--spec-model": "--speculative-config",
    "--spec-tokens": "--speculative-config",
    "-ac": "--attention-config",
}
UNSEEN = {
    "--model": "the model is the first argument of assay kv serve, and was checked",
    "--config": "nothing looks into a file for options that would make numbers wrong",
}
ONE_RANK = {
    "--tensor-parallel-size": (
        "every worker would have a part of the heads, which a codec must see together"
    ),
    "--pipeline-parallel-size": (
        "every worker would have a part of the layers, and none could tell that all were coded"
    ),
    "--decode-context-parallel-size": "every worker would hold a part of the tokens",
    "--prefill-context-parallel-size": "every worker would hold a part of the tokens",
}
_NEVER = UNSEEN | {
    "--compilation-config": "compiled models and CUDA graphs run no hooks",
    "--no-enforce-eager": "compiled models and CUDA graphs run no hooks",
    "--speculative-config": "drafted tokens that are rejected have been coded already",
    "--kv-transfer-config": "a cache that comes from elsewhere was not coded here",
    "--async-scheduling": "tokens of a step that is not done yet cannot be told apart",
}


_LEAST_NAME = 7
"""Letters of a shortened option up to which it may be another one's."""


def option(options: Sequence[str], name: str) -> str | None:
    """The value of a server's option, `""` if it has none, None if it is not given. The
    last one counts.

    Options are found as vLLM takes them: shortened, or with a part of a JSON value behind a dot.
    """
    found = None
    for position, word in enumerate(options):
        head, equals, value = word.partition("=")
        given = head.partition(".")[0].replace("_", "-")
        given = _SHORT.get(given, given)
        shortened = (
            name.startswith(given) and len(given) > _LEAST_NAME and given != "--kv-cache-dtype"
        )
        if given != name and not shortened:
            continue
        following = options[position + 1] if position + 1 < len(options) else "-"
        found = value if equals else ("" if following.startswith("-") else following)
    return found


def needs_history(codec: str, mode: str) -> bool:
    """Whether tokens in the cache change later: blocks that become full, recent tokens, a prefix
    that is exact first.
    """
    if mode != Mode.INFORWARD:
        return True
    spec = parse_spec(codec)
    for stream in ("k", "v"):
        recipe = spec.of(stream)
        if recipe is None:
            continue
        if recipe.exact_last or not recipe.capabilities.token_by_token:
            return True
        try:
            recipe.fit(Samples(LayerStream(stream, 0, 1, 1, 64)))
        except AssayError:  # it needs a calibration: suppose that its tokens change
            return True
    return False


def check_options(options: Sequence[str], *, history: bool) -> None:
    """AssayError for an option of vLLM's server with which numbers would be wrong."""
    for name, why in ONE_RANK.items():
        if option(options, name) not in (None, "1"):
            raise cannot_serve(
                f"{name} {option(options, name)}: {why}", f"leave {name} out, or give 1"
            )
    for name, why in _NEVER.items():
        if option(options, name) is not None:
            raise cannot_serve(f"{name}: {why}", f"leave {name} out")
    if any(word.startswith("-O") for word in options):
        raise cannot_serve("-O: compiled models and CUDA graphs run no hooks", "leave -O out")
    if history and option(options, "--enable-prefix-caching") is not None:
        raise cannot_serve(
            "--enable-prefix-caching: with this codec and mode tokens change after they are cached,"
            " so that another request would read a mixture",
            "leave it out, or use a codec that codes each token alone (such as hadamard) with"
            " --mode inforward",
        )
    kind = option(options, "--kv-cache-dtype")
    if kind not in (None, "auto", "bfloat16", "bf16"):
        raise cannot_serve(
            f"--kv-cache-dtype {kind}: what the codec gives back would be rounded a second time",
            "leave it out: the codec is the cache's format",
        )


def check_checkpoint(model: str) -> None:
    """AssayError for a checkpoint at hand whose attention assay does not hook; a name on the hub is
    left to the worker.
    """
    config = _config(model)
    if config is None:
        return
    if not known_architecture(model):
        raise cannot_serve(
            f"{(config.get('architectures') or ['?'])[0]} is no model whose attention assay hooks"
            " in vLLM",
            f"serve one of {', '.join(ARCHITECTURES)}, or measure the codec with hf:",
        )
    check_full_attention(model)


def known_architecture(model: str) -> bool:
    """Whether a checkpoint at hand is of a family whose attention in vLLM has been read."""
    return ((_config(model) or {}).get("architectures") or ["?"])[0] in ARCHITECTURES


def check_full_attention(model: str) -> None:
    """AssayError for a checkpoint at hand with layers of another kind than full attention."""
    config = _config(model) or {}
    if set(config.get("layer_types") or ()) - {"full_attention"} or config.get(
        "use_sliding_window"
    ):
        raise cannot_serve(
            "the model has sliding-window layers, whose cache lets go of tokens that a codec still"
            " has to change",
            "measure the codec on it with hf:",
        )


def _config(model: str) -> dict[str, Any] | None:
    path = Path(model) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError) as error:
        raise _unread(path, str(error)) from error
    if found is not None and not isinstance(found, dict):
        raise _unread(path, "it holds no JSON object")
    return found


def _unread(path: Path, why: str) -> AssayError:
    return AssayError(
        f"cannot read {path}: {why}",
        finding_id="kv.engine_load",
        remedy="copy or download the checkpoint anew",
    )


def cannot_serve(what: str, remedy: str) -> AssayError:
    """The error of a server that would not have the codec in its cache."""
    return AssayError(what, finding_id="kv.unsupported", remedy=remedy)
