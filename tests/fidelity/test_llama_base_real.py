"""llama.cpp's own llama-perplexity writes a file that assay reads, and reads one that
assay wrote.
"""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from assay.engines.gguf.scorer import GgufScorer
from assay.engines.scoring import LogitRows, ScoreJob
from assay.fidelity.llama_base import BaseFile, open_base, write_base
from assay.fidelity.metrics.token_statistics import window_statistics
from assay.fidelity.text.sources import read_text
from assay.fidelity.windows import Cut, cut_windows
from assay.runs import cache_dir
from llama_cpp_package import require_llama_cpp

pytestmark = [pytest.mark.engine, pytest.mark.llama]

CUT = Cut(length=64, protocol="second-half")
WINDOWS = 2


@pytest.fixture(scope="module")
def gguf_file(smollm2: Path) -> Path:
    require_llama_cpp()
    return next(cache_dir("gguf").glob("smollm2/*.gguf"))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(read_text().text[2000:4000], encoding="utf-8")
    return path


def llama_perplexity(gguf_file: Path, *arguments: str) -> str:
    program = cache_dir("llama.cpp") / "bin" / "llama-perplexity"
    if not program.exists():
        pytest.skip("llama-perplexity is missing: run benchmarks/build/build_llama_cpp.sh")
    command = [
        str(program),
        "-m",
        str(gguf_file),
        "-c",
        str(CUT.length),
        "--chunks",
        str(WINDOWS),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def theirs(
    gguf_file: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[BaseFile, float]:
    """The file that llama-perplexity writes, and the perplexity that it prints."""
    path = tmp_path_factory.mktemp("base") / "theirs.kld"
    printed = llama_perplexity(gguf_file, "-f", str(text_file), "--kl-divergence-base", str(path))
    found = re.search(r"PPL = ([\d.]+)", printed)
    assert found
    return open_base(path), float(found[1])


def test_reads_what_llama_perplexity_wrote(
    theirs: tuple[BaseFile, float], gguf_file: Path, text_file: Path
) -> None:
    base, perplexity = theirs
    engine = GgufScorer.load(f"gguf:{gguf_file}")
    ids = engine.tokenizer.encode(text_file.read_text(encoding="utf-8"))
    windows = cut_windows(ids, CUT, engine.tokenizer.bos_id, WINDOWS)
    assert base.windows(engine.tokenizer.bos_id) == tuple(windows)
    assert base.vocab_size == engine.tokenizer.vocab_size
    assert base.scored_from == CUT.scored_from

    rows = list(engine.score_windows(windows, ScoreJob(scored_from=CUT.scored_from)))
    engine.close()
    seen = [
        window_statistics(ref, cand) for ref, cand in zip(base.rows(windows), rows, strict=True)
    ]
    nll = np.concatenate([s.nll_ref.numpy() for s in seen])
    assert math.exp(nll.mean()) == pytest.approx(perplexity, rel=1e-3)
    # Two builds of llama.cpp: their kernels round activations to 8 bits at slightly different
    # values.
    assert 0 <= np.concatenate([s.kl.numpy() for s in seen]).mean() < 0.02


def test_llama_perplexity_reads_what_assay_wrote(
    theirs: tuple[BaseFile, float], gguf_file: Path, tmp_path: Path
) -> None:
    """Both tools compare the same two sets of log-probabilities and must find the same KL and log
    ratio.
    """
    import torch

    base, _ = theirs
    windows = base.windows(None)
    engine = GgufScorer.load(f"gguf:{gguf_file}")
    job = ScoreJob(scored_from=CUT.scored_from)
    ours = write_base(tmp_path / "ours.kld", windows, engine.score_windows(windows, job))
    engine.close()
    printed = llama_perplexity(gguf_file, "--kl-divergence-base", str(ours.path), "--kl-divergence")
    # chunk, PPL ± error, ln(PPL(Q)/PPL(base)) ± error, KL divergence ± error, Δp RMS ± error %,
    # same top p ± error %. Below 100 tokens there is no summary, only this running line.
    last = re.findall(r"^\s+\d+\s+[\d.]+ ± .*%$", printed, re.MULTILINE)[-1]
    _, _, _, log_ratio, _, kld, *_, same_top, _ = map(float, re.findall(r"-?\d+\.?\d*", last))

    # llama.cpp's own sum, from both files: terms with log p ≤ −16 are left out, nothing is
    # normalised again.
    log_p, log_q = (
        np.concatenate([f.log_probs(i).astype(np.float64) for i in range(WINDOWS)])
        for f in (ours, base)
    )
    p = np.where(log_p > -16, np.exp(log_p), 0.0)
    gold = np.concatenate([w.tokens[CUT.scored_from :] for w in windows])
    rows = np.arange(len(gold))
    assert (p * (log_p - log_q)).sum(1).mean() == pytest.approx(kld, abs=2e-5)
    assert (log_p - log_q)[rows, gold].mean() == pytest.approx(log_ratio, abs=2e-5)
    assert 100 * (log_p.argmax(1) == log_q.argmax(1)).mean() == pytest.approx(same_top, abs=0.01)

    # assay's, which counts every term that the file tells apart. Between windows of 64 tokens the
    # terms that llama.cpp leaves out hold some 5e-4 of the mass.
    candidate = [
        LogitRows(w, CUT.scored_from, torch.from_numpy(base.log_probs(w.index))) for w in windows
    ]
    seen = [
        window_statistics(ref, cand)
        for ref, cand in zip(ours.rows(windows), candidate, strict=True)
    ]
    raised = np.log(
        np.exp(log_q).sum(1)
    ).mean()  # the candidate's made-up tail, which normalising takes away again
    assert np.concatenate([s.kl.numpy() for s in seen]).mean() - raised == pytest.approx(
        kld, abs=5e-4
    )
