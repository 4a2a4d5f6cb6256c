"""Both names of the KV cache."""

from __future__ import annotations

from typing import Any

from assay.engines.hf.cache import with_cache


class Old:
    def forward(
        self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> None: ...


class New:
    def forward(self, input_ids: Any = None, cache: Any = None, **kwargs: Any) -> None: ...


class Unsaid:
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


def test_each_model_gets_its_cache_under_the_name_it_knows() -> None:
    assert with_cache(Old(), 1) == {"past_key_values": 1}
    assert with_cache(New(), 1) == {"cache": 1}
    assert with_cache(Unsaid(), 1) == {"past_key_values": 1}
