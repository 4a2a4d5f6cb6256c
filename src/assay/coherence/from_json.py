"""Read a flat dataclass back from JSON, with its types checked, so that a damaged file is named and not believed."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")


def from_fields(cls: type[T], data: Mapping[str, Any], **given: Any) -> T:
    """A `cls` from the fields that `data` has; others of `data` are left out, and `given` is taken as it is.

    Raises TypeError where a value is of another type than its field, or a field without a default is missing.
    """
    accepted = _accepted(cls)
    values = {name: data[name] for name in accepted if name in data and name not in given}
    for name, value in values.items():
        # In JSON a whole number may stand for a float; true and false are no numbers.
        if not isinstance(value, accepted[name]) or (isinstance(value, bool) and bool not in accepted[name]):
            raise TypeError(f"{name} is {type(value).__name__}")
    return cls(**values, **given)


def _accepted(cls: type[Any]) -> Mapping[str, tuple[type, ...]]:
    """For each field that holds one plain value: the types it may have."""
    fields = {}
    for name, hint in get_type_hints(cls).items():
        kinds = set(get_args(hint) or (hint,))
        if kinds <= {str, int, float, bool, NoneType}:
            fields[name] = tuple(kinds | ({int} if float in kinds else set()))
    return fields
