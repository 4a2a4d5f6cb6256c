"""The models that a server lists, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from assay.engines.server.errors import ModelUnknown, NotFound, NotJson, StreamCut, Unreachable
from assay.engines.server.fields import as_count, as_name, as_object
from assay.engines.server.http import Transport
from assay.engines.server.wording import error_message, one_line


@dataclass(frozen=True)
class ModelCard:
    """One entry of `/v1/models`."""

    id: str
    root: str | None = None
    owned_by: str | None = None
    max_model_len: int | None = None
    vocab_size: int | None = None
    aliases: tuple[str, ...] = ()


def list_models(transport: Transport) -> tuple[ModelCard, ...] | None:
    """The models of the server; None if it has no such page."""
    url = transport.endpoint.api + "/models"
    try:
        answer = transport.get_json(url)
    except NotFound:
        return None
    except StreamCut as exc:
        # The first request of all: nothing there has spoken HTTP yet.
        raise Unreachable(exc.message, evidence=exc.evidence) from exc
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list):
        said = one_line(error_message(answer)) or "no list of models"
        raise NotJson(f"{url} answered JSON that is no list of models: {said}")
    return tuple(card for card in map(_card, data) if card is not None)


def _card(entry: Any) -> ModelCard | None:
    card = as_object(entry)
    name = as_name(card.get("id"))
    if not name:
        return None
    aliases = card.get("aliases")
    return ModelCard(
        id=name,
        root=as_name(card.get("root")),
        owned_by=as_name(card.get("owned_by")),
        max_model_len=as_count(card.get("max_model_len")),
        vocab_size=as_count(as_object(card.get("meta")).get("n_vocab")),
        aliases=(
            tuple(a for a in aliases if isinstance(a, str)) if isinstance(aliases, list) else ()
        ),
    )


def choose_model(
    cards: tuple[ModelCard, ...] | None, wanted: str | None, where: str, *, list_is_complete: bool
) -> tuple[ModelCard, str]:
    """The model to use, and a note on how it was chosen.

    `list_is_complete` is False for a server that also answers to names which it does not list.
    """
    names = tuple(card.id for card in cards or ())
    if wanted is not None:
        for card in cards or ():
            if wanted == card.id or wanted in card.aliases:
                return card, "named by the caller"
        if names and list_is_complete:
            raise ModelUnknown(
                f"{where} has no model {one_line(wanted)!r}; it has {_listed(names)}",
                available=names,
            )
        return ModelCard(id=wanted), "named by the caller, not listed by the server"
    if not names:
        what = "lists no model" if cards is not None else "has no list of models"
        raise ModelUnknown(
            f"{where} {what}", remedy="name the model with --model, or load one on the server"
        )
    card = (cards or ())[0]
    return card, (
        "the only one" if len(names) == 1 else f"the first of {len(names)}: {_listed(names)}"
    )


def _listed(names: tuple[str, ...], limit: int = 8) -> str:
    shown = ", ".join(one_line(name, 80) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
