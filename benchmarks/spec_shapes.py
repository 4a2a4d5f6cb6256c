"""How `assay spec` grows with the size of a source, over shapes that nobody's log has.

    python benchmarks/spec_shapes.py [MEGABYTES…]

Each shape is one short text again and again. For each size: seconds, peak MB and exit code of the
whole command. Linear means that four times the size takes about four times as long; 100 MB of any
shape must take under 60 s and 1 GB. A line begins with `!!` where it does not.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

V1 = (
    "INFO 10-11 08:30:00 [metrics.py:96] SpecDecoding metrics: Mean acceptance length: 2.30,"
    " Accepted throughput: 13.00 tokens/s, Drafted throughput: 20.00 tokens/s, Accepted: 130 tokens,"  # noqa: E501
    " Drafted: 200 tokens, Per-position acceptance rate: 0.800, 0.500, Avg Draft acceptance rate:"
    " 65.0%"
)
SHAPES = {
    "blanks": " ", "newlines": "\n", "returns": "\r", "tabs": "\t", "letters": "ab", "digits": "1",
    "nul": "\0", "braces": "{", "brackets": "[", "alternating": "[{", "keys": '{"a":',
    "empty lists": "[],", "escapes": '"\\u0061",', "quotes": '"', "pipes": "|", "bars": "| a | 1 |\n",  # noqa: E501
    "rulers": "|---|---|\n", "commas": ",", "csv": "draft acceptance rate,1\n", "dashes": "-",
    "colons": ":", "equals": "=", "percent": "acceptance rate: 61%\n", "lengths": "accept len: 2.1\n",  # noqa: E501
    "pairs": "drafted=9 accepted=4 ", "pair lines": "mtp drafted=9 accepted=4\n",
    "accept": "accept", "accepts": "accepted ", "seeds": "acc=", "ccs": "cc", "success": "success\n",  # noqa: E501
    "ansi": "\x1b[31m", "escape": "\x1b]", "v1": f"{V1}\n", "v1 in one line": V1,
    "v1 begun": "SpecDecoding metrics: Mean acceptance length: ", "v1 escaped": V1 + "\\n",
    "engine": "Engine 000: Avg generation throughput: 1.0 tokens/s, Running: 1 reqs\n",
    "v0": "Speculative metrics: Draft acceptance rate: 0.5, Number of draft tokens: 9, emitted\n",
    "sglang": "Decode batch, #running-req: 1, accept len: 2.30, accept rate: 0.40\n",
    "sglang in one line": "Decode batch, #running-req: 1, accept len: 2.30, ",
    "meta": "spec_verify_ct: 3 ", "llama": "draft acceptance = 0.5 (   5 accepted /   10 generated)\n",  # noqa: E501
    "statistics": "statistics draft: #calls(b,g,a) = 1 2 ", "eval": "eval time = 1 ms / 1 tokens ",
    "json lines": '{"draft_n": 9, "draft_n_accepted": 4}\n', "sse": 'data: {"draft_n": 9}\n\n',
    "summary": "Drafts: 9\nDraft tokens: 18\nAccepted tokens: 9\n", "position": "Position 0: 9.0\n",
    "prometheus": 'vllm:spec_decode_num_drafts_total{engine="0"} 5\n', "labels": 'a{x="',
    "series": 'vllm:request_success_total{a="1"} 5\n', "type": "# TYPE x counter\n",
    "config": "speculative_config=SpeculativeConfig(", "vocab": "draft vocab ", "prompt": "prompt: '",  # noqa: E501
    "params": "mtp not found in params_dict ", "depths": "d1=2/3 ", "of": "accepted 1 of 2 of ",
    "distribution": "distribution {1: 2%", "html": "<br>accept &#37;", "docker": '{"log":"accepted ',  # noqa: E501
    "journal": '{"MESSAGE": [1, 2, ', "compose": "a | accepted\n", "cjk": "的", "emoji": "👨‍👩",
    "latin-1": "\udcff", "random": "",
}  # fmt: skip


def write(path: Path, unit: str, size: int) -> None:
    """A file of `size` bytes made of `unit`; of random printable bytes where it is empty."""
    if not unit:
        data = os.urandom(size // 2).hex().encode()
    else:
        piece = unit.encode("utf-8", "surrogateescape")
        data = (piece * (size // len(piece) + 1))[:size]
    path.write_bytes(data)


def run(path: Path) -> tuple[float, int, int]:
    """(seconds, peak MB, exit code) of `assay spec` in a process of its own."""
    code = (
        "import resource, sys\nfrom assay.cli.main import main\nsys.argv = ['assay', 'spec',"
        f" {str(path)!r}]\nrc = 0\ntry:\n    rc = main() or 0\nexcept SystemExit as e:\n    rc ="
        " e.code or 0\nprint('PEAK', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, rc)"
    )
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    seconds = time.perf_counter() - began
    last = next((row for row in reversed(done.stdout.splitlines()) if row.startswith("PEAK")), "")
    _, peak, rc = last.split() if last else ("", "0", str(done.returncode))
    return seconds, int(peak), int(rc)


def main() -> None:
    """Print a line for each shape."""
    sizes = [float(a) for a in sys.argv[1:]] or [1, 4, 16, 100]
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, unit in SHAPES.items():
            row = []
            for size in sizes:
                path = Path(folder) / "source.log"
                write(path, unit, int(size * 2**20))
                row.append((size, *run(path)))
            (s0, t0, *_), (s1, t1, peak, _) = row[0], row[-1]
            steep = t1 > 3 and t1 - 0.5 > 2 * (s1 / s0) * max(t0 - 0.5, 0.1)
            wrong = steep or t1 > 60 or peak > 1024 or any(r[3] not in (0, 1, 2, 3) for r in row)
            bad += wrong
            cells = " ".join(f"{s:g} MB {t:.1f} s {p} MB exit {rc};" for s, t, p, rc in row)
            print(f"{'!!' if wrong else '  '} {name:20} {cells}", flush=True)
    print(
        f"{bad} of {len(SHAPES)} shapes break a bound; {resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime:.0f} s"  # noqa: E501
    )


if __name__ == "__main__":
    main()
