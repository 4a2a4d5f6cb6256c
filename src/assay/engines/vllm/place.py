"""Where a rank of vLLM is: which part of the vocabulary and of the layers it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """The place of a rank: number `tensor_rank` of the `tensor_ranks` of pipeline stage `stage`."""

    rank: int = 0
    tensor_rank: int = 0
    tensor_ranks: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def ranks(self) -> int:
        """All ranks of the engine."""
        return self.tensor_ranks * self.stages

    @property
    def scores(self) -> bool:
        """Whether it is of the last stage, which alone has final states and an output head."""
        return self.stage == self.stages - 1

    def shard(self, vocab: int) -> tuple[int, int]:
        """Rows of an output head that is held whole by every rank: an even share, from … to."""
        each = -(-vocab // self.tensor_ranks)
        return min(vocab, each * self.tensor_rank), min(vocab, each * (self.tensor_rank + 1))


def place_of(worker: Any) -> Place:
    """The place of a worker of vLLM."""
    parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    if parallel is None or parallel.world_size == 1:
        return Place()
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor, stages = get_tp_group(), get_pp_group()
    return Place(
        worker.rank,
        tensor.rank_in_group,
        tensor.world_size,
        stages.rank_in_group,
        stages.world_size,
    )
