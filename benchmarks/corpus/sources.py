"""Where the texts of the corpus come from: one model, whole or damaged, and one way of sampling it."""

from __future__ import annotations

from dataclasses import dataclass

from prompts import MORE_PROMPTS, PROMPTS

from assay.demo.damage import DAMAGES


@dataclass(frozen=True)
class Sampling:
    """Sampling of one text; `temperature` 0 is greedy."""

    temperature: float
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 140


FIELD = tuple(Sampling(0.7, 0.9, seed) for seed in (1, 2))
"""The sampling of the field's coherence check."""

GREEDY = Sampling(0.0)
LONG = (Sampling(0.0, max_tokens=420), Sampling(0.7, 0.9, 3, max_tokens=420))


@dataclass(frozen=True)
class Source:
    """All texts of one cause. `model` is smollm2 or gemma3; `damage` a name of assay's registry, or None."""

    name: str
    model: str
    sampling: tuple[Sampling, ...]
    prompts: dict[str, str]
    damage: str | None = None
    damage_seed: int = 0
    add_bos: bool = True
    chat: bool = True


def _some(count: int) -> dict[str, str]:
    return dict(list(PROMPTS.items())[:count])


# These write (almost) nothing: a few texts say all there is to say.
_SILENT = ("random_blocks", "nan_row", "wrong_template")
_VARIED = tuple(name for name in DAMAGES if name not in _SILENT)

SOURCES = (
    *(Source(name, "smollm2", (*FIELD, GREEDY), PROMPTS, damage=name) for name in _VARIED),
    *(Source(name, "smollm2", (FIELD[0], GREEDY), _some(3), damage=name) for name in _SILENT),
    *(
        Source(f"{name}.long", "smollm2", LONG, _some(4), damage=name)
        for name in (
            "scaled_k",
            "zeroed_layer",
            "wrong_tokenizer",
            "rope_theta",
            "shifted_scales",
            "swapped_layers",
        )
    ),
    Source(
        "wrong_tokenizer.2", "smollm2", (FIELD[0], GREEDY), PROMPTS, damage="wrong_tokenizer", damage_seed=2
    ),
    Source("temperature5", "smollm2", (Sampling(5.0, 1.0, 1), Sampling(5.0, 0.95, 2)), PROMPTS),
    Source("temperature2", "smollm2", (Sampling(2.0, 1.0, 1),), PROMPTS),
    Source("greedy_long", "smollm2", (Sampling(0.0, max_tokens=500),), PROMPTS),
    Source("no_bos", "gemma3", (*FIELD, GREEDY), PROMPTS, add_bos=False, chat=False),
    Source(
        "healthy",
        "smollm2",
        (*FIELD, Sampling(0.7, 0.9, 3), Sampling(0.7, 0.9, 4), GREEDY),
        PROMPTS | MORE_PROMPTS,
    ),
    Source("healthy_base", "gemma3", FIELD, PROMPTS, chat=False),
)
