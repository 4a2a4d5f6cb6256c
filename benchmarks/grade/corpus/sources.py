"""Where the texts of the corpus come from: one model, whole or damaged, and one way of
sampling it.
"""

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
    max_tokens: int = 200


FIELD = tuple(Sampling(0.7, 0.9, seed) for seed in (1, 2))
"""The sampling of the field's coherence check."""

GREEDY = Sampling(0.0)
SHORT = (Sampling(0.7, 0.9, 1, 140), Sampling(0.7, 0.9, 2, 140), Sampling(0.0, max_tokens=140))
BRIEF = (Sampling(0.0, max_tokens=120), Sampling(0.7, 0.9, 1, 120))
LONG = (Sampling(0.0, max_tokens=420), Sampling(0.7, 0.9, 3, max_tokens=420))


@dataclass(frozen=True)
class Source:
    """All texts of one cause. `model` is smollm2 or gemma3; `damage` a name of assay's registry or
    of damages.py.
    """

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
        "wrong_tokenizer.2",
        "smollm2",
        (FIELD[0], GREEDY),
        PROMPTS,
        damage="wrong_tokenizer",
        damage_seed=2,
    ),
    Source("temperature5", "smollm2", (Sampling(5.0, 1.0, 1), Sampling(5.0, 0.95, 2)), PROMPTS),
    Source("temperature2", "smollm2", (Sampling(2.0, 1.0, 1),), PROMPTS),
    Source("greedy_long", "smollm2", (Sampling(0.0, max_tokens=500),), PROMPTS | MORE_PROMPTS),
    Source("no_bos", "gemma3", SHORT, PROMPTS, add_bos=False, chat=False),
    Source(
        "healthy",
        "smollm2",
        (*FIELD, Sampling(0.7, 0.9, 3), Sampling(0.7, 0.9, 4), GREEDY),
        PROMPTS | MORE_PROMPTS,
    ),
    *(
        Source(f"hot_bytes.{seed}", "smollm2", BRIEF[:1], _some(6), "hot_bytes", seed)
        for seed in range(16)
    ),
    *(
        Source(f"hot_rows.{seed}", "smollm2", BRIEF[:1], _some(6), "hot_rows", seed)
        for seed in range(8)
    ),
    *(
        Source(name, "smollm2", BRIEF, PROMPTS, damage=name)
        for name in ("flat_attention", "half_filled", "swapped_gate", "noisy", "large_k")
    ),
    *(
        Source(name, "smollm2", BRIEF[1:], PROMPTS, damage=name)
        for name in (
            "swapped_kv",
            "plain_norms",
            "no_attention",
            "interleaved_rope",
            "double_scale",
        )
    ),
    *(
        Source(f"shuffled_layers.{seed}", "smollm2", BRIEF, PROMPTS, "shuffled_layers", seed)
        for seed in range(3, 8)
    ),
    *(
        Source(f"zeroed_layers.{seed}", "smollm2", BRIEF, PROMPTS, "zeroed_layers", seed)
        for seed in range(5)
    ),
    Source("healthy_base", "gemma3", SHORT[:2], PROMPTS, chat=False),
)
