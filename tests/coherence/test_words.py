"""Words without grammar, and stray pieces of other scripts: found; lists, lessons and names: left
alone.
"""

from __future__ import annotations

import random
import re
from pydoc_data.topics import topics

import pytest

from assay.coherence.grading import Label, grade

PROSE = (
    "The town lies on a slow river between low hills. In the old quarter the houses lean towards"
    " each other and the market opens before dawn. People come from the villages with cheese, eggs"
    " and wool, and they stay until the last bus leaves in the afternoon. The bridge was built by"
    " the monks, who needed a way to their mill. In summer children swim under its arches, while in"
    " winter the water freezes and the ducks walk on the ice. Nobody knows how old it is. "
)
HAN = ["的", "城市", "了", "在", "音乐", "可以", "人们", "时间"]
MANY = ["的", "ของ", "мини", "한국", "の", "في", "για", "साथ"]
VOCABULARY = sorted(set(re.findall(r"[a-z]{4,}", " ".join(topics.values()).lower())))


def strewn(seed: int, pool: list[str], glued: float) -> str:
    rng = random.Random(seed)
    words = (2 * PROSE).split(" ")
    for place in sorted(rng.sample(range(5, len(words) - 5), 9), reverse=True):
        piece = rng.choice(pool)
        if rng.random() < glued:
            words[place] += piece
        else:
            words.insert(place, piece)
    return " ".join(words)


def rare(seed: int) -> str:
    rng = random.Random(seed)
    out = []
    for _ in range(70):
        word = rng.choice(VOCABULARY)
        word = word.title() if rng.random() < 0.15 else word
        out.append(
            word
            + (
                rng.choice(["(\n", ")*(", "*/", "-", ";", "](", "//"])
                if rng.random() < 0.08
                else ""
            )
        )
    return " ".join(out)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("pool", "glued"), [(MANY, 0.4), (HAN, 0.6), (HAN, 0.0)])
def test_strays_of_another_script_are_found(seed: int, pool: list[str], glued: float) -> None:
    assert grade(strewn(seed, pool, glued)).kind == "mixed_scripts"


def test_salads_of_rare_words_are_found() -> None:
    """All but one of six, alone and after prose: the words are those of Python's own help, another
    list in each release.
    """
    alone = [grade(rare(seed)).label is Label.DEGENERATE for seed in range(6)]
    after = [grade(PROSE + rare(seed + 100)) for seed in range(6)]
    found = [r.label is Label.DEGENERATE and (r.onset_char or 0) > len(PROSE) - 60 for r in after]
    assert sum(alone) >= 5 and sum(found) >= 5


def test_salads_between_names_marks_and_code_are_found() -> None:
    for text in (
        (
            "Okay gravel Monaco velvet Duke cruel trailing pillow} envelope Synod harvest"
            " Quebec::torn plume Basket<<\nwidow lattice(Governor strain Baltic pending mosaic));"
            " cleric Orbit tissue ninety vapour Kept domain swirl Mesa juror\n*/ pardon Rhyme tusk"
            " census Elm fabric yolk Prince -- inert magnet Polo bracket Feast nomad chrome\n"
        ),
        (
            "Well Lisbon cabbage orbit Thunder; polite hammer Knight](\n-ochre window Castle sudden"
            " herring Parade velvet mortal){ Sugar branch Denmark hollow pepper Signal quarrel"
            " Lemon basin tailor\nMarble lobster Chapel wrinkle Ocean gospel ticket Falcon cotton"
            " Mirror pigeon\n"
        ),
    ):
        assert grade(text).kind == "word_salad", grade(text)


LEFT_ALONE = {
    "one word in many tongues": (
        "The word for bread is パン (pan) in Japanese, 빵 in Korean, хлеб in Russian, خبز in Arabic"
        " and ψωμί in Greek."
    ),
    "many tongues, named before": (
        "Bread in five languages. Japanese: パン, Korean: 빵, Russian: хлеб, Arabic: خبز, Greek:"
        " ψωμί."
    ),
    "lesson": (
        "The particle は marks the topic, while が marks the subject. Use を for the direct object"
        " and に for the place. The particle で marks where an action happens, and へ the"
        " direction. With と you join two nouns, and も means also."
    ),
    "names": (
        "The film was directed by Wong Kar-wai (王家衛) and stars Tony Leung (梁朝偉) and Maggie"
        " Cheung (張曼玉). The title, 花樣年華, comes from a song by Zhou Xuan (周璇)."
    ),
    "letters": (
        "Let the angles be α and β. If λ is an eigenvalue of the matrix, then its inverse has the"
        " eigenvalue 1/λ. The golden ratio is written φ, the circle constant π and the frequency ω,"
        " while ε stands for a small error."
    ),
    "greetings": (
        "- Chinese: 你好\n- Japanese: こんにちは\n- Korean: 안녕하세요\n- Russian: Привет\n-"
        " Arabic: مرحبا\n- Thai: สวัสดี\n"
    ),
    "technical chinese": (
        "我们用 Python 写了一个 API 服务，部署在 Kubernetes 上，用 Redis 做缓存，用 PostgreSQL 存数据。"  # noqa: E501
    ),
    "comments": (
        "def load(path):\n    # 读取文件 and 返回列表\n    data = open(path).read()\n    # 分割"
        " line 并去掉空行\n    return data\n"
    ),
    "word list": (
        "apple\nriver\nstone\nladder\nmarket\nwindow\ncandle\nbutter\ngarden\nmirror\npocket\nsilver\nthunder\nvelvet\n"
        "walnut\nyellow\nanchor\nbasket\ncopper\ndragon\nengine\nforest\nguitar\nhammer"
    ),
    "ingredients": (
        "You need:\n"
        + "".join(
            f"- {n} g {a} {b}\n"
            for n, (a, b) in enumerate(
                [
                    ("chopped", "shallots"),
                    ("smoked", "paprika"),
                    ("grated", "parmesan"),
                    ("minced", "ginger"),
                    ("toasted", "sesame"),
                    ("salted", "butter"),
                    ("roasted", "pumpkin"),
                    ("dried", "oregano"),
                    ("ground", "cumin"),
                    ("peeled", "carrots"),
                    ("sliced", "almonds"),
                    ("pickled", "beetroot"),
                    ("crushed", "garlic"),
                    ("boiled", "lentils"),
                    ("fresh", "coriander"),
                ],
                20,
            )
        )
    ),
    "headlines": (
        "Markets rally as inflation cools\nStorm leaves thousands without power\nVoters head to"
        " polls in three states\nScientists map deep ocean floor\nAirline cancels flights after"
        " software fault\nMuseum returns stolen bronze statues\n"
    ),
    "swedish": (
        "Kalle gick till affären för att köpa mjölk men kom hem med bröd istället och hans mamma"
        " blev inte glad över det."
    ),
}


@pytest.mark.parametrize("text", LEFT_ALONE.values(), ids=LEFT_ALONE)
@pytest.mark.parametrize("finish_reason", [None, "stop"])
def test_other_words_and_scripts_by_right(text: str, finish_reason: str | None) -> None:
    result = grade(text, finish_reason=finish_reason)
    assert result.label is Label.OK, result
