"""Prompts and the text that is generate_texts after them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from assay.errors import AssayError
from assay.runs import Kept
from assay_lab.heads.prompts import HELD_OUT, KINDS, prompts
from assay_lab.heads.text import generate_texts, side_by_side, with_transformers, with_vllm

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(target)


def test_prompts_are_of_three_kinds_and_some_of_each_are_held_out(tokenizer: Any) -> None:
    asked = prompts(tokenizer, 600)
    assert asked == prompts(tokenizer, 600) != prompts(tokenizer, 600, seed=1)
    held = [(kind, tuple(ids)) for i, (kind, ids) in enumerate(asked) if i % HELD_OUT == 0]
    rest = {tuple(ids) for i, (_, ids) in enumerate(asked) if i % HELD_OUT}
    assert {kind for kind, _ in held} == set(KINDS)
    assert sum(ids in rest for _, ids in held) <= 0.1 * len(held)
    assert all(ids for _, ids in asked)


def test_text_is_the_targets_own_and_is_kept(target: Path, tokenizer: Any, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    asked = prompts(tokenizer, 12)
    write, kept = with_transformers(model, tokenizer), Kept(tmp_path, "test")
    found = generate_texts(asked, write, 20, (0.0, 1.0), kept, chunk=6)
    assert {t.temperature for t in found} == {0.0, 1.0}
    with torch.no_grad():
        for t in (t for t in found if not t.temperature):
            logits = model(torch.tensor([t.ids])).logits[0, t.begin - 1 : -1]
            chosen = logits.gather(1, torch.tensor(t.ids[t.begin :])[:, None])[:, 0]
            assert (logits.max(-1).values - chosen).max() < 1e-3  # padding moves the last bits

    def nothing(*a: Any) -> Any:
        raise AssertionError("written twice")

    assert generate_texts(asked, nothing, 20, (0.0, 1.0), kept, chunk=6) == found


def test_a_python_without_vllm_is_one_line() -> None:
    write = with_vllm(Path(sys.executable), "nowhere", frozenset({1}))
    with pytest.raises(AssayError, match=r"vLLM wrote no text: .*"):
        write([[1, 2]], 4, 0.0, 0)


def test_spread_chunks_come_to_their_prompts_whatever_is_kept(tmp_path: Path) -> None:
    asked = [("code", [i]) for i in range(8)]

    def answer(ids: list[list[int]], tokens: int, temperature: float, seed: int) -> list[list[int]]:
        return [[own[0], seed] * 5 for own in ids]

    expected = generate_texts(asked, answer, 20, (0.0, 1.0), None, chunk=2)
    kept = Kept(tmp_path)
    assert generate_texts(asked, answer, 20, (0.0, 1.0), kept, chunk=2) == expected
    keys = [["text", (0.0, 1.0)[i % 2], 20, [[2 * i], [2 * i + 1]]] for i in range(4)]
    kept._path(keys[0]).write_bytes(b"damaged")
    kept.forget(keys[1])
    kept.forget(keys[3])
    spread_to: list[int] = []

    def spread(tasks: Any) -> Any:
        spread_to.extend(task[-1] for task in tasks)
        ids = np.array([2, 1] * 5 + [3, 1] * 5, np.int32)
        kept.put(
            keys[1], {"ids": ids, "lengths": np.array([10, 10], np.int32)}
        )  # another run of the same plan
        for task in tasks:
            yield answer(*task)

    def never(*given: Any) -> Any:
        raise AssertionError("written here")

    write = side_by_side(asked, never, 20, (0.0, 1.0), kept, 2, spread)
    assert generate_texts(asked, write, 20, (0.0, 1.0), kept, chunk=2) == expected
    assert spread_to == [0, 1, 3]
