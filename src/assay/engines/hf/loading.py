"""Load a model of transformers: quietly, onto a device, with one clear line where it fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import huggingface_hub
import transformers
from tqdm.std import tqdm  # type: ignore[import-untyped]

from assay.engines.device import choose_device, memory_error, out_of_memory
from assay.engines.hf.spec import HfSpec
from assay.errors import AssayError

HUB_S = 5.0
"""Seconds that the Hub has to answer before a model is looked for in its cache alone."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars, log lines and warnings of transformers, its converters, accelerate
    and the hub's client.

    Bars of all of them are tqdm's. transformers stays at its errors afterwards: a warning while a
    model scores would break assay's own progress.
    """
    transformers.utils.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    inner = tqdm.__init__
    tqdm.__init__ = partialmethod(inner, disable=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        tqdm.__init__ = inner


def on_device(model: Any, spec: HfSpec) -> Any:
    """`model` on the device of `spec`; AssayError where this torch has none of that name, or it is
    full.
    """
    device = choose_device(spec.device)
    try:
        return model.to(device)
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # torch asserts that it was built for the device
        raise AssayError(
            f"cannot put the model {spec.model} on the device {device!r}: {_first_line(error)}",
            finding_id="fidelity.out_of_memory" if out_of_memory(error) else "fidelity.engine_load",
            remedy="name a device that is there and has room: ?device=cpu",
        ) from error


def hub_is_out_of_reach(model: str) -> bool:
    """Whether `model` is a name on the Hub, which does not answer: its client would try each file
    again for minutes.

    AssayError where the Hub's cache on this machine does not hold the model either.
    """
    if Path(model).exists():
        return False
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        try:
            huggingface_hub.utils.get_session().head(
                huggingface_hub.constants.ENDPOINT, timeout=HUB_S
            )
            return False
        except Exception:  # its HTTP library differs between versions
            pass
    try:
        held = huggingface_hub.try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a name that the Hub could have
        held = None
    if not isinstance(held, str):
        raise AssayError(
            f"there is no folder {model} here, and the Hub cannot be reached to fetch a model of"
            " that name",
            finding_id="fidelity.engine_load",
            remedy="give the folder of a checkpoint: hf:PATH",
        )
    return True


def cannot_load(spec: HfSpec, error: Exception) -> AssayError:
    """The error for a checkpoint that transformers cannot load, or that would have to run code of
    its own.
    """
    reason, finding = _first_line(error), "fidelity.engine_load"
    remedy = "give the folder of a checkpoint that transformers can load: hf:PATH"
    if out_of_memory(error):
        return memory_error(
            f"the weights of {spec.model}",
            choose_device(spec.device),
            "give a smaller type: ?dtype=bfloat16",
        )
    if isinstance(error, UnpicklingError):
        reason = (
            "a pickle file of it needs more than weights or is damaged, and assay runs no code of a"
            " checkpoint"
        )
        finding, remedy = "fidelity.code_refused", "convert it to safetensors where you trust it"
    elif "trust_remote_code" in str(error):
        reason = "it comes with code of its own (auto_map), which assay never runs"
        finding = "fidelity.code_refused"
        remedy = (
            "leave auto_map out where transformers knows the architecture, or compare a server that"
            " you trust with it"
        )
    elif isinstance(error, ImportError):  # a quantised checkpoint needs its quantiser's library
        finding, remedy = (
            "fidelity.engine_missing",
            "install the library that the checkpoint names, or score it with vllm:",
        )
    return AssayError(
        f"cannot load the model {spec.model}: {reason}", finding_id=finding, remedy=remedy
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def refuse_made_up(model: str, missing: list[str]) -> None:
    """AssayError where tensors are not in the checkpoint: transformers would fill them with random
    numbers.
    """
    if missing:
        raise AssayError(
            f"cannot load the model {model}: {len(missing)} of its tensors are not in the"
            f" checkpoint, such as {missing[0]}",
            finding_id="fidelity.engine_load",
            remedy=f"see what is there with assay verify {model}",
        )
