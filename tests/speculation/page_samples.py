"""Pages as people paste them, with what a person would read off them; all figures are made up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A page with its exit code and the figures that must be read from it; None where absent."""

    name: str
    text: str
    exit_code: int
    accepted: int | None = None
    drafted: int | None = None
    rate: float | None = None
    length: float | None = None
    first: float | None = None


SAMPLES = (
    Sample(
        "vLLM bench serve as bullets",
        """## Results, num_speculative_tokens = 3
* **Request throughput:** 4.1 req/s
* **Speculative decoding**
    * **Acceptance rate (%):** 58.20
    * **Acceptance length:** 2.75
    * **Per-position acceptance (%):**
        * Position 0: 78.1
        * Position 1: 56.3
        * Position 2: 40.2
""",
        0,
        rate=0.582,
        length=2.75,
        first=0.781,
    ),
    Sample(
        "SGLang bench_serving, one JSON object a line",
        '{"backend": "sglang", "request_rate": 4.0, "completed": 200, "accept_length": 2.91}\n'
        '{"backend": "sglang", "request_rate": 8.0, "completed": 200, "accept_length": 2.83}\n',
        0,
        length=2.87,
    ),
    Sample(
        "trtllm-bench",
        """===========================================================
= DECODING STATISTICS: EAGLE3
===========================================================
-- Acceptance Rate Details --------------------------------

[AR] MINIMUM: 1.62
[AR] MAXIMUM: 3.71
[AR] AVERAGE: 2.48
[AR] P50    : 2.41
[AR] P99    : 3.70
Output Token Throughput (tokens/sec): 1822.4
""",
        0,
        length=2.48,
    ),
    Sample(
        "AIPerf, drawn with boxes",
        """              NVIDIA AIPerf | LLM Metrics, EAGLE-3 draft model
┏━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━┳━━━━━━━━┳━━━━━━━━┓
┃                    Metric ┃    avg ┃    min ┃    max ┃    p99 ┃
┡━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━━━┩
│  Time to First Token (ms) │  41.20 │  20.11 │ 110.02 │ 104.80 │
│     Acceptance Length     │   2.64 │   1.80 │   3.90 │   3.81 │
│           (tokens/step)   │        │        │        │        │
│       Acceptance Rate (%) │  54.60 │  26.00 │  96.70 │  93.10 │
│      Request Count        │ 100.00 │    N/A │    N/A │    N/A │
└───────────────────────────┴────────┴────────┴────────┴────────┘
""",
        0,
        rate=0.546,
        length=2.64,
    ),
    Sample(
        "Spec-Bench",
        """============================== Task:  overall ==============================
#Mean accepted tokens:  3.88
Tokens per second:  98.42
Tokens per second for the baseline:  40.1
Speedup ratio:  2.45  (EAGLE-2 speculative decoding)
""",
        0,
        length=3.88,
    ),
    Sample(
        "EAGLE's own table",
        """| Method (LLaMA 8B) | MT-bench speedup | τ |
|:--|--:|--:|
| Vanilla decoding | 1.00x | - |
| EAGLE-2 | 2.61x | 3.97 |
| EAGLE-3 | 3.10x | 4.81 |
""",
        0,
        length=4.39,
    ),
    Sample(
        "a list with the length of every step",
        '{"model_id": "eagle3", "choices": [{"turns": ["hi"], "new_tokens": [9],'
        ' "accept_lengths": [1, 3, 2, 4, 1, 3, 2, 4, 3, 1, 2, 3, 4, 4, 2, 1, 3, 3, 4, 2]}]}\n',
        0,
        accepted=32,
        length=2.6,
    ),
    Sample(
        "MLX",
        "Speculative decoding with draft model Qwen-0.6B\nGeneration: 512 tokens, 71.2 tokens-per-sec\n"  # noqa: E501
        "Draft acceptance rate: 71.4% (365/511)\n",
        0,
        accepted=365,
        drafted=511,
    ),
    Sample(
        "exllama, Python reprs whose figures rise by chance",
        "".join(
            f"{{'job': Job #{i}, 'eos': True, 'new_tokens': {400 + i}, 'prompt_tokens': 9,"
            f" 'accepted_draft_tokens': {200 + 5 * i}, 'rejected_draft_tokens': {100 + i}}}\n"
            for i in range(4)
        ),
        0,
        accepted=830,
        drafted=1236,
    ),
    Sample(
        "a CSV of a dashboard",
        '"Time","Draft Acceptance Rate","Mean acceptance length"\n'
        "2026-10-01 10:00:00,0.55,2.40\n2026-10-01 10:01:00,0.57,2.50\n",
        0,
        rate=0.56,
        length=2.45,
    ),
    Sample(
        "Markdown with counts in two columns of runs",
        """| Area | Metric | BF16 | INT4 |
|---|---|---|---|
| Decode | Generation | `51.0 t/s` | `70.2 t/s` |
| MTP | Draft acceptance rate | **66.0%** (`660/1000`) | **60.0%** (`480/800`) |
""",
        0,
        accepted=1140,
        drafted=1800,
    ),
    Sample(
        "aligned with blanks",
        "draft model: llama-1b   speculative tokens: 4\n\n"
        "config      accepted tokens   drafted tokens   tok/s\n"
        "k=2         900               1400             55.1\n"
        "k=4         1000              2100             60.2\n"
        "total       1900              3500             57.0\n",
        0,
        accepted=1900,
        drafted=3500,
    ),
    Sample(
        "nested JSON with statistics",
        '{"summary": {"speculative_decoding": {"acceptance_length": {"average": 2.2, "min": 1.1,'
        ' "p99": 3.9}, "acceptance_rate": {"average": 0.41, "max": 0.9}}}}',
        0,
        rate=0.41,
        length=2.2,
    ),
    Sample(
        "prose",
        "With EAGLE-3 and vLLM the acceptance rate was 62.5%, and the mean acceptance length is 2.9"
        " tokens.\n",
        0,
        rate=0.625,
        length=2.9,
    ),
    Sample(
        "a weak draft as bullets",
        """**Speculative decoding, 40 prompts, k = 4**
- Acceptance rate: **6.1%**
  - Position 0: 20.2%, position 1: 3.1%, positions 2-3: 0.6% each
- Throughput: 5.1 tok/s
""",
        1,
        rate=0.061,
        first=0.202,
    ),
    Sample(
        "a dead draft as a table",
        "| engine | accepted draft tokens | draft tokens |\n|---|---|---|\n| vLLM MTP | 0 | 4200 |\n",  # noqa: E501
        1,
        accepted=0,
        drafted=4200,
    ),
)

UNRELATED = (
    "vllm speculative tokens\nGPU KV cache usage: 0.4%, Prefix cache hit rate: 12.0%, tokens: 4\n",
    "| fruit | price (EUR) | accepted |\n|---|---|---|\n| apple | 2.10 | 14 |\n| pear | 1.90 | 9 |\n",  # noqa: E501
    "| university | applicants | acceptance rate |\n|---|---|---|\n| A | 41,020 | 6.1% |\n| B | 900 | 71% |\n",  # noqa: E501
    "city;rain (mm);length of day (h)\nRome;12;9.2\nOslo;40;6.1\n",
    '{"orders": {"accepted": 40, "rejected": 12, "drafts": 9}, "rate": 0.4}',
    "| round | team | draft pick | position |\n|---|---|---|---|\n| 1 | Bears | 9 | 3 |\n| 2 | Lions | 41 | 1 |\n",  # noqa: E501
    "============ Serving Benchmark Result ============\nSuccessful requests: 1000\n"
    "Total generated tokens: 204113\nOutput token throughput (tok/s): 1893.11\n"
    "Mean TTFT (ms): 88.20\nMean TPOT (ms): 17.31\n",
    '{"backend": "vllm", "completed": 200, "total_output_tokens": 4100, "output_throughput": 55.0}',
    "Position 0: 45.2%\nPosition 1: 30.1%\nrate: 4\n",
    "epoch,train_loss,acceptance length,accept rate\n1,3.1,1.9,0.4\n2,2.8,2.1,0.45\n",
    "step 40 | loss 2.4 | draft acc_0 0.31 acc_1 0.22 | tokens per step 2.1\n",
)
