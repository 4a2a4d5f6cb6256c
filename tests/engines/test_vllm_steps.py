"""Whose rows are whose, and where earlier tokens lie, of a runner as vLLM's is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from assay.engines.vllm.kv_hooks import HookContext
from assay.engines.vllm.steps import WINDOW, Rewrite, Steps
from assay.errors import AssayError

BLOCK, HEADS, WIDTH = 4, 2, 3


class Table:
    block_size = BLOCK

    def get_numpy_array(self) -> Any:
        return np.array([[5, 2, 0], [1, 4, 3]], np.int32)


class Impl:
    """Writes as a backend does: by slot."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        cache[0].view(-1, HEADS, WIDTH)[slots] = key
        cache[1].view(-1, HEADS, WIDTH)[slots] = value


class Runner:
    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=["x", "y"], block_table=[None, Table()])
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(layer_names=["other"]),
                SimpleNamespace(layer_names=["attn.0"]),
            ]
        )
        self.requests = {
            "x": SimpleNamespace(num_computed_tokens=5, num_prompt_tokens=6, sampling_params=None),
            "y": SimpleNamespace(
                num_computed_tokens=9,
                num_prompt_tokens=8,
                sampling_params=SimpleNamespace(extra_args={WINDOW: 7}),
            ),
        }
        self.forward: Any = lambda: None

    def execute_model(self, scheduler_output: Any) -> str:
        self.forward()
        return "output"


def run(runner: Runner, **counts: int) -> str:
    return runner.execute_model(SimpleNamespace(num_scheduled_tokens=counts))


def test_requests_are_those_of_the_running_step_only() -> None:
    runner = Runner()
    for prefix, expected in ((3, [3, 3]), (None, [6, 8])):
        steps, seen = Steps(runner, prefix), []
        undo = steps.watch()
        runner.forward = lambda steps=steps, seen=seen: seen.append(steps.requests)
        assert steps.requests is None
        assert run(runner, x=2, y=1) == "output"
        assert steps.requests is None
        undo()
        assert "execute_model" not in vars(runner)
        x, y = seen[0]
        assert (x.key, x.start, x.end, x.offset, x.row) == ("x", 5, 7, 0, 0)
        assert (y.key, y.start, y.end, y.offset, y.row) == ("7", 9, 10, 2, 1)
        assert [x.prefix, y.prefix] == expected
        assert steps.serving is (prefix is None)


def test_a_step_without_a_forward_is_seen_and_one_that_fails_leaves_nothing() -> None:
    runner, done = Runner(), []
    steps = Steps(runner, None)
    undo = steps.watch(lambda: done.append(1))
    run(runner, x=1, y=1)
    assert done == [1]
    run(runner)
    assert done == [1]  # nothing was scheduled

    def fail() -> None:
        raise RuntimeError("out of memory")

    runner.forward = fail
    with pytest.raises(RuntimeError):
        run(runner, x=1, y=1)
    assert steps.requests is None
    undo()


def test_watches_lie_on_each_other() -> None:
    runner = Runner()
    outer = Steps(runner, None).watch()
    under = runner.execute_model
    Steps(runner, 1).watch()()
    assert runner.execute_model is under
    outer()


def test_other_positions_are_refused() -> None:
    runner = Runner()
    steps = Steps(runner, None)
    steps.watch()
    for positions, said in (
        (torch.tensor([5, 6, 9, 0]), None),
        (torch.tensor([5, 6, 8]), "positions"),
    ):
        runner.forward = lambda positions=positions: steps.check(positions)
        if said is None:
            run(runner, x=2, y=1)
        else:
            with pytest.raises(AssayError, match=said):
                run(runner, x=2, y=1)


def test_earlier_tokens_are_written_into_their_slots_after_rope() -> None:
    runner = Runner()
    steps = Steps(runner, None)
    steps.watch()
    cache = torch.zeros(2, 6, BLOCK, HEADS, WIDTH)
    attention = SimpleNamespace(
        attn=SimpleNamespace(impl=Impl(), kv_cache=cache, layer_name="attn.0")
    )

    def rope(positions: Any, query: Any, key: Any) -> tuple[Any, Any]:
        key += 100 * positions[:, None]  # in place, as kernels do
        return query, key

    context = HookContext(steps, {0: attention}, {0: rope})
    k = torch.arange(3 * HEADS * WIDTH, dtype=torch.float32).view(3, HEADS, WIDTH)
    v = -k

    def rewrite() -> None:
        x, y = steps.requests or ()
        context.rewrite(0, [Rewrite(x, 3, k[:2], v[:2]), Rewrite(y, 8, k[2:], v[2:])], rotate=True)
        context.rewrite(0, [], rotate=True)

    runner.forward = rewrite
    given = k.clone()
    run(runner, x=2, y=1)
    assert torch.equal(k, given)
    # x: positions 3 and 4 are in block 5, place 3, and block 2, place 0; y: position 8 in block 3,
    # place 0.
    for row, (block, place, position) in enumerate(((5, 3, 3), (2, 0, 4), (3, 0, 8))):
        assert torch.equal(cache[0, block, place], k[row] + 100 * position)
        assert torch.equal(cache[1, block, place], v[row])
    assert int((cache != 0).any(-1).any(-1).sum()) == 6


def test_tokens_of_the_step_itself_and_unknown_backends_are_refused() -> None:
    runner = Runner()
    steps = Steps(runner, None)
    steps.watch()
    attention = SimpleNamespace(
        impl=Impl(), kv_cache=torch.zeros(2, 6, BLOCK, HEADS, WIDTH), layer_name="attn.0"
    )
    one = torch.zeros(1, HEADS, WIDTH)

    def rewrite() -> None:
        steps.rewrite(attention, [Rewrite((steps.requests or ())[0], 5, one, one)])

    runner.forward = rewrite
    with pytest.raises(ValueError, match="running step"):
        run(runner, x=2, y=1)
    attention.impl = object()
    with pytest.raises(AssayError, match="no way to write"):
        run(runner, x=2, y=1)
