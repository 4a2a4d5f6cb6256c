from __future__ import annotations

from dataclasses import replace

import pytest
from check_records import passages, record, sample, samples
from hypothesis import given
from hypothesis import strategies as st

from assay.coherence.options import Plan
from assay.coherence.pace import Pace, fit
from assay.coherence.probes import standard_probes
from assay.coherence.record import CheckRecord, ProbeResult
from assay.coherence.stages import EXTENSIONS, FIRST, MAX_ANALYSES, Stage, extension, stages_of
from assay.progress import span

PROBES = standard_probes(
    max_model_len=2048, longest_needle=8192, streams=8, seed=0, count_tokens=None
)


def stages(**plan: object) -> list[Stage]:
    return stages_of(Plan(**plan), PROBES, 2048)  # type: ignore[arg-type]


def paced(write: float, read: float | None = None, reference: float = 0.0) -> Pace:
    return Pace(write=write, read=read, reference=reference)


def nothing_kept(stage: Stage) -> bool:
    return False


def test_every_text_of_the_plan_is_in_one_stage() -> None:
    tasks = [(t.probe.name, t.variant, t.sampling) for stage in stages() for t in stage.tasks]
    sampled = [p for p in PROBES if not p.variants]
    variants = sum(len(p.variants) for p in PROBES)
    assert len(tasks) == len(set(tasks)) == 4 * len(sampled) + variants == 7 * 4 + 8 + 9
    assert stages()[0].name == FIRST and {t.probe.name for t in stages()[0].tasks} == {"burst"}


def test_fixed_texts_deep_in_a_context_come_after_texts_of_every_kind() -> None:
    names = [stage.name for stage in stages()]
    assert (
        names.index("texts in context") > names.index("long texts") > names.index("fixed texts") > 0
    )


def test_a_short_context_asks_for_no_depth() -> None:
    assert "texts in context" not in [s.name for s in stages_of(Plan(), PROBES, 400)]


def test_the_tools_suite_goes_with_no_probe() -> None:
    from assay.coherence.options import CheckOptions
    from assay.errors import UsageError

    with pytest.raises(UsageError, match="no --probe"):
        CheckOptions(suite="tools", only=("france",))


def test_the_tools_suite_asks_many_at_once_first_since_that_is_fast() -> None:
    assert [(s.kind, s.streams) for s in stages(suite="tools")] == [
        ("streams", 1),
        ("tools", 8),
        ("tools", 32),
        ("tools", 1),
    ]


def test_extensions_never_ask_a_text_twice() -> None:
    plan = Plan()
    asked = [t for stage in stages() for t in stage.tasks] + [
        t for look in range(2, MAX_ANALYSES + 1) for t in extension(plan, PROBES, look).tasks
    ]
    keys = [(t.probe.name, t.variant, t.sampling) for t in asked]
    assert len(keys) == len(set(keys))
    assert len(extension(plan, PROBES, 2).tasks) == 7 * EXTENSIONS[0]


def test_without_a_budget_all_is_chosen_and_with_none_at_all_nothing_is() -> None:
    chosen, dropped = fit(stages(), paced(100.0), float("inf"), nothing_kept)
    assert chosen == stages() and dropped == []
    chosen, dropped = fit(stages(), paced(100.0), 0.0, nothing_kept)
    assert chosen == [] and dropped == stages()


@given(
    st.floats(1, 2000),
    st.floats(5, 5000),
    st.floats(0, 3),
    st.floats(0, 2000),
    st.integers(1, 6),
    st.booleans(),
)
def test_what_is_chosen_fits_and_keeps_its_order(
    write: float, read: float, reference: float, left: float, samples_: int, kept: bool
) -> None:
    pace = paced(write, read, reference)
    every = stages(samples=samples_)
    chosen, dropped = fit(every, pace, left, lambda stage: kept)
    assert sum(pace.seconds(stage, lambda s: kept) or 0.0 for stage in chosen) <= left + 1e-6
    names = [s.name for s in every]
    assert [s.name for s in chosen] == [n for n in names if n in {c.name for c in chosen}]
    assert len(chosen) + len(dropped) == len(every)


@given(st.floats(1, 2000), st.floats(10, 900), st.floats(0, 900))
def test_more_time_never_measures_less(write: float, left: float, more: float) -> None:
    def texts(seconds: float) -> int:
        only_texts = [s for s in stages(throughput=False) if s.kind == "texts"]
        return len(fit(only_texts[:1], paced(write), seconds, nothing_kept)[0])

    assert texts(left + more) >= texts(left)


def test_fixed_texts_may_not_take_more_than_their_share() -> None:
    slow = paced(write=50.0, read=2.0)
    chosen, dropped = fit(stages(), slow, 180.0, nothing_kept)
    assert {"fixed texts", "texts in context"} <= {s.name for s in dropped}
    assert {FIRST, "short texts", "long texts"} <= {s.name for s in chosen}


def test_the_pace_is_learnt_from_what_was_done() -> None:
    pace = paced(0.0, reference=1.0)
    pace.write = None
    first, *_ = stages()
    assert pace.seconds(first) is None
    pace.learn(first, 10.0, written=400)
    pace.learn_reference(5.0, own=10.0)
    assert pace.write == pytest.approx(40.0) and pace.reference == pytest.approx(0.5)
    pace.learn(stages()[1], 3.0, written=0)
    assert pace.read == pytest.approx(500, rel=0.3)
    streams, short = stages()[2:4]
    assert (pace.seconds(short) or 0) > (pace.seconds(short, lambda stage: True) or 0)
    assert pace.seconds(streams) == pace.seconds(streams, lambda stage: True)  # no reference


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (12.4, "12 s"), (99, "99 s"), (130, "2 min 10 s"), (7300, "121 min")],
)
def test_times_in_words(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_a_longer_reference_is_held_against_the_texts_of_the_same_kind() -> None:
    whole = record(samples(ok=30, loops=10))
    part = record(samples(ok=12))
    assert len(whole.like(part).samples) == 12
    greedy = CheckRecord(probes=(ProbeResult("story", "story", (sample(temperature=0.0),)),))
    assert whole.like(greedy).samples == ()
    assert whole.like(record([], probe="france")).samples == ()


def test_stages_add_up_to_one_record() -> None:
    first = record(samples(ok=3), passages()[:5], timed_texts=())
    second = record(samples(loops=2), passages()[5:])
    both = first.with_(second)
    assert len(both.samples) == 5 and both.passages == passages() and len(both.timed) == 3
    assert both == replace(first.with_(CheckRecord()), probes=both.probes).with_(
        replace(second, probes=())
    )
    skipped = CheckRecord(probes=(ProbeResult("story", "story", skipped="no chat"),))
    assert skipped.with_(first).probes[0].status == "run"


def test_a_server_is_called_slower_only_where_every_stream_is() -> None:
    first, short, long = stages()[0], stages()[3], stages()[4]
    assert (len(first.tasks), len(long.tasks)) == (8, 2)
    # A GPU writes as fast a stream whatever their number: two streams write a quarter of what eight
    # do.
    gpu = Pace()
    gpu.learn(first, 1.0, 800)
    gpu.learn(long, 4.5, 900)
    assert gpu.slower is None
    # A CPU writes as many tokens in all; a stream of two is four times as fast.
    cpu = Pace()
    cpu.learn(first, 10.0, 800)
    cpu.learn(long, 10.0, 800)
    assert cpu.slower is None
    tired = Pace()
    tired.learn(first, 1.0, 800)
    tired.learn(short, 20.0, 800)
    assert tired.slower == (short.name, 800.0, 40.0)
    assert tired.write == 40.0  # what is told of later stages is by its speed now
    # Needles are read for long and answered in a word.
    needles = next(stage for stage in stages() if "needles" in stage.name)
    reading = Pace()
    reading.learn(first, 1.0, 800)
    reading.learn(needles, 9.0, 30)
    assert reading.slower is None
