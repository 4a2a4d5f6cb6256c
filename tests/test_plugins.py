"""Another package adds one of each kind by entry points: the examples of CONTRIBUTING.md are that
package.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from assay import demo
from assay.plugins import GROUPS

ROOT = Path(__file__).parents[1]
FILES = dict(
    re.findall(
        r"^```(?:python|toml)\n# (\S+)\n(.*?)^```",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.M | re.S,
    )
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip leaves it, with one plug-in more that cannot be imported and one that fails
    when it is used.
    """
    folder = tmp_path_factory.mktemp("site")
    package = folder / "acme_assay"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, text in FILES.items():
        if name.endswith(".py"):
            (folder / name).write_text(text)
    (package / "broken.py").write_text("import no_such_package_anywhere\n")
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    points: dict[str, dict[str, str]] = project["entry-points"]
    points["assay.detectors"]["broken"] = "acme_assay.broken:detect"
    points["assay.reports"]["html"] = "acme_assay.report:render"  # a name of assay's own
    _install(folder, "acme_assay", project["version"], points)
    return folder


def _install(folder: Path, name: str, version: str, points: dict[str, dict[str, str]]) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    )
    (info / "RECORD").write_text(
        f"{name}/__init__.py,,\n"
    )  # by which a package's metadata is found
    lines = [
        f"[{group}]\n" + "".join(f"{n} = {t}\n" for n, t in of.items())
        for group, of in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


def search_path(site: Path) -> str:
    return os.pathsep.join(
        filter(None, (str(site), os.environ.get("PYTHONPATH"), str(ROOT / "src")))
    )


def assay(site: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """A command in a process of its own that has the package: exit code, the JSON,
    standard error.
    """
    done = subprocess.run(
        [sys.executable, "-m", "assay", *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env={**os.environ, "PYTHONPATH": search_path(site)},
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def active(report: dict[str, Any]) -> dict[str, str | None]:
    return {p["name"]: p["problem"] for p in report["environment"]["plugins"]}


def test_there_is_an_example_of_every_kind_and_none_is_long() -> None:
    laboratory = pytest.importorskip("assay_lab")
    points = tomllib.loads(FILES["pyproject.toml"])["project"]["entry-points"]
    assert set(points) == {*GROUPS, *laboratory.PLUGIN_GROUPS}
    assert {
        name: n for name, text in FILES.items() if (n := len(text.strip().splitlines())) > 20
    } == {}


def test_a_detector_and_one_that_cannot_be_imported(site: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The answer is Lorem ipsum dolor sit amet.")
    code, report, said = assay(site, "grade", str(text))
    assert code == 1
    assert (report["results"]["files"][0]["kind"], report["results"]["files"][0]["onset_char"]) == (
        "placeholder",
        14,
    )
    assert active(report)["placeholder"] is None
    assert report["findings"][0]["causes"] == ["a prompt template whose slots were not filled"]
    assert "no_such_package_anywhere" in str(active(report)["broken"])
    (line,) = said.splitlines()
    assert "'broken' (assay.detectors) of acme-assay 1.0 was left out: ModuleNotFoundError" in line
    assert report["environment"]["plugins"][0]["version"] == "1.0"


def test_a_report_format_by_its_name_and_none_in_place_of_assays(
    site: Path, tmp_path: Path
) -> None:
    text, csv, html = (tmp_path / name for name in ("text.txt", "out.csv", "out.html"))
    text.write_text("the " * 200)
    code, _, _ = assay(site, "grade", str(text), "--report", f"csv={csv}", "--html", str(html))
    assert code == 1
    assert csv.read_text().startswith("error,coherence.degenerate,")
    assert html.read_text().startswith("<!DOCTYPE html>")
    code, report, _ = assay(site, "grade", str(text), "--report", f"pdf={csv}")
    assert (code, report["findings"][0]["id"]) == (2, "coherence.usage")
    assert "csv" in report["findings"][0]["remedies"][0]


def test_a_parser(site: Path, tmp_path: Path) -> None:
    log = tmp_path / "acme.log"
    log.write_text(
        "".join(f"INFO acme-spec steps=100 drafted=300 accepted={200 + i}\n" for i in range(5))
    )
    code, report, _ = assay(site, "spec", str(log))
    assert (code, report["results"]["record"]["engine"]) == (0, "acme")
    assert report["results"]["record"]["accepted"] == 1010


def test_a_rule_and_one_that_fails_in_use(site: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    _, report, _ = assay(site, "verify", str(model), "--allow-unverified")
    assert "checkpoint.no_licence" in {f["id"] for f in report["findings"]}
    failing = tmp_path / "failing"
    failing.mkdir()
    _install(failing, "bad_assay", "2.0", {"assay.rules": {"bad": "bad_assay:rule"}})
    (failing / "bad_assay.py").write_text("def rule(checkpoint):\n    return 1 / 0\n")
    code, report, _ = assay(failing, "verify", str(model))
    assert (code, report["findings"][0]["id"]) == (2, "checkpoint.plugin")
    assert (
        "'bad' (assay.rules) of bad-assay 2.0 failed: ZeroDivisionError"
        in report["findings"][0]["title"]
    )


def test_a_verb_and_the_card_of_its_reports(site: Path, tmp_path: Path) -> None:
    text, html, stored = (tmp_path / name for name in ("note.txt", "out.html", "words.json"))
    text.write_text("three short words")
    code, report, _ = assay(site, "words", str(text), "--html", str(html))
    assert (code, report["command"], report["results"]) == (0, "words", {"words": 3})
    assert active(report)["words"] is None
    assert "3" in html.read_text()
    stored.write_text(json.dumps(report))
    code, report, _ = assay(site, "card", str(stored), "--out", str(tmp_path / "card"))
    assert code == 0, report
    shown = "".join(p.read_text() for p in (tmp_path / "card").iterdir() if p.suffix == ".md")
    assert "assay words note.txt" in shown
    code, report, _ = assay(site, "words", str(tmp_path / "missing.txt"))
    assert (code, report["findings"][0]["id"]) == (2, "server.usage")
    help = subprocess.run(
        [sys.executable, "-m", "assay", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": search_path(site)},
    ).stdout
    assert "Count the words of texts." in help


@pytest.mark.engine
def test_a_hook_of_vllm(site: Path, tmp_path: Path, smollm2: Path) -> None:
    model = shutil.copytree(smollm2, tmp_path / "acme")
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["AcmeForCausalLM"]  # which vLLM does not know by itself
    (model / "config.json").write_text(json.dumps(config))
    text = tmp_path / "text.txt"
    text.write_text(
        "a text that is long enough for a few windows of tokens, and then some more " * 40
    )
    shape = ("--text", str(text), "--windows", "8", "--length", "32", "--no-floors")
    small = "max_model_len=128&max_num_batched_tokens=512&kv_cache_gib=0.25"
    spec = f"vllm:{model}?python={demo.vllm_python()}&{small}"
    code, report, said = assay(site, "compare", str(smollm2), spec, *shape)
    assert code in (0, 1, 3), (report["findings"], said)
    assert report["results"]["ppl_reference"] > 1


@pytest.mark.engine
def test_a_codec(site: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    _, report, _ = assay(site, "kv", "list")
    assert "topbyte" in {c["name"] for c in report["results"]["codecs"]}
    source, stream, back = (
        tmp_path / name for name in ("x.safetensors", "x.stream", "back.safetensors")
    )
    save_file({"x": torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))}, source)
    code, report, _ = assay(
        site, "kv", "encode", str(source), "--codec", "topbyte", "--out", str(stream)
    )
    assert (code, report["results"]["codec"]) == (0, "topbyte")
    assert 1.8 < report["results"]["bytes"]["ratio"] < 2
    assert assay(site, "kv", "decode", str(stream), "--out", str(back))[0] == 0
    x, decoded = load_file(source)["x"], next(iter(load_file(back).values()))
    assert ((x.abs() / decoded.abs()).log2().abs() <= 2).all()
    assert assay(site, "kv", "encode", str(source), "--codec", "topbite", "--out", str(stream))[1][
        "findings"
    ][0]["remedies"] == ["did you mean 'topbyte'?"]


@pytest.mark.engine
def test_an_engine(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = tmp_path / "text.txt"
    text.write_text(
        "all work and no play makes a text that is long enough for a few windows of bytes " * 40
    )
    shape = ("--text", str(text), "--windows", "16", "--length", "64", "--no-floors")
    code, report, said = assay(site, "compare", "tilted:1", "tilted:1.001", *shape)
    assert code in (0, 3), said
    assert report["results"]["engine"]["spaces"] == pytest.approx(1.001)
    assert report["results"]["ppl_reference"] > 100
    assert active(report)["tilted"] is None


@pytest.mark.engine
def test_weights(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    spec = f"hf:{tmp_path / 'model'}?weights=zeroed(under=1.0)"
    code, report, _ = assay(site, "compare", spec, spec)
    assert (code, report["findings"][0]["remedies"]) == (2, ["options of zeroed are below"])
