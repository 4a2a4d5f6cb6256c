"""What `kv_codecs.py` measures: sections of its files of SPECs, and windows that no earlier row has
seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from assay.engines.scoring import Window
from assay.fidelity.windows import blocks_of
from assay_lab.kv.spec import parse_spec
from kv_codecs import Measuring, _parser, _seen, sections, unseen

SPECS = sorted((Path(__file__).parents[2] / "benchmarks" / "kv").glob("kv_*.specs"))


def given(*files: Path, more: tuple[str, ...] = ()) -> Any:
    return _parser().parse_args(
        [*(f"--specs={f}" for f in files), "--text=wiki", "--windows=7", *more]
    )


def test_a_section_has_the_options_of_the_command_but_for_its_own(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("# plain\nfp8\n[--length 4096]\nint(bits=4)\n", encoding="utf-8")
    two.write_text(
        "[--text c --text json --block 1]\nhadamard(bits=4)\n[--windows 9]\n", encoding="utf-8"
    )
    found = [
        (a.length, a.windows, a.text, a.block, lines)
        for a, lines in sections(given(one, two, more=("--block=512",)))
    ]
    assert found == [
        (1024, 7, ["wiki"], 512, ["fp8"]),
        (4096, 7, ["wiki"], 512, ["int(bits=4)"]),
        (1024, 7, ["c", "json"], 1, ["hadamard(bits=4)"]),
    ]  # a section without SPECs is none


def test_a_section_of_other_models_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "one"
    file.write_text(
        "fp8\n[--models qwen15 gemma3 --length 64]\nint(bits=4)\n[--windows 9]\nbf16\n",
        encoding="utf-8",
    )
    by_model = {
        m: [(a.length, lines) for a, lines in sections(given(file, more=(f"--model={m}",)))]
        for m in ("qwen15", "qwen05")
    }
    assert by_model["qwen15"] == [(1024, ["fp8"]), (64, ["int(bits=4)"]), (1024, ["bf16"])]
    assert by_model["qwen05"] == [(1024, ["fp8"]), (1024, ["bf16"])]


@pytest.mark.parametrize("model", ["smollm2", "gemma3", "qwen05", "qwen15"])
@pytest.mark.parametrize("file", SPECS, ids=lambda f: f.stem)
def test_every_line_of_every_file_is_a_codec_once_in_its_section(file: Path, model: str) -> None:
    for arguments, lines in sections(given(file, more=(f"--model={model}",))):
        codecs = [str(parse_spec(line)) for line in lines]
        assert len(set(codecs)) == len(codecs), arguments


def test_seen_windows_are_those_of_all_files_of_the_same_text_and_length(tmp_path: Path) -> None:
    def file(name: str, texts: dict[str, Any], windows: int = 3) -> Path:
        path = tmp_path / name
        path.write_text(
            json.dumps({"rows": [{"windows": windows}], "texts": texts}), encoding="utf-8"
        )
        return path

    facts = {"sha256": "a", "windows_available": 300}
    files = [
        file(
            "places", {"x": {**facts, "places": [0, 233]}, "x, more": {**facts, "places": [0, 89]}}
        ),
        file("version 0.1.0", {"x": facts}),  # the first three
        file("another length", {"x": {**facts, "windows_available": 70, "places": [50]}}),
        file("another text", {"x": {**facts, "sha256": "b", "places": [51]}}),
    ]
    arguments = given(more=tuple(f"--unseen={f}" for f in files))
    assert _seen(arguments, facts) == {0, 1, 2, 89, 233}
    assert _seen(given(), facts) == set()


def test_unseen_windows_have_a_cluster_each_and_are_the_first_of_those_that_are_left() -> None:
    places = [0, 233, 89, 178, 34, 267]
    windows = [Window(i, (place, 1)) for i, place in enumerate(places)]
    left, facts = unseen(windows, {"places": places, "sha256": "a"}, {0, 233, 178}, 2)
    assert [w.tokens[0] for w in left] == facts["places"] == [89, 34]
    assert facts["unseen"] and facts["sha256"] == "a"
    blocks = blocks_of(facts["places"])
    assert all(0 <= w.index < len(blocks) for w in left)
    assert len({w.index for w in left}) == 2


def test_only_what_has_no_row_yet_on_some_text_is_fitted_ahead() -> None:
    arguments = _parser().parse_args(["--text=/texts/test", "--text=chat"])
    row = {"codec": "int", "mode": "decode", "length": 1024, "block": 1, "scored": 0, "batch": 16}
    had: Any = SimpleNamespace(document={"rows": [{**row, "text": "test"}]})
    assert Measuring.lacks(had, arguments, "int(bits=4)")
    had.document["rows"].append({**row, "text": "chat"})
    assert not Measuring.lacks(had, arguments, "int(bits=4)")
    assert Measuring.lacks(had, arguments, "int(bits=2)")
    arguments.scored = 128
    assert Measuring.lacks(had, arguments, "int(bits=4)")
