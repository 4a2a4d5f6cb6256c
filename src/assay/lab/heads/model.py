"""An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), laid out as vLLM's `LlamaForCausalLMEagle3` reads it.

At position p the head reads the embedding of token p + 1 and a mix (`fc`) of three hidden states of the target at p, runs
one layer, and predicts token p + 2 over a reduced vocabulary. Its own hidden state then stands in for the target's, so it
goes on for as many steps as are drafted. A row p of every tensor here is the chain of drafts that begins at p: in step j it
reads token p + j + 1 at the rotary position p + j, and attends to step 0 of all rows up to p and to its own earlier steps.
That is what an engine's cache holds when it drafts after p, so training and serving see the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn
from torch.nn.functional import linear, silu, softmax

from assay.engines.scoring import vocabulary_sha256
from assay.errors import AssayError, UsageError
from assay.runs import write_atomically

NORMS = ("llama", "plus_one")
"""How a norm's weight is read: as it stands, or (Gemma's convention) with 1 added."""


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head. `aux_layers` are ids of hidden states: 0 the embedding, i the output of layer i − 1."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    target_layers: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048

    @classmethod
    def of_target(cls, model: Any, draft_vocab: int, intermediate: int = 0) -> HeadConfig:
        """Sizes for a target of transformers; its aux layers are vLLM's default, (2, L / 2, L − 3).

        UsageError for a target whose hidden states vLLM does not hand to a head of Llama's kind.
        """
        c = model.config.get_text_config()
        if c.model_type not in SERVED:
            raise UsageError(
                f"vLLM serves no EAGLE-3 head of Llama's layout for {c.model_type}",
                remedy=f"targets are {', '.join(SERVED)}",
                finding_id="speculation.head_layout",
            )
        layers = c.num_hidden_layers
        aux = (2, layers // 2, layers - 3)
        if len(set(aux)) < 3 or aux[2] < 1:
            raise UsageError(
                f"a target of {layers} layers has no three different auxiliary layers (2, L/2, L − 3)",
                remedy="take a target of at least 7 layers",
                finding_id="speculation.head_layout",
            )
        rope = getattr(c, "rope_parameters", None) or {}
        return cls(
            c.hidden_size, intermediate or c.intermediate_size, c.num_attention_heads, c.num_key_value_heads,
            getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads, c.vocab_size,
            min(draft_vocab or c.vocab_size, c.vocab_size), aux, layers, c.rms_norm_eps,
            float(rope.get("rope_theta", getattr(c, "rope_theta", 10_000.0))), c.max_position_embeddings,
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "aux_layers": list(self.aux_layers)}


SERVED = ("llama", "qwen2", "qwen3", "mistral")


class RmsNorm(nn.Module):  # type: ignore[misc]
    """x / √(mean x² + ε) · w, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps, self.convention = nn.Parameter(torch.ones(size)), eps, "llama"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        weight = self.weight.float() + (1.0 if self.convention == "plus_one" else 0.0)
        return (wide * weight).to(x.dtype)


Cache = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [B, KV heads, T, D] of each step so far."""


class Attention(nn.Module):  # type: ignore[misc]
    """Grouped attention over what the chain of each row has seen; rotary positions as in Llama."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.config = c
        width, wide = 2 * c.hidden_size, c.num_attention_heads * c.head_dim
        self.q_proj = nn.Linear(width, wide, bias=False)
        self.k_proj = nn.Linear(width, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(width, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(wide, c.hidden_size, bias=False)
        self.stored: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        """What the cache makes of keys and values."""

    def forward(self, x: torch.Tensor, step: int, cache: Cache) -> torch.Tensor:
        """x [B, T, 2H] of step `step`; its keys and values join `cache`."""
        c, (batch, length, _) = self.config, x.shape
        groups = c.num_attention_heads // c.num_key_value_heads
        q = self.q_proj(x).view(batch, length, c.num_key_value_heads, groups, c.head_dim)
        k, v = (p(x).view(batch, length, c.num_key_value_heads, c.head_dim) for p in (self.k_proj, self.v_proj))
        cos, sin = _rotary(c, torch.arange(length, device=x.device) + step, x.dtype)
        q = _rotated(q.permute(0, 2, 3, 1, 4), cos, sin)  # [B, K, G, T, D]
        cache.append((self.stored(_rotated(k.transpose(1, 2), cos, sin)), self.stored(v.transpose(1, 2))))
        (first_k, first_v), later = cache[0], cache[1:]
        scores = torch.matmul(q, first_k[:, :, None].transpose(-1, -2)).float()
        above = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
        own = [(q * key[:, :, None]).sum(-1, keepdim=True).float() for key, _ in later]
        weights = softmax(torch.cat([scores, *own], -1) * c.head_dim**-0.5, -1).to(x.dtype)
        mixed = torch.matmul(weights[..., :length], first_v[:, :, None])
        for i, (_, value) in enumerate(later):
            mixed = mixed + weights[..., length + i : length + i + 1] * value[:, :, None]
        out: torch.Tensor = self.o_proj(mixed.permute(0, 3, 1, 2, 4).reshape(batch, length, -1))
        return out


class Mlp(nn.Module):  # type: ignore[misc]
    """Llama's gated layer."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] → [..., H]."""
        out: torch.Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):  # type: ignore[misc]
    """The one layer, `midlayer` in the file."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.hidden_norm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn, self.mlp = Attention(c), Mlp(c)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, step: int, cache: Cache) -> torch.Tensor:
        """The state before the last norm, [B, T, H]."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, step, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Head(nn.Module):  # type: ignore[misc]
    """The head. `d2t` [draft vocabulary] is what is added to a draft id to get the target's, as in the file."""

    d2t: torch.Tensor

    def __init__(self, config: HeadConfig, draft_ids: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.aux_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", draft_ids.long() - torch.arange(len(draft_ids)))

    @property
    def draft_ids(self) -> torch.Tensor:
        """The target's id of each draft id, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def step(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: int, cache: Cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits over the draft vocabulary [B, T, V], state for the next step [B, T, H])."""
        hidden = self.midlayer(embedded, hidden, step, cache)
        return self.lm_head(self.norm(hidden)), hidden


def start(head: Head, target: Any, scale: torch.Tensor) -> None:
    """First weights: output rows and last norm of the target, small random ones elsewhere.

    `scale` [aux layers] is the rms of each hidden state, by which `fc` divides: they differ a hundredfold.
    """
    c = head.config
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 0.02)
        parts = head.fc.weight.view(c.hidden_size, len(c.aux_layers), c.hidden_size)
        parts.normal_(0, (len(c.aux_layers) * c.hidden_size) ** -0.5)
        parts /= scale.to(parts).clamp_min(1e-6)[None, :, None]
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[head.draft_ids.to(target.device)])
        head.norm.weight.copy_(target.base_model.norm.weight)


def _rotary(c: HeadConfig, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.arange(0, c.head_dim, 2, device=positions.device, dtype=torch.float32) / c.head_dim
    angles = positions[:, None].float() * c.rope_theta**-half
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


# What the target says about a text, and what the head makes of it.


@dataclass(frozen=True)
class Observed:
    """A batch of texts and the target's states on it: ids and mask [B, T], aux [B, T, 3H], last [B, T, H] after its norm."""

    ids: torch.Tensor
    mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor


@torch.no_grad()  # type: ignore[untyped-decorator]
def observe(target: Any, ids: torch.Tensor, mask: torch.Tensor, aux_layers: tuple[int, ...]) -> Observed:
    """One pass of the target over texts that are padded on the right; states are used at once and never stored."""
    out = target.base_model(input_ids=ids, output_hidden_states=True, use_cache=False)
    return Observed(ids, mask, torch.cat([out.hidden_states[i] for i in aux_layers], -1), out.last_hidden_state)


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Row p becomes row p + `by`; zeros come in at the end of dimension 1."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1) if by else x


@dataclass(frozen=True)
class Losses:
    """Of a batch: the loss to minimise; by step, the mean cross-entropy and the share whose top token is the target's."""

    total: torch.Tensor
    by_step: torch.Tensor
    agreement: torch.Tensor


def losses(head: Head, target: Any, seen: Observed, depth: int, decay: float = 0.8) -> Losses:
    """Training-time test: `depth` steps unrolled on the head's own states, each against the target's distribution.

    The target's probabilities are renormalised over the draft vocabulary; a position whose likeliest token lies outside
    teaches nothing. Step j weighs `decay`ʲ.
    """
    embed, rows = target.get_input_embeddings(), head.draft_ids
    with torch.no_grad():
        output = target.get_output_embeddings().weight
        wanted = linear(seen.last, output[rows]).float()
        top = torch.cat([linear(part, output).argmax(-1) for part in seen.last.flatten(0, 1).split(4096)])
        top = top.view(seen.ids.shape)
        known = torch.zeros(output.shape[0], dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
        taught = known[top] & seen.mask
    hidden, cache, terms, agree = head.fc(seen.aux), Cache(), [], []
    for j in range(depth):
        embedded = embed(shifted(seen.ids, j + 1)).to(hidden.dtype)
        logits, hidden = head.step(embedded, hidden, j, cache)
        use = shifted(taught, j + 1)
        logits, soft = logits[use].float(), softmax(shifted(wanted, j + 1)[use], -1)
        terms.append(-(soft * logits.log_softmax(-1)).sum(-1).mean())
        right = rows[logits.argmax(-1)] == shifted(top, j + 1)[use]
        # Positions outside the draft vocabulary count as missed.
        agree.append(right.sum() / shifted(seen.mask, j + 1).sum().clamp_min(1))
    by_step = torch.stack(terms)
    weights = decay ** torch.arange(depth, device=by_step.device)
    return Losses((by_step * weights).sum() / weights.sum(), by_step.detach(), torch.stack(agree).detach())


@torch.no_grad()  # type: ignore[untyped-decorator]
def draft(head: Head, embed: Callable[[torch.Tensor], torch.Tensor], seen: Observed, depth: int) -> torch.Tensor:
    """The greedy drafts of every row, [B, T, depth]: entry [b, p, j] guesses token p + 2 + j after text up to p + 1."""
    hidden, cache, drafts = head.fc(seen.aux), Cache(), []
    token = shifted(seen.ids, 1)
    for j in range(depth):
        logits, hidden = head.step(embed(token).to(hidden.dtype), hidden, j, cache)
        token = head.draft_ids[logits.argmax(-1)]
        drafts.append(token)
    return torch.stack(drafts, -1)


@dataclass(frozen=True)
class Walk:
    """What an engine counts over one text: its steps, and how many accepted at least the first, second, … draft."""

    steps: int
    accepted: tuple[int, ...]


def walk(ids: list[int], drafts: list[list[int]], begin: int) -> Walk:
    """Speculative decoding of a text that the target wrote: drafts [T][depth], `begin` the first written token.

    A step after token n accepts its drafts up to the first that differs from the text, and the target adds one token. So it
    is at temperature 0, and at any other for greedy drafts: a draft is accepted exactly if the target's own draw is it.
    Steps that reach past the end of the text are left out.
    """
    depth = len(drafts[0]) if drafts else 0
    counts, steps, n = [0] * depth, 0, begin
    while n >= 1 and n + depth < len(ids):
        right = _leading(drafts[n - 1], ids[n + 1 :])
        for j in range(right):
            counts[j] += 1
        steps += 1
        n += right + 1
    return Walk(steps, tuple(counts))


def _leading(drafts: list[int], text: list[int]) -> int:
    return next((j for j, (a, b) in enumerate(zip(drafts, text, strict=False)) if a != b), len(drafts))


def batches(texts: list[list[int]], tokens: int) -> Iterator[list[int]]:
    """Indices of texts of like length, so that a batch of padded rows holds at most `tokens`."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    part: list[int] = []
    for i in order:
        if part and len(texts[i]) * (len(part) + 1) > tokens:
            yield part
            part = []
        part.append(i)
    if part:
        yield part


def padded(texts: list[list[int]], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) [B, T], padded on the right."""
    width = max(map(len, texts))
    ids = torch.tensor([t + [0] * (width - len(t)) for t in texts], device=device)
    mask = torch.tensor([[True] * len(t) + [False] * (width - len(t)) for t in texts], device=device)
    return ids, mask


# -----------------------------------------------------------------------------
# A head as files that vLLM loads with `{"method": "eagle3", "model": DIR}`: config.json and model.safetensors.
#
# The target's embedding is not stored: vLLM shares it. `training.json` says of which target the head is, by its sizes
# and its tokens, so that a head is refused beside another.


ARCHITECTURE = "LlamaForCausalLMEagle3"


def target_facts(folder: Path) -> dict[str, str]:
    """What names a target: the sizes in its config, and the hash of its tokens and their ids.

    The bytes of tokenizer.json differ between releases of transformers that write the same tokenizer.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = {k: config.get(k) for k in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    try:
        held = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = held["model"]["vocab"]
        tokens = dict(vocab) if isinstance(vocab, dict) else {t: i for i, (t, _) in enumerate(vocab)}
        tokens |= {t["content"]: t["id"] for t in held.get("added_tokens") or ()}
        digest = vocabulary_sha256(tokens)
    except (OSError, ValueError, KeyError, TypeError):
        digest = ""
    return {"sizes": json.dumps(sizes, sort_keys=True), "vocabulary": digest, "name": folder.name}


def write_head(folder: Path, head: Head, training: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> int:
    """Write the files; returns the bytes of the weights. AssayError where they cannot be written."""
    c = head.config
    config = {
        "architectures": [ARCHITECTURE], "model_type": "llama", "torch_dtype": str(dtype).removeprefix("torch."),
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim,
        "vocab_size": c.vocab_size, "draft_vocab_size": c.draft_vocab_size, "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta}, "max_position_embeddings": c.max_position_embeddings, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "target_hidden_size": c.hidden_size,
        "num_target_layers": c.target_layers,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(c.aux_layers), "use_aux_hidden_state": True},
    }  # fmt: skip
    tensors = {n: p.detach().to("cpu", dtype).contiguous() for n, p in head.named_parameters()}
    if c.draft_vocab_size < c.vocab_size:  # vLLM 0.32 knows no map where there is nothing to map
        known = torch.zeros(c.vocab_size, dtype=torch.bool)
        known[head.draft_ids.cpu()] = True
        tensors |= {"d2t": head.d2t.cpu().contiguous(), "t2d": known}
    body = save(tensors, metadata={"format": "pt"})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
        write_atomically(folder / "model.safetensors", body)
        write_atomically(folder / "training.json", json.dumps(training, indent=1) + "\n")
    except OSError as error:
        raise cannot_write(folder, error) from error
    return len(body)


def cannot_write(path: Path, error: OSError, after: str = "") -> AssayError:
    """The error for a disk that is full, or a folder that cannot be written."""
    return AssayError(
        f"{path} cannot be written: {error.strerror or error}{after}",
        finding_id="speculation.head_unwritable",
        remedy="make room or name another folder; the same command goes on from its last checkpoint",
    )


def read_head(folder: Path, target: Path | None = None) -> Head:
    """The head in `folder`, in float32. AssayError where it is none of this layout, incomplete, or of another target."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError) as error:
        raise _no_head(folder, f"cannot be read: {error}") from error
    except Exception as error:  # what safetensors raises for a damaged file is a class of its own
        raise _no_head(folder, f"holds no readable weights: {error}") from error
    if config.get("architectures") != [ARCHITECTURE]:
        raise _no_head(folder, f"is no EAGLE-3 head of Llama's layout, but {config.get('architectures')}")
    eagle = config.get("eagle_config") or {}
    fields = {n: config[n] for n in HeadConfig.__dataclass_fields__ if n in config}
    aux = tuple(eagle.get("eagle_aux_hidden_state_layer_ids") or ())
    if target is not None:
        _same_target(folder, config, target)
    try:
        head = Head(
            HeadConfig(**fields, aux_layers=aux, target_layers=config["num_target_layers"]),
            tensors.pop("d2t", torch.tensor(0)) + torch.arange(config["draft_vocab_size"]),
        )
        tensors.pop("t2d", None)
        missing, extra = head.load_state_dict({n: t.float() for n, t in tensors.items()}, strict=False)
    except (KeyError, TypeError, RuntimeError) as error:
        raise _no_head(folder, f"does not fit its own config: {' '.join(str(error).split())[:200]}") from error
    if lost := [n for n in missing if n != "d2t"]:
        raise _no_head(folder, f"has no {lost[0]}" + (f" and {len(lost) - 1} more" if lost[1:] else ""))
    if extra:
        raise _no_head(folder, f"has a tensor that the layout does not know: {extra[0]}")
    return head


def _same_target(folder: Path, config: Mapping[str, Any], target: Path) -> None:
    own = json.loads((target / "config.json").read_text(encoding="utf-8"))
    for name, mine, theirs in (
        ("vocab_size", config.get("vocab_size"), own.get("vocab_size")),
        ("hidden_size", config.get("target_hidden_size"), own.get("hidden_size")),
        ("num_hidden_layers", config.get("num_target_layers"), own.get("num_hidden_layers")),
    ):
        if mine and theirs and mine != theirs:
            raise _no_head(folder, f"is for a target with {name} {mine}, and {target.name} has {theirs}")
    try:
        trained = json.loads((folder / "training.json").read_text(encoding="utf-8"))["target"]
    except (OSError, ValueError, KeyError):
        return
    own_vocabulary = target_facts(target)["vocabulary"]
    if own_vocabulary and trained.get("vocabulary") not in (None, "", own_vocabulary):
        raise _no_head(folder, f"was trained with the tokenizer of {trained['name']}, and {target.name} has another")


def _no_head(folder: Path, why: str) -> AssayError:
    return AssayError(
        f"the head {folder} {why}",
        finding_id="speculation.head_mismatch",
        remedy="name the head of this target, or make one: assay heads train MODEL --out DIR",
    )
