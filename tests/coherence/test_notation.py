"""Notation with a grammar of its own is text, plain, fenced, in a table or between prose; a salad
with digits is none.
"""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest

from assay.coherence.grading import Label, grade

R = random.Random(5)
SQUARE = [f"{c}{n}" for c in "abcdefgh" for n in range(1, 9)]


def token(*sizes: int) -> str:
    return ".".join(base64.urlsafe_b64encode(R.randbytes(n)).decode().rstrip("=") for n in sizes)


NOTATION = {
    "game": (
        '[White "A"]\n[Black "B"]\n\n1. d4 d5 2. c4 e6 3. Nc3 Nf6 4. cxd5 exd5 5. Bg5 Be7 6. e3 c6'
        " 7. Bd3 Nbd7 8. Qc2 O-O 9. Nf3 Re8 10. O-O Nf8 11. Rab1 a5 12. a3 Ng6 13. b4 axb4 14. axb4"
        " Bd6 15. b5 Bg4 16. bxc6 bxc6 17. Ne2 Bxf3 0-1"
    ),
    "game with clocks": " ".join(
        f"{n}. Nf3 {{[%clk 0:0{n}:58]}} {n}... d{n % 8 + 1} {{[%clk 0:0{n}:12]}}"
        for n in range(1, 12)
    ),
    "moves": (
        "position startpos moves "
        + " ".join(R.choice(SQUARE) + R.choice(SQUARE) for _ in range(40))
    ),
    "positions": (
        "r1bqkb1r/pppp1ppp/2n2n2/4p3/2B1P3/5N2/PPPP1PPP/RNBQK2R w KQkq - 4"
        " 4\n8/5pk1/6p1/7p/3R3P/6P1/r4PK1/8 w - - 0"
        " 41\nrnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1"
    ),
    "tune": (
        "X:7\nT:Lullaby\nM:6/8\nK:G\nD | G2A B2c | d2B G2B | A2F D2F | G3-G2D | G2A B2c | d2B G2B |"
        " c2A F2A | G3-G2 :|\nd | g2f e2d | c2B A2G | F2G A2B | c3-c2d | g2f e2d | c2B A2G | B2G"
        " F2A | G3-G2 |]"
    ),
    "tune with graces": (
        "X:1\nT:A reel\nM:4/4\nK:Emin\n|:D2|EB{c}BA B2 EB|~B2 AB dBAG|FDAD BDAD|FDAD dAFD|\nEBBA B2"
        " EB|B2 AB defg|afe^c dBAF|DEFD E2:|\n|:gf|eB B2 efge|eB B2 gedB|A2 FA DAFA|A2 FA defg|"
    ),
    "proof": (
        "theorem add_comm (a b : ℕ) : a + b = b + a := by\n  induction a with\n  | zero => simp\n"
        "  | succ n ih => rw [Nat.succ_add, ih, Nat.add_succ]"
    ),
    "molecules": (
        "CC(C)NCC(O)COC1=CC=C(C=C1)CC(=O)N\nCN1CCC[C@H]1C2=CN=CC=C2\nO=C(O)C[C@H](N)C(=O)O\nClC1=CC=C(C=C1)C(=O)N2CCOCC2\n"
        "CC1(C)SC2C(NC(=O)Cc3ccccc3)C(=O)N2C1C(O)=O\nN#CC1=CC=CC=C1\nCCN(CC)CC\nc1ccc2c(c1)ccc3c2cccc3"
    ),
    "token": token(27, 90, 32),
    "long token": token(60, 400, 256),
    "block": base64.b64encode(R.randbytes(300)).decode(),
    "hashes": "\n".join(f"{R.randbytes(32).hex()}  file{n}.bin" for n in range(8)),
    "commits": " ".join(R.randbytes(4).hex()[:7] for _ in range(40)),
    "addresses": "\n".join(
        ":".join(f"{R.randrange(65536):x}" for _ in range(8)) for _ in range(10)
    ),
    "machine": "\n".join(
        f"G1 X{R.uniform(0, 200):.3f} Y{R.uniform(0, 200):.3f} E{R.uniform(0, 9):.5f}"
        for _ in range(25)
    ),
    "cube": (
        "R U R' U' R' F R2 U' R' U' R U R' F' L' B2 D' F2 U R2 B' L D2 R U' F2 B L2 D' U2 R B' D L"
        " U' R2 F' U L'"
    ),
    "chords": (
        "C G Am F | C G F C\nAm Em F C | Dm7 G7 Cmaj7 A7\nDm G C Am | F G C C\nBm7b5 E7 Am7 D7 |"
        " Gsus4 G C F/C C"
    ),
    "game of go": (
        "(;GM[1]FF[4]SZ[19]"
        + "".join(
            f";{'BW'[n % 2]}[{R.choice('abcdefghi')}{R.choice('abcdefghi')}]" for n in range(30)
        )
    ),
    "stitches": (
        "Row 1: k2, p2, k2, yo, k2tog, p2, k2\nRow 2: p2, k2, p4, k2, p2\nRow 3: k2, p2, ssk, yo,"
        " k2, p2, k2\nRow 4: k1, m1l"
    ),
    "reactions": (
        "2H2 + O2 -> 2H2O\nCH4 + 2O2 -> CO2 + 2H2O\n2Na + Cl2 -> 2NaCl\nCaCO3 -> CaO + CO2\nFe2O3 +"
        " 3CO -> 2Fe + 3CO2"
    ),
    "json in a string": (
        "cloud notify create-rule \\\n    --rule-name OrdersToAudit \\\n    --policy "
        + json.dumps(
            json.dumps(
                {
                    "Version": "2020-01-01",
                    "Statement": [
                        {
                            "Effect": "Allow",
                            "Principal": {"Svc": ["arn:aws:iam::000011112222:role/OrderWriter"]},
                            "Action": ["q:SendMsg", "q:GetUrl"],
                            "Resource": f"arn:aws:sqs:eu-west-1:000011112222:orders-{n}/*",
                        }
                        for n in range(4)
                    ],
                }
            )
        )
    ),
    "cursor": (
        '        "cursor":'
        ' "arn:aws:dynamodb:eu-west-1:000011112222:table/Songs/stream/2020-01-02T03:04:05.678|1|'
        + base64.b64encode(R.randbytes(300)).decode()
        + '"'
    ),
    "stack machine": (
        "(module (func $add (param $a i32) (param $b i32) (result i32) local.get $a local.get $b"
        ' i32.add) (export "add" (func $add)))'
    ),
    "colours": (
        "#ff0000 #00ff7f #1e90ff #ffd700 #8a2be2 #dc143c #00ced1 #ff8c00 #2e8b57 #6a5acd #b22222"
        " #20b2aa"
    ),
    "serials": " ".join(
        "-".join("".join(R.choices("ABCDEFGHJK23456789", k=5)) for _ in range(2)) for _ in range(20)
    ),
}


@pytest.mark.parametrize("text", NOTATION.values(), ids=NOTATION)
def test_notation_is_left_alone(text: str) -> None:
    rows = "\n".join(f"| {n} | {line} |" for n, line in enumerate(text.split("\n")))
    for written in (
        text,
        f"Here it is:\n\n```\n{text}\n```\n",
        (
            f"This is what you asked for, in the usual notation.\n\n{text}\n\nLet me know if"
            " anything is unclear.\n"
        ),
        f"| no | what |\n|---|---|\n{rows}",
    ):
        for finish_reason in (None, "stop"):
            result = grade(written, finish_reason=finish_reason)
            assert result.label is Label.OK, result


@pytest.mark.parametrize("seed", range(6))
def test_salads_with_digits_and_marks_are_found(seed: int) -> None:
    rng = random.Random(seed)
    common = [
        "the",
        "and",
        "I",
        "The",
        "but",
        "So",
        "Okay",
        "This",
        ".",
        ",",
        ")",
        "\n\n",
        "wh",
        "ed",
    ]
    pieces = [
        str(rng.randrange(10 ** rng.randint(1, 6))) if rng.random() < 0.45 else rng.choice(common)
        for _ in range(160)
    ]
    assert (
        grade("".join((" " if rng.random() < 0.4 else "") + p for p in pieces)).label
        is Label.DEGENERATE
    )


def test_the_same_few_codes_again_are_no_list_of_codes() -> None:
    text = (
        "The light is more like).\n1011. 1011. 10011. 10011. "
        + "I0011. I00011. I0011. " * 4
        + "10011. 10011. I0011. 1"
    )
    assert grade(text, finish_reason="length").label is Label.DEGENERATE


DOCUMENTS = {
    "changelog": (
        "## 0.21.1\n\n### Added\n\n"
        + "".join(
            f"- {what} ([#{n}](https://github.com/owner/dot-env/pull/{n}) by [@{who}])\n"
            for n, (what, who) in enumerate(
                [
                    ("Use Python 3.11 non-beta in CI", "bbc2x"),
                    ("Modernize `main.py` and `parser.py`", "Nougat-Waffle"),
                    ("Read `~/.config/app/env.d/*.toml`", "QWERTIOX"),
                    ("Accept `--no-cache-dir=PATH`", "JoachimCoenen"),
                    ("Wheels for `linux_x86_64` and `win-arm64`", "HaoZeke"),
                    ("Drop `setup.cfg`", "lsmith77"),
                ],
                438,
            )
        )
    ),
    "badges": (
        '<h1 align="center">\n<img'
        ' src="https://raw.githubusercontent.com/owner/pkg/main/branding/logo/primary/logo.svg"'
        ' width="300">\n</h1><br>\n\n'
        + "".join(
            f"[![{name}](https://img.shields.io/badge/{name}%20by-{tint}.svg?style=flat&colorA=E1523D&colorB=007D8A)](\n{home})\n"
            for name, tint, home in [
                ("Powered", "NumFOCUS-orange", "https://numfocus.org"),
                ("PyPI", "v2.4-blue", "https://pypi.org/project/pkg/"),
                ("Conda", "dn-conda--forge", "https://anaconda.org/conda-forge/pkg"),
                ("Docs", "latest-ok", "https://docs.example.org"),
                (
                    "OpenSSF",
                    "score-7.8",
                    "https://api.securityscorecards.dev/projects/github.com/owner/pkg",
                ),
            ]
        )
    ),
    "report": (
        "Compared with `bf16`, **`fp8(scale=head)`** costs +0.42 % [+0.26, +0.58] of perplexity on"
        " SmolLM2-135M at 2.00×, KL 0.0073 [0.0071, 0.0076]; `int(bits=4,group=32)` +0.27 % [+0.07,"
        " +0.47] at 2.99×, with 3.6 MB of tables 1.94× at 1k and 7.22× at 8k.\nOn"
        " Qwen2.5-Coder-1.5B it is +106 % [+94, +119], top-1 65.3 % (see"
        " [below](#why-no-scale-saves-fp8-on-qwen25-coder-15b)); Qwen2.5-Coder-0.5B +1.34 % [+1.05,"
        " +1.63], p95 12 ms against 9 ms [8.4, 9.7], n = 24,528.\n"
    ),
    "derivation": (
        "With mean μ, metric M = LLᵀ (an error e costs eMeᵀ) and covariance Σ of the samples, LᵀΣL"
        " = UΛUᵀ; x = μ + Δ c UᵀL⁻¹. For keys M is the second moment of the queries, for values the"
        " Gram matrix of the output projection.\n"
    ),
    "grammar": (
        "params: '(' [arglist] ')'\narglist: (argdef ['=' test] (',' argdef ['=' test])* [',' ['*'"
        " [argdef]\n   (',' argdef ['=' test])* [',' '**' argdef]]]\n   | '*' [argdef] (',' argdef"
        " ['=' test])* [',' '**' argdef] | '**' argdef)\nargdef: NAME [':' test]\nstmt: expr (augop"
        " (yexpr|testlist) | ('=' (yexpr|starlist))*)\naugop: ('+=' | '-=' | '*=' | '@=' | '/=' |"
        " '%=')"
    ),
    "signature": (
        ".. autoclass:: wire.kinds.OctetField(value=NoDefault(), tagSet=TagList(),"
        " subKinds=KindUnion(), hexValue=NoDefault(),\n   binValue=NoDefault(),"
        " encoding='us-ascii')\n   :members: hasValue, isSameKindWith, isWiderThan, tagSet,"
        " subKinds, namedBits"
    ),
    "templates": (
        "{{< entries.inline >}}\n{{ range $key := $.Site.Data.entries -}}\n  <h2>{{ $key.title"
        " }}</h2>\n  {{ range $i, $item := $key.items -}}\n    {{- $n := len $key.items -}}\n    {{"
        " if (eq $i 0) }}<div>{{ end }}\n    {% if item.on %}{{ item.name | upper }}{% endif %}\n "
        " {{ end -}}\n{{ end -}}\n{{< /entries.inline >}}\n"
    ),
    "rule of quotes": (
        "Links between two libraries that need each other\n"
        + '"' * 48
        + "\n\nA linker reads its files once, from left to right.\n"
    ),
    "box in a comment": (
        "The pending calls are printed as a table:\n\n```js\n//"
        " ┌─────────┬──────────┬───────────────────────┬──────┐\n// │ (index) │  Method  │       "
        " Origin         │ Path │\n// ├─────────┼──────────┼───────────────────────┼──────┤\n// │  "
        "  0    │  'GET'   │ 'https://example.com' │ '/'  │\n//"
        " └─────────┴──────────┴───────────────────────┴──────┘\n```\n"
    ),
    "model cards": "".join(
        f"- [{who}/{name}](https://huggingface.co/{who}/{name}): as `{name}.gguf`\n"
        for who, name in [
            ("yuhuili", "EAGLE3-LLaMA3.1-Instruct-8B"),
            ("RedHatAI", "gemma-4-31B-it-speculator.eagle3"),
            ("unsloth", "SmolLM2-135M-Instruct-GGUF"),
            ("bartowski", "Qwen3-30B-A3B-Q4_K_M"),
            ("lmsys", "sglang-EAGLE-Qwen2-7B"),
        ]
    ),
}
DENSE = {
    "style": (
        ".card{display:inline-flex;padding:.25rem"
        " 1.5rem;margin-top:0;font-size:.875rem;line-height:1.4;border:2px solid "
        "transparent;border-radius:.5rem;transition:color .2s ease,opacity .2s"
        " linear}.card:focus{color:#1a2b3c;outline:none}"
        ".card-main{color:#eee;background-color:#0a84ff;border-color:#0a84ff}"
    ),
    "query": (
        "query { project { slug issues(last: 20, sortBy: {key: CREATED_AT, order: ASC}) { nodes {"
        " idWithOwner labelCount mainRef { object { ... on Change { log(last: 5) { edges { node {"
        " writtenAt } } } } } } } } } }"
    ),
    "one line of awk": (
        'awk \'BEGIN{FS=OFS=";"} NR>2 && $4!~/^%/ {s[$2]+=$5; c[$2]++} END{for(i in s) printf'
        ' "%s;%.3f\\n", i, s[i]/c[i]}\' x.csv'
    ),
    "one line of perl": (
        "perl -F, -lane 'print join \"|\", @F[1,3..5] if $F[2] =~ /^[a-f]{3}\\d+$/ && $. > 2'"
        " in.csv | sort -t, -k3,3n | uniq -d"
    ),
    "graph": (
        'digraph N { rankdir=TB; s0 -> s1 [label="a/1"]; s1 -> s2 [label="b/0"]; s2 -> s0'
        ' [style=dotted]; s2 -> s3; s3 -> s3 [label="c/1"]; }'
    ),
    "schema": (
        "message Order { string ref = 1; int64 sum = 2; enum State { OPEN = 0; PAID = 1; SENT = 2;"
        " } message Line { string sku = 1; State state = 2; } repeated Line lines = 3; }"
    ),
    "files": (
        ".\n├── app\n│   ├── views.py\n│   ├── urls.py\n│   └── forms\n│       ├── base.py\n│      "
        " └── user.py\n├── conf\n│   └── dev.ini\n├── Makefile\n└── NOTES.md\n"
    ),
    "board": (
        "r . b q k . . r\np p p . . p p p\n. . n . . n . .\n. . b . p . . .\n. . B . P . . .\n. . N"
        " . . N . .\nP P P . . P P P\nR . B Q K . . R\n"
    ),
    "elements": (
        "Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo"
        " Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi"
    ),
    "variants": (
        "NM_000492.4:c.1521_1523del p.(Phe508del); NM_000546.6:c.818G>A p.(Arg273His);"
        " NM_007294.4:c.181T>G p.(Cys61Gly); NM_000249.4:c.350C>T p.(Thr117Met)"
    ),
}
ROOT = Path(__file__).parents[2]
PAGES = [
    page for docs in (ROOT / "docs", ROOT / "lab" / "docs") for page in sorted(docs.rglob("*.md"))
]


@pytest.mark.parametrize("text", DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_of_links_code_names_and_figures_are_left_alone(text: str) -> None:
    prose = (
        "Everything below was measured again, and what could not be measured is named with its"
        " command.\n\n"
    )
    for written in (text, prose + text, text * 2):
        result = grade(written)
        assert result.label is Label.OK, result


@pytest.mark.parametrize("text", DENSE.values(), ids=DENSE)
def test_dense_code_and_rows_of_symbols_are_left_alone(text: str) -> None:
    for written in (text, f"Here it is:\n\n```\n{text}\n```\n"):
        for finish_reason in (None, "stop"):
            assert grade(written, finish_reason=finish_reason).label is Label.OK, written[:40]


def test_salads_whose_brackets_close_at_random_are_found() -> None:
    words = (
        "qu",
        "nof",
        "tre",
        "ab1",
        "zem",
        "7ok",
        "uvi",
        "pha",
        "gro",
        "3x",
        "ost",
        "vel",
        "mik",
        "fan",
        "5u",
        "lor",
    )
    pieces = [*words, "(", ")", "[", "]", "{", "}", "(", "]"]
    text = " ".join(R.choice(pieces) for _ in range(90))
    assert grade(text).label is Label.DEGENERATE


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_pages_dense_with_figures_are_left_alone(page: Path) -> None:
    assert grade(page.read_text(encoding="utf-8")).label is Label.OK


@pytest.mark.parametrize("seed", range(4))
def test_a_salad_that_wears_links_and_code_is_found(seed: int) -> None:
    rng = random.Random(seed)
    worn = [
        "`bits=4`",
        "[below](#why)",
        "https://example.org/a/b",
        "2.99×",
        "[+0.26, +0.58]",
        "@someone",
        "v1.2.3",
    ]
    pieces = [
        "wh",
        "ing",
        "ed",
        "tion",
        "The",
        "M",
        "Okay",
        "str",
        "uous",
        "is",
        "pre",
        "ä",
        ")",
        "So",
        "lf",
        "qu",
    ]
    text = "".join(
        (
            f" {rng.choice(worn)} "
            if rng.random() < 0.1
            else rng.choice(pieces) + (" " if rng.random() < 0.5 else "")
        )
        for _ in range(220)
    )
    assert grade(text).label is Label.DEGENERATE
