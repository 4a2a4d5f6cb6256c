"""Build the language tables that `assay grade` ships, from free text only.

    python benchmarks/grade/build_language_tables.py --texts DIR

Always read: the standard library of the running Python and its language reference (PSF licence),
the Universal Declaration of Human Rights (public domain), and docstrings of four packages. Of the
sources of the detector's benchmark only half of the tune half is read: the report half stays
unseen, and the salad trees are fitted on the other. DIR adds plain text files, all of them in the
public domain: Genesis (King James and World English Bible), eight plays of Shakespeare, Alice in
Wonderland, the Adventures of Sherlock Holmes, inaugural and State of the Union addresses of US
presidents; and `words`, the SCOWL list of American English (Debian's wamerican). Sources with their
digests are written beside the tables.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.util
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

from assay.coherence import language as lang
from assay.coherence.text import TextView
from legit_texts import generated, stdlib, topics, udhr
from split import is_table

DATA = Path(lang.__file__).parent / "detectors"
DENSE = 4
"""Chunks of each source for one of the benchmark."""
DOCUMENTED = ("numpy", "scipy", "transformers", "torch")
"""Packages (BSD and Apache licences) whose docstrings are read: technical English of today."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, required=True)
    options = parser.parse_args()
    files = sorted(options.texts.glob("*.txt"))
    prose = [clean(path.read_text(encoding="utf-8")) for path in files]
    words = (options.texts / "words").read_text(encoding="utf-8").split()
    tune = [
        item
        for source in (topics, stdlib, udhr, generated)
        for item in source(DENSE)
        if is_table(item.source)
    ]
    english = prose + [item.text for item in tune if item.category == "pydoc"]
    anything = [item.text for item in tune] + [p[:400_000] for p in prose]
    latin = [item.text for item in tune if item.category == "languages"]
    bloom = build_bloom(words, english)
    documents = list(docstrings())
    DATA.mkdir(exist_ok=True)
    np.savez_compressed(
        DATA / lang.TABLES,
        shapes=to_bytes(shape_bits(anything)),
        letters=to_bytes(np.round(letter_bits([*english, *latin * 2, *anything[: len(tune)]]))),
        syntax=np.clip(np.round(syntax_bits(english, bloom) * lang.BITS_STEP), -127, 127).astype(
            np.int8
        ),
        bloom=bloom,
        pairs=build_pairs(
            prose, [i.text for i in tune if i.category in {"pydoc", "python"}] + documents
        ),
        grams=build_grams([*prose, *(i.text for i in tune), *documents]),
    )
    digests = [
        f"- {p.name}: {p.stat().st_size:,} bytes, sha256"
        f" {hashlib.sha256(p.read_bytes()).hexdigest()[:16]}"
        for p in [*files, options.texts / "words"]
    ]
    (DATA / "PROVENANCE.md").write_text(
        PROVENANCE.format(
            python=sys.version.split()[0],
            tune=len(tune),
            digests="\n".join(digests),
            packages=", ".join(f"{p} {version(p)}" for p in DOCUMENTED),
        ),
        encoding="utf-8",
    )
    print(f"{(DATA / lang.TABLES).stat().st_size:,} bytes")


PROVENANCE = """# Where the language tables come from

`language_tables.npz` was built by `benchmarks/grade/build_language_tables.py` on Python {python}. It holds counts, no text.

- Python's standard library and language reference (PSF licence), Universal Declaration of Human Rights (public domain),
  output of the generators in `benchmarks/grade/legit_texts.py`: {tune} chunks of one half of the tune half
- docstrings of {packages}
- public-domain prose (Genesis, Shakespeare, Carroll, Doyle, addresses of US presidents), and the SCOWL word
  list of American English (its notice asks that this line be kept: Copyright 2000-2020 Kevin Atkinson):
{digests}

`salad_trees.npz` was fitted by `benchmarks/grade/fit_salad.py` (scikit-learn) on measures of windows of the tune halves: the
legitimate texts of `benchmarks/grade/legit_texts.py`, synthetic salads cut from them, and outputs of broken models. It holds
thresholds and leaf values, no text.
"""  # noqa: E501


def clean(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


def shape_bits(texts: list[str]) -> np.ndarray:
    """−log2 P(c | a, b) with interpolated lower orders."""
    n = lang.CLASSES
    counts = np.zeros((n, n, n))
    for text in texts:
        classes = lang.character_classes(TextView(text).codes)
        np.add.at(
            counts, (classes[:-2], classes[1:-1], classes[2:]), min(1.0, 3000 / max(len(text), 1))
        )
    return -np.log2(interpolate(counts))


def letter_bits(texts: list[str]) -> np.ndarray:
    n = lang.LETTERS
    counts = np.zeros((n, n, n, n))
    for text in texts:
        codes = lang.letter_codes(TextView(text).codes)
        codes = np.concatenate(([lang.EDGE] * 3, codes))
        quads = np.stack([codes[:-3], codes[1:-2], codes[2:-1], codes[3:]])
        # What stands before a word's edge does not matter.
        quads[0][(quads[1] == lang.EDGE) | (quads[2] == lang.EDGE)] = lang.EDGE
        quads[1][quads[2] == lang.EDGE] = lang.EDGE
        np.add.at(counts, tuple(quads), 1.0)
    # Rare beginnings say no more than their last two letters, and equal rows compress.
    shorter = interpolate(counts.sum(axis=0))
    rare = counts.sum(axis=-1) < 60
    full = interpolate(counts)
    full[rare] = np.broadcast_to(shorter, full.shape)[rare]
    return -np.log2(full)


def interpolate(counts: np.ndarray, strength: float = 4.0) -> np.ndarray:
    """P(last | all before), each order smoothed with the one below it (Dirichlet prior of
    `strength` counts).
    """
    lower = counts
    orders = [counts]
    while lower.ndim > 1:
        lower = lower.sum(axis=0)
        orders.append(lower)
    probability = (orders[-1] + 0.5) / (orders[-1] + 0.5).sum()
    for order in reversed(orders[:-1]):
        probability = (order + strength * probability) / (
            order.sum(axis=-1, keepdims=True) + strength
        )
    return probability


def syntax_bits(texts: list[str], bloom: np.ndarray) -> np.ndarray:
    n = len(lang.WORD_CLASSES)
    counts = np.zeros((n, n))
    for text in texts:
        view = TextView(text)
        known = [lang.is_known_word(w.lower(), bloom) for w in view.words]
        classes = lang.word_classes(view.words, known)
        np.add.at(counts, (classes[:-1], classes[1:]), 1.0)
    single = (counts.sum(axis=0) + 5) / (counts.sum() + 5 * n)
    pair = (counts + 20 * single) / (counts.sum(axis=1, keepdims=True) + 20)
    return np.log2(pair / single)


def build_bloom(words: list[str], texts: list[str]) -> np.ndarray:
    seen: dict[str, int] = {}
    for text in texts:
        for word in TextView(text).words:
            seen[word] = seen.get(word, 0) + 1
    listed = {w.lower() for w in words if "'" not in w} | {
        w.lower() for w, c in seen.items() if c >= 5 and w[0].isalpha()
    }
    bloom = np.zeros(lang.BLOOM_BITS // 8, dtype=np.uint8)
    for word in listed:
        for bit in lang.bloom_bits(word):
            bloom[bit >> 3] |= 1 << (bit & 7)
    print(f"{len(listed):,} words, {np.unpackbits(bloom).mean():.2f} of the bits set")
    return bloom


def docstrings() -> Iterator[str]:
    """The longer docstrings of the packages whose prose is read."""
    for package in DOCUMENTED:
        root = Path(importlib.util.find_spec(package).origin).parent
        seen: set[str] = set()
        for path in sorted(root.rglob("*.py")):
            if "tests" in path.parts:
                continue
            with contextlib.suppress(SyntaxError, UnicodeDecodeError), tokenize.open(path) as file:
                for node in ast.walk(ast.parse(file.read())):
                    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                        text = ast.get_docstring(node) or ""
                        if len(text) > 200 and text not in seen:
                            seen.add(text)
                            yield text


def build_pairs(prose: list[str], technical: list[str]) -> np.ndarray:
    """A filter of all pairs of neighbours of the prose, and of those of technical text that come in
    two texts.
    """
    said, count = [], Counter[int]()
    for text in prose:
        said.append(pair_numbers(text))
    for text in [*prose, *technical]:
        count.update(np.unique(pair_numbers(text)).tolist())
    twice = np.array([number for number, times in count.items() if times > 1], dtype=np.uint64)
    return build_filter("pairs", np.concatenate([*said, twice]))


def pair_numbers(text: str) -> np.ndarray:
    keys = lang.word_keys(TextView(text).words)
    return lang.pair_numbers(keys) if len(keys) > 1 else np.zeros(0, dtype=np.uint64)


def build_grams(texts: list[str]) -> np.ndarray:
    """A filter of all runs of five characters that come three times."""
    found = [lang.gram_numbers(view.codes)[0] for view in map(TextView, texts) if view.text]
    numbers, count = np.unique(np.concatenate(found), return_counts=True)
    return build_filter("grams", numbers[count >= 3])


def build_filter(name: str, numbers: np.ndarray) -> np.ndarray:
    kept = np.unique(numbers)
    bits = np.zeros(lang.FILTER_BITS, dtype=bool)
    bits[lang.filter_bits(kept).ravel().astype(np.int64)] = True
    print(f"{len(kept):,} {name}, {bits.mean():.2f} of the bits set")
    return np.packbits(bits, bitorder="little")


def to_bytes(bits: np.ndarray) -> np.ndarray:
    return np.clip(np.round(bits * lang.BITS_STEP), 0, 255).astype(np.uint8)


if __name__ == "__main__":
    main()
