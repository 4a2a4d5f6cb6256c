"""What every verb prints by default fits on one screen: 40 lines of 100 columns, on real inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from assay.cli.main import invoke
from tiny_target import make_target

CASES = Path(__file__).parents[3] / "shared" / "cases"
SOME = ("--windows", "4", "--length", "48", "--batch", "2")
RUNS = {
    "grade": ("grade", "{texts}/good.txt", "{texts}/bad.txt"),
    "verify": ("verify", "{model}"),
    "verify --values": ("verify", "{model}", "--values"),
    "doctor --lint": (
        "doctor",
        "--lint",
        "--",
        "vllm",
        "serve",
        "{model}",
        "--kv-cache-dtype",
        "fp8",
    ),
    "reference": (
        "reference",
        "{model}",
        "--out",
        "{out}/ref",
        "--text",
        "{texts}/text.txt",
        *SOME,
    ),
    "compare": (
        "compare",
        "{model}",
        "{model}?dtype=bfloat16",
        "--text",
        "{texts}/text.txt",
        *SOME,
    ),
    "kv list": ("kv", "list"),
    "kv eval": (
        "kv",
        "eval",
        "{model}",
        "--codec",
        "int(bits=2)",
        "--text",
        "{texts}/text.txt",
        *SOME,
    ),
    "kv sweep": (
        "kv",
        "sweep",
        "{model}",
        *(f"--codec=int(bits={b},group={g})" for b in (2, 3, 4, 6) for g in (4, 8, 16)),
        "--text",
        "{texts}/text.txt",
        *SOME,
    ),
    "kv noise": ("kv", "noise", "{model}", "--each", "layer", "--text", "{texts}/text.txt", *SOME),
    "kv attribute": (
        "kv",
        "attribute",
        "{model}",
        "--codec",
        "int(bits=2)",
        "--text",
        "{texts}/text.txt",
        *SOME,
    ),
    "kv diagnose": (
        "kv",
        "diagnose",
        "{model}",
        "--codec",
        "int(bits=2)",
        "--text",
        "{texts}/text.txt",
        *SOME,
    ),
    "kv calibrate": (
        "kv",
        "calibrate",
        "{model}",
        "--out",
        "{out}/c.st",
        "--text",
        "{texts}/text.txt",
        *SOME[:4],
    ),
    "gap": ("gap", "{model}", "{model}?dtype=bfloat16", "--text", "{texts}/text.txt", *SOME),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    texts = tmp_path_factory.mktemp("texts")
    (texts / "good.txt").write_text(
        "The cat sat on the mat, and looked at the rain until the sun came out again."
    )
    (texts / "bad.txt").write_text("It is " + "very " * 400)
    (texts / "text.txt").write_text(
        "".join(f"Line {i} says that {i * i % 97} of {i + 3} are red. " for i in range(400))
    )
    return {
        "texts": texts,
        "out": tmp_path_factory.mktemp("out"),
        "model": make_target(tmp_path_factory.mktemp("model"), layers=12),
    }


def shown(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    monkeypatch.setenv("COLUMNS", "100")
    code = invoke(arguments)
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.engine] if "--text" in words else [])
        for n, words in RUNS.items()
    ],
)
def test_what_a_verb_prints_fits_on_one_screen(
    name: str,
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    code, out = shown([word.format(**places) for word in RUNS[name]], monkeypatch, capsys)
    lines = out.rstrip("\n").split("\n")
    assert code in (0, 1, 3), out
    assert lines[0].split()[0] in ("PASS", "FAIL", "INCONCLUSIVE"), out
    assert len(lines) <= 40 and max(map(len, lines)) <= 100, out


@pytest.mark.skipif(not CASES.is_dir(), reason="the cases are not beside the repository")
def test_cases_of_users_fit_on_one_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        ["grade", str(p)]
        for p in sorted(CASES.glob("field/*"))
        if p.suffix in (".txt", ".json", ".ndjson")
    ]
    runs += [
        ["spec", str(p)]
        for p in sorted(CASES.glob("spec_logs/*"))
        if p.is_file() and p.suffix != ".md"
    ]
    for arguments in runs:
        code, out = shown(arguments, monkeypatch, capsys)
        lines = out.rstrip("\n").split("\n")
        assert code in (0, 1, 2, 3) and len(lines) <= 40 and max(map(len, lines)) <= 100, (
            arguments,
            out,
        )
