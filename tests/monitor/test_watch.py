"""The loop: states told apart, alarms raised and ended, a state that survives, a year in a second,
nothing that kills it.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import assay
from assay.errors import UsageError
from assay.monitor.alarms import ALARMS, CHANGES
from assay.monitor.canary import Budget, Round, State
from assay.monitor.change import LEARN
from assay.monitor.loop import Watch
from assay.monitor.options import WatchOptions
from assay.monitor.report import report_of
from assay.monitor.status import status_of
from assay.monitor.watch import run_watch
from assay.verdict import Severity, Verdict
from monitor.watched import Clock, Replayed, asked, model, serve, watch_of
from stub_server import (
    METRICS,
    MODEL,
    Exchange,
    StubServer,
    close_at_once,
    drip,
    hang,
    healthy,
    huge,
    models,
    not_found,
    page,
    rate_limited,
    status,
    text,
)

ROUTES = ("POST /v1/completions", "POST /v1/chat/completions")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))


def learnt(stub: StubServer, **options: object) -> Watch:
    serve(stub)
    watch = watch_of(stub.url, **options)
    assert set(asked(watch, 60)) == {State.OK}
    assert watch.state == "ok" and not watch.alarms
    return watch


def test_a_healthy_server_is_learnt_and_passes() -> None:
    with StubServer() as stub:
        watch = learnt(stub)
        report = report_of(watch)
        assert report.verdict is Verdict.PASS and report.exit_code == 0
        assert report.results["watch"]["finds_s"] <= 3600
        assert watch.changes is not None and len(watch.changes.numbers.base) == 12
        watch.canary.close()


def test_a_first_baseline_is_learnt_within_minutes_and_every_item_gets_its_turn() -> None:
    with StubServer() as stub:
        serve(stub)
        watch = watch_of(stub.url)
        canary = watch.canary
        canary._chosen = canary._least  # type: ignore[method-assign]
        seen: list[set[str]] = []
        for _ in range(150):
            found = watch.step()
            assert len(found.bits) == 1 and len(found.tokens) == 3
            seen.append(set(found.bits) | set(found.tokens))
        assert watch.changes is not None and len(watch.changes.numbers.base) == 12
        assert set().union(*seen[-30:]) >= {f"p{i:02d}" for i in range(12)} | {
            f"t{i:02d}" for i in range(24)
        }
        canary.close()
        again = watch_of(stub.url, new_baseline=True)
        asked(again, 12)
        assert not again.learning
        again.canary.close()


def test_a_server_without_scores_is_watched_by_its_tokens() -> None:
    with StubServer() as stub:
        serve(stub, scores=False, echo=False)
        watch = watch_of(stub.url)
        asked(watch, 200)
        assert watch.changes is not None and watch.changes.numbers.name == "bits_per_token"
        assert watch.state == "ok"
        serve(stub, scores=False, echo=False, word=" other")
        asked(watch, 5)
        assert "first_tokens.changed" in watch.alarms and watch.state == "changed"
        watch.canary.close()


def test_a_server_that_no_longer_scores_is_watched_by_its_tokens_from_then_on() -> None:
    clock = Clock()
    canary = Replayed(clock)
    watch = Watch("http://127.0.0.1:9", WatchOptions(listen="none"), canary, clock=clock)  # type: ignore[arg-type]
    for _ in range(60):
        watch.step()
    ask = canary.round

    def without() -> Round:
        found = ask()
        return replace(found, bits={}, token_bits={"t00": 0.5})

    canary.round = without  # type: ignore[method-assign]
    for _ in range(20):
        watch.step()
    assert (
        watch.changes is not None
        and watch.changes.numbers.name == "bits_per_token"
        and not watch.alarms
    )
    assert "it no longer scores texts" in [e["text"] for e in watch.events]
    canary.round = ask  # type: ignore[method-assign]
    for _ in range(60):
        watch.step()
    assert watch.changes.scores and watch.state == "ok"


@pytest.mark.parametrize(
    "behaviour, state",
    [
        (rate_limited(), State.BUSY),
        (rate_limited("3600"), State.BUSY),
        (status(503), State.BUSY),
        (status(500), State.BROKEN),
        (status(502), State.DOWN),
        (status(400), State.BROKEN),
        (status(401), State.BROKEN),
        (not_found(), State.BROKEN),
        (page(), State.BROKEN),
        (huge(), State.BROKEN),
        (huge(announce=False), State.BROKEN),
        (close_at_once(), State.BROKEN),
        (hang(), State.BUSY),
        (drip(b" ", 0.05), State.BUSY),
        (text("[" * 100_000), State.BROKEN),
        (text("null"), State.BROKEN),
        (text('{"choices": [7]}'), State.BROKEN),
        (text('{"choices": [{"text": 7, "message": {"content": ["x"]}, "logprobs": {"token_logprobs": "x"}}]}'), State.BROKEN),  # noqa: E501
        (text("\x00\xff", kind="application/json"), State.BROKEN),
        (healthy(chunks=("!" * 40,)), State.BROKEN),
        (healthy(chunks=("",)), State.BROKEN),
    ],
)  # fmt: skip
def test_whatever_it_sends_is_told_and_survived(behaviour: object, state: State) -> None:
    with StubServer() as stub:
        serve(stub)
        watch = watch_of(stub.url, timeout=3)
        assert asked(watch, 1) == [State.OK]
        for route in ROUTES:
            stub.on(route, behaviour)  # type: ignore[arg-type]
        assert asked(watch, 2) == [state, state]
        assert ({state.value} if state is not State.BUSY else set()) == set(watch.alarms)
        assert watch.last.reason and "\n" not in watch.last.reason
        # It comes back, and so does the state.
        serve(stub)
        asked(watch, 2)
        assert watch.state == "learning" and not watch.alarms
        watch.canary.close()


def test_a_server_that_is_gone_is_down_and_comes_back() -> None:
    with StubServer() as stub:
        serve(stub)
        watch = watch_of(stub.url)
        asked(watch, 1)
        # the stub's threads would go on answering on a connection that is open
        watch.canary.close()
    assert asked(watch, 2) == [State.DOWN, State.DOWN] and watch.state == "down"
    assert set(watch.alarms) == {"down"} and "refused" in watch.last.reason
    report = report_of(watch)
    assert report.verdict is Verdict.FAIL and report.findings[0].id == "server.down"


def test_a_garbage_server_is_found_within_two_probes_even_while_it_is_learnt() -> None:
    with StubServer() as stub:
        serve(stub, word="!" * 30)
        watch = watch_of(stub.url)
        asked(watch, 2)
        assert set(watch.alarms) == {"broken"} and "degenerate" in watch.alarms["broken"]["why"]
    with StubServer() as stub:
        serve(stub, nats=12.0)
        watch = watch_of(stub.url)
        asked(watch, 2)
        assert set(watch.alarms) == {"broken"} and "bits per byte" in watch.alarms["broken"]["why"]


def test_a_drift_is_found_within_an_hour_and_its_values_do_not_enter_the_baseline() -> None:
    with StubServer() as stub:
        watch = learnt(stub)
        assert watch.changes is not None and watch.changes.numbers.last is not None
        before = dict(watch.changes.numbers.base)
        bits = sum(before.values()) / len(before)
        serve(
            stub, nats=3.0 * (1 + 0.01 / bits)
        )  # 0.01 bits per byte more, of about the same share of all texts
        asked(watch, 60)
        assert "bits_per_byte.up" in watch.alarms and watch.state == "changed"
        assert watch.changes.numbers.base == before
        report = report_of(watch)
        assert report.exit_code == 1 and report.findings[0].id == "server.drift"
        assert stub.url in report.findings[0].remedies[0]
        watch.canary.close()


@pytest.mark.engine
def test_a_hung_server_is_broken_and_a_busy_one_is_not() -> None:
    counters = "# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total {}\n"
    written = [100.0]
    with StubServer() as stub:
        serve(stub)
        watch = watch_of(stub.url, timeout=2)
        asked(watch, 1)
        for route in ROUTES:
            stub.on(route, hang())

        def metrics(moves: bool) -> None:
            def answer(e: object) -> None:
                written[0] += 10 if moves else 0
                e.send(counters.format(written[0]).encode(), kind="text/plain")  # type: ignore[attr-defined]

            stub.on("GET /metrics", answer)

        metrics(moves=True)
        assert set(asked(watch, 4)) == {State.BUSY} and not watch.alarms
        metrics(moves=False)
        assert asked(watch, 5)[-2:] == [State.BROKEN, State.BROKEN]
        assert "hangs" in watch.alarms["broken"]["why"]
        watch.canary.close()


@pytest.mark.engine
def test_a_server_whose_page_of_health_hangs_too_is_broken() -> None:
    with StubServer() as stub:
        serve(stub)
        watch = watch_of(stub.url, timeout=2)
        asked(watch, 1)
        stub.everywhere(hang())
        assert asked(watch, 2) == [State.BROKEN, State.BROKEN]
        assert "hangs" in watch.alarms["broken"]["why"]
        watch.canary.close()


def test_answers_of_megabytes_leave_the_state_small(tmp_path: Path) -> None:
    with StubServer() as stub:
        serve(stub, word="word " * 200_000)
        stub.on("GET /version", lambda e: e.json({"version": "9" * 100_000}))
        watch = watch_of(stub.url)
        asked(watch, 12)
        (file,) = (tmp_path / "cache" / "watch").iterdir()
        assert file.stat().st_size < 65_536
        watch.canary.close()


def test_requests_that_wait_make_it_busy_and_are_measured_all_the_same() -> None:
    with StubServer() as stub:
        watch = learnt(stub)
        stub.on(
            "GET /metrics",
            lambda e: e.send(
                f"{METRICS}vllm:num_requests_waiting 7.0\n".encode(), kind="text/plain"
            ),
        )
        assert asked(watch, 1) == [State.BUSY] and watch.state == "busy" and watch.last.bits
        watch.canary.close()


def test_another_model_at_night_and_several_servers_are_told() -> None:
    with StubServer() as stub:
        watch = learnt(stub)
        stub.on("GET /v1/models", models("another-model"))
        asked(watch, 1)
        assert "model" in watch.alarms and watch.state == "changed"
        stub.on("GET /v1/models", models("stub-model"))
        for start in (5.0, 6.0, 5.0):
            line = f"process_start_time_seconds {start}\n".encode()
            stub.on("GET /metrics", lambda e, line=line: e.send(line, kind="text/plain"))
            asked(watch, 1)
        assert set(watch.alarms) == {"several_servers"}
        assert [e["text"] for e in watch.events if e["kind"] == "restarted"] == [
            "the server's process is a new one"
        ]
        assert [f.severity for f in report_of(watch).findings] == [Severity.ERROR, Severity.WARNING]
        watch.canary.close()


def of_any_name(e: Exchange) -> Exchange:
    e.body.pop("model", None)
    return e


def test_another_model_after_a_restart_is_told_and_of_several_the_watched_one_is_asked() -> None:
    with StubServer() as stub:
        watch = learnt(stub)
        watch.canary.close()  # as after a round that found nobody
        stub.on("GET /v1/models", models("another-model"))
        for route in ("POST /v1/completions", "POST /v1/chat/completions"):
            own = stub.behaviour(route)
            stub.on(route, lambda e, own=own: own(of_any_name(e)))
        asked(watch, 1)
        assert "another-model, and stub-model no longer" in watch.alarms["model"]["why"]
        watch.canary.close()
        again = watch_of(stub.url)  # the watch itself was restarted too
        asked(again, 1)
        assert "model" in again.alarms
        again.canary.close()
        stub.on("GET /v1/models", models("another-model", "stub-model"))
        asked(again, 1)
        assert "model" not in again.alarms and again.last.model == "stub-model"
        again.canary.close()


def test_a_watch_goes_on_where_it_was_stopped() -> None:
    with StubServer() as stub:
        watch = learnt(stub)
        watch.canary.close()
        again = watch_of(stub.url)
        assert again.changes is not None and watch.changes is not None
        assert again.changes.state() == watch.changes.state() and again.state == "ok"
        asked(again, 1)
        assert again.rounds["ok"] == 61 and again.done == 1
        again.canary.close()
        assert watch_of(stub.url, new_baseline=True).changes is None


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_state_is_learnt_anew(tmp_path: Path, damage: str) -> None:
    with StubServer() as stub:
        watch = learnt(stub)
        watch.canary.close()
        (file,) = (tmp_path / "cache" / "watch").iterdir()
        if damage == "cut":
            file.write_bytes(file.read_bytes()[:-20])
        else:
            watch.kept.put("state", {"changes": {"standing": 7}, "numbers": "bits_per_byte"})
        again = watch_of(stub.url)
        assert again.changes is None
        asked(again, 1)
        assert again.state == "learning"
        again.canary.close()


def test_clocks_that_jump_change_nothing() -> None:
    clock = Clock()
    walls = iter([2e9, 0.0, -5.0, 3e9, 1e9, *[1e9] * 500])
    watch = Watch(
        "http://127.0.0.1:9",
        WatchOptions(listen="none"),
        Replayed(clock),
        clock=clock,
        wall=lambda: next(walls),
    )  # type: ignore[arg-type]
    for n in range(100):
        watch.step()
        clock.now += 1e7 if n == 50 else 60.0  # asleep for months
    assert watch.state == "ok" and not watch.alarms
    budget = Budget(0.01, 6.0)
    for seconds in (-1e9, 1e12, -3.0):
        budget.earn(seconds)
    assert budget.left == 6.0


def test_a_simulated_year_has_no_false_alarm_and_stays_small(tmp_path: Path) -> None:
    # A round an hour; benchmarks/watch/watch_alarms.py replays real noise every minute.
    clock = Clock()
    options = WatchOptions(listen="none", interval=3600.0)
    canary = Replayed(clock)
    watch = Watch(
        "http://127.0.0.1:9", options, canary, clock=clock, wall=lambda: 1.8e9 + clock.now
    )  # type: ignore[arg-type]
    sizes = []
    for n in range(365 * 24):
        watch.step()
        clock.now += 3600
        if n % 2900 == 2899:
            watch.save()
            sizes.append(sum(f.stat().st_size for f in (tmp_path / "cache" / "watch").iterdir()))
    assert not watch.log.raised and watch.rounds["ok"] == 365 * 24
    assert len(watch.events) <= 100 and len(watch.canary.budget.spent) <= 240
    assert max(sizes) < 65_536 and max(sizes) - min(sizes) < 200
    canary.shift = 0.01
    for _ in range(60):
        watch.step()
    assert "bits_per_byte.up" in watch.alarms


def test_a_slow_server_is_asked_less_often_so_that_the_load_holds() -> None:
    clock = Clock()
    with StubServer() as stub:
        serve(stub)
        watch = watch_of(stub.url, clock)
        plain = model()

        def slow(e: object) -> None:
            clock.now += 2.0
            plain(e)  # type: ignore[arg-type]

        for route in ROUTES:
            stub.on(route, slow)
        watch.step()
        began, costs = clock.now, 0.0
        for _ in range(30):
            clock.sleep(watch.wait())
            costs += watch.step().cost_s
        assert watch.wait() > 300
        assert costs / (clock.now - began) <= 0.0105
        assert (status_of(watch)["load"] or 0) <= 0.0105
        watch.canary.close()


JSONS = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "text",
                    "message",
                    "content",
                    "logprobs",
                    "token_logprobs",
                    "prompt_logprobs",
                    "usage",
                    "data",
                    "id",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSONS)
def test_no_json_kills_it(value: object) -> None:
    with StubServer() as stub:
        serve(stub)
        watch = watch_of(stub.url)
        asked(watch, 1)
        for route in (*ROUTES, "GET /v1/models", "GET /metrics"):
            stub.on(route, text(json.dumps(value)))
        asked(watch, 2)
        assert report_of(watch).exit_code in (0, 1, 2, 3)
        watch.canary.close()


def test_the_api_and_wrong_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    with StubServer() as stub:
        serve(stub)
        report = assay.watch(stub.url, rounds=1, listen="127.0.0.1:0")
        assert report.command == "watch" and report.exit_code == 3
        with pytest.raises(UsageError, match="listen"):
            assay.watch(stub.url, listen="nowhere", rounds=1)
        with pytest.raises(UsageError, match="webhook"):
            assay.watch(stub.url, webhook="ftp://x", rounds=1)
    with pytest.raises(UsageError):
        assay.watch("not a url", rounds=1)
    with pytest.raises(UsageError, match="API_KEY"):
        assay.watch("http://127.0.0.1:9", api_key_env="NO_SUCH_API_KEY", rounds=1)
    report = assay.watch("http://127.0.0.1:9", rounds=1, listen="none")
    assert report.exit_code == 2 and report.findings[0].id == "server.unreachable"


def test_an_interrupt_prints_what_there_is() -> None:
    clock = Clock()

    def interrupted(seconds: float) -> None:
        if clock.now > 1100:
            raise KeyboardInterrupt
        clock.sleep(seconds)

    report = run_watch(
        "http://127.0.0.1:9",
        WatchOptions(listen="none"),
        canary=Replayed(clock),
        clock=clock,
        sleep=interrupted,
    )  # type: ignore[arg-type]
    assert (
        report.interrupted
        and report.exit_code == 130
        and report.results["watch"]["rounds"] == {"ok": 3}
    )


def test_every_alarm_has_a_finding_and_every_quantity_an_alarm() -> None:
    clock = Clock()
    watch = Watch("http://127.0.0.1:9", WatchOptions(listen="none"), Replayed(clock), clock=clock)  # type: ignore[arg-type]
    for name in ALARMS:
        watch.log.raise_alarm(name, "why")
        assert watch.log._finding(name).title == f"{ALARMS[name].title}: why"
    for scores in (True, False):
        from assay.monitor.change import Changes

        changes = Changes(60, 1, scores=scores)
        assert {f"{q.name}.{kind}" for q in changes.quantities for kind in q.KINDS} <= CHANGES
    assert LEARN >= 3 and replace(Round(), state=State.OK).reason == ""


def test_a_second_interrupt_does_not_take_the_report_away() -> None:
    """`timeout` sends SIGTERM to the process and to its group."""
    with StubServer() as stub:
        serve(stub)

        def twice(seconds: float) -> None:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGTERM)

        class Slow(Watch):
            def save(self) -> None:
                super().save()
                if self.done == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
                    os.kill(os.getpid(), signal.SIGTERM)

        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("assay.monitor.loop.Watch", Slow)
                report = run_watch(stub.url, WatchOptions(listen="none"), sleep=twice)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert report.exit_code == 130 and report.results["watch"]["rounds"] == {"ok": 1}


def test_another_checkpoint_under_the_same_name_is_an_alarm() -> None:
    with StubServer() as stub:
        serve(stub)
        watch = watch_of(stub.url)
        asked(watch, 2)
        assert watch.root == MODEL and not watch.alarms
        stub.on("GET /v1/models", models(MODEL, root="/checkpoints/other"))
        asked(watch, 1)
        assert "root" in watch.alarms and "/checkpoints/other" in watch.alarms["root"]["why"]
        assert report_of(watch).findings[0].id == "server.root_changed"
        again = watch_of(stub.url)  # what was kept remembers the first checkpoint
        asked(again, 1)
        assert again.root == MODEL and "root" in again.alarms
        stub.on("GET /v1/models", models(MODEL))
        asked(again, 1)
        assert "root" not in again.alarms
