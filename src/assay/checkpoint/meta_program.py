"""Compare stored tensor names with the model that transformers builds for a config.

`python meta_program.py` reads `{config, stored}` as JSON and prints `{origin, missing, wrong,
unused, problem}`. It limits its own processor time and memory first. The model is built on the meta
device: no memory for weights, no code of the checkpoint, no network.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

CPU_S, MEMORY, MOST_BYTES = 60, 16 << 30, 1 << 20
MAY_BE_LOST = re.compile(
    r"(inv_freq|position_ids|num_batches_tracked|masked_bias|attn_mask|rotary_emb\.\w+|causal_mask)$"
)
"""Buffers that every class computes itself."""
OWED_BUFFERS = re.compile(r"(e_score_correction_bias|running_mean|running_var)$")
"""Buffers that are learned: the others are computed."""
UNASKED = re.compile(
    r"(^_|auto_map|attn_implementation|custom_generate|quantization_config|dtype$)"
)
"""Keys of a config that choose code, kernels or number formats, and no shapes."""


def limit() -> None:
    """Bound processor time, memory and written files of this process."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))


def plain(value: Any) -> Any:
    """A config without the keys that choose code, kernels or number formats."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if not UNASKED.search(k)}
    return [plain(v) for v in value] if isinstance(value, list) else value


def build(config: dict[str, Any]) -> Any:
    """The model of the first architecture that transformers knows, on the meta device.

    Raises LookupError for a type or an architecture that transformers does not know.
    """
    import torch
    import transformers
    from transformers import AutoConfig

    names = config.get("architectures") or []
    kind = config.pop("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise LookupError(f"it knows no model type {kind[:60]!r}")
    for name in [*names, *_written_otherwise(names, dir(transformers))]:
        made = getattr(transformers, name, None) if re.fullmatch(r"[A-Za-z0-9_]+", name) else None
        if isinstance(made, type) and issubclass(made, transformers.PreTrainedModel):
            with torch.device("meta"), torch.no_grad():
                chosen: Any = made
                return chosen._from_config(AutoConfig.for_model(kind, **config))
    raise LookupError(f"it knows no architecture {', '.join(names)[:80]}")


def _written_otherwise(names: list[str], known: list[str]) -> list[str]:
    """Classes with the name of an architecture but for case and underscores."""
    wanted = {name.replace("_", "").lower() for name in names}
    return [k for k in known if k not in names and k.replace("_", "").lower() in wanted]


def owed(model: Any) -> dict[str, tuple[int, ...]]:
    """Shape by name of what a checkpoint has to hold."""
    optional = [
        re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    ]
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: tuple(value.shape)
        for name, value in model.state_dict().items()
        if (name in parameters or OWED_BUFFERS.search(name))
        and name not in tied
        and not MAY_BE_LOST.search(name)
        and not any(p.search(name) for p in optional)
    }


class Renaming:
    """From the names of a checkpoint to the names of the model, as transformers loads it."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        transforms = get_model_conversion_mapping(model)
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
        self._model, self._rename = model, rename_source_key
        self._targets = dict(model.state_dict())

    def __call__(self, name: str) -> tuple[str, str | None, Any]:
        """(the model's name, the converter's pattern that matched, the converter)."""
        target, pattern = self._rename(
            name, self._renamings, self._converters, self._model.base_model_prefix, self._targets
        )
        if pattern is None:
            return target, None, None
        holder = next(c for c in self._converters if pattern in c.source_patterns)
        return target, pattern, holder


def siblings(target: str, converter: Any) -> Iterator[str]:
    """All names that one converter fills; `target` is the first."""
    first, *others = converter.target_patterns
    yield target
    for other in others:
        yield target.replace(first, other)


def merges(converter: Any) -> bool:
    """Whether a converter stacks one tensor an expert."""
    return any(type(o).__name__ == "MergeModulelist" for o in converter.operations)


def compare(model: Any, stored: Mapping[str, list[int] | None]) -> dict[str, Any]:
    """What the model owes and the checkpoint lacks, under the checkpoint's own names if possible.

    Args:
        model: The model on the meta device.
        stored: Shape by name; None for a weight that is stored packed.

    Returns:
        `missing` names, `wrong` shapes as (stored, expected) by name, and `unused` names.
    """
    shapes, renamed = owed(model), Renaming(model)
    everything = set(model.state_dict())
    whole: dict[str, str] = {}
    parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    holders: dict[str, Any] = {}
    unused: list[str] = []
    for name in stored:
        target, pattern, converter = (name, None, None) if name in everything else renamed(name)
        filled = list(siblings(target, converter)) if converter else [target]
        if not any(t in everything for t in filled):
            unused.append(name)
        for t in filled:
            if pattern is None:
                whole[t] = name
            else:
                parts[t][pattern].append(name)
                holders[t] = converter
    missing: list[str] = []
    wrong: dict[str, Any] = {}
    for target, shape in shapes.items():
        source = whole.get(target)
        if source is not None:
            own = stored[source]
            if own is not None and tuple(own) != shape:
                wrong[source] = (own, list(shape))
        elif target in parts:
            missing += lost_parts(parts[target], holders[target], shape, renamed)
        else:
            missing.append(target)
    examples = example_names(whole)
    ignored = [
        re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    unused = [n for n in unused if not any(p.search(n) for p in ignored)]
    return {"missing": [examples(m) for m in missing], "wrong": wrong, "unused": unused}


def lost_parts(
    found: Mapping[str, list[str]], converter: Any, shape: tuple[int, ...], renamed: Renaming
) -> list[str]:
    """Names of the parts of one converted tensor that are not stored."""
    lost: list[str] = []
    have = {name for names in found.values() for name in names}
    example = next(iter(have))
    stem = next(p for p, names in found.items() if example in names)
    tail = _tail(stem)
    numbers = range(shape[0]) if merges(converter) and shape else None
    for pattern in converter.source_patterns:
        wanted = example.removesuffix(tail) + _tail(pattern) if tail else None
        if wanted is None:
            if pattern not in found:
                lost.append(f"{example} ({pattern})")
            continue
        if numbers is None:
            names = [wanted]
        else:
            before, _, after = wanted.rpartition(".experts.")
            rest = after.partition(".")[2]
            names = [f"{before}.experts.{i}.{rest}" for i in numbers] if before else [wanted]
        lost += [n for n in names if n not in have]
    return lost


def _tail(pattern: str) -> str:
    """The end of a name that a pattern gives literally: `gate_proj.weight` of
    `experts.*.gate_…`.
    """
    return pattern.rpartition("*.")[2].replace("\\.", ".").rstrip("$").lstrip("^")


def example_names(whole: Mapping[str, str]) -> Any:
    """A function from a name of the model to the name that the checkpoint would give it.

    The checkpoint's name of the same tensor in another layer shows the way.
    """
    roles: dict[str, tuple[str, str]] = {}
    for target, source in whole.items():
        roles.setdefault(re.sub(r"\d+", "#", target), (target, source))

    def name(target: str) -> str:
        known = roles.get(re.sub(r"\d+", "#", target))
        if known is None:
            return target
        peer, source = known
        numbers = dict(zip(re.findall(r"\d+", peer), re.findall(r"\d+", target), strict=True))
        return re.sub(r"\d+", lambda m: numbers.get(m[0], m[0]), source)

    return name


def main() -> None:
    """Compare what is on standard input."""
    limit()
    given: dict[str, Any] = json.load(sys.stdin)
    answer: dict[str, Any] = {"missing": [], "wrong": {}, "unused": [], "problem": ""}
    try:
        import transformers

        transformers.logging.set_verbosity_error()
        answer["origin"] = f"transformers {transformers.__version__}"
        answer |= compare(build(plain(given["config"])), given["stored"])
    except LookupError as error:
        answer["problem"] = str(error)
    except Exception as error:
        # Hundreds of model classes read this config, each with errors of its own.
        answer["problem"] = f"it cannot build the model ({type(error).__name__})"
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
