"""Draft heads of one layer: EAGLE-3's and MiMo's MTP layer, as vLLM reads both.

EAGLE-3: Li et al. 2025, arXiv 2503.01840. At position p a head reads the embedding of token p + 1
and the target's hidden states at p, runs one layer, and predicts token p + 2. EAGLE-3 mixes (`fc`)
three states and guesses over a reduced vocabulary with an output of its own; MTP reads the last
state before the target's final norm, and shares the target's output. The head's own hidden state
then replaces the target's, so it goes on for as many steps as are drafted.

Row p of every tensor here is the chain of drafts that begins at p: in step j it reads token
p + j + 1 at the rotary position p + j, and attends to step 0 of all rows up to p and to its own
earlier steps. An engine's cache holds the same when it drafts after p, so training and serving see
the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, silu, softmax

from assay.errors import UsageError
from assay_lab.heads.observed import Observed, shifted

NORMS = ("llama", "plus_one")
"""How a norm's weight is read: as it is, or (Gemma's convention) with 1 added."""


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head of a `kind`. `aux_layers` are ids of hidden states: 0 the embedding, i the
    output of layer i − 1.
    """

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
    kind: str = "eagle3"

    @classmethod
    def of_target(
        cls, model: Any, draft_vocab: int, intermediate: int = 0, kind: str = "eagle3"
    ) -> HeadConfig:
        """Sizes for a target of transformers; EAGLE-3's aux layers are vLLM's default, (2, L / 2, L
        − 3), MTP's is L.

        UsageError for a target beside which vLLM serves no head of this kind.
        """
        c = model.config.get_text_config()
        layers, rope, other = (
            c.num_hidden_layers,
            getattr(c, "rope_parameters", None) or {},
            "train --kind eagle3",
        )
        if kind == "mtp":
            aux: tuple[int, ...] = (layers,)
            draft_vocab = 0
            if c.model_type != "qwen2":
                raise _unserved(
                    f"no MTP head can be served beside {c.model_type}: of vLLM's MTP layers MiMo's"
                    " fits a plain model, and that model is Qwen2",
                    other,
                )
            if rope.get("rope_type", "default") != "default" or getattr(
                c, "use_sliding_window", False
            ):
                raise _unserved(
                    "no MTP head is made for scaled rotary positions or a sliding window", other
                )
            if intermediate not in (0, c.intermediate_size):
                raise _unserved(
                    f"an MTP layer has the width of its target's MLP, {c.intermediate_size}",
                    "leave --intermediate out",
                )
        else:
            aux = (2, layers // 2, layers - 3)
            if c.model_type not in SERVED:
                raise _unserved(
                    f"vLLM serves no EAGLE-3 head of Llama's layout for {c.model_type}",
                    f"targets are {', '.join(SERVED)}",
                )
            if len(set(aux)) < 3 or aux[2] < 1:
                raise _unserved(
                    f"a target of {layers} layers has no three different auxiliary layers (2, L/2,"
                    " L − 3)",
                    "take a target of at least 7 layers",
                )
        return cls(
            c.hidden_size,
            intermediate or c.intermediate_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            c.vocab_size,
            min(draft_vocab or c.vocab_size, c.vocab_size),
            aux,
            layers,
            c.rms_norm_eps,
            float(rope.get("rope_theta", getattr(c, "rope_theta", 10_000.0))),
            c.max_position_embeddings,
            kind,
        )

    def facts(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "aux_layers": list(self.aux_layers)}


SERVED = ("llama", "qwen2", "qwen3", "mistral")


def _unserved(why: str, remedy: str) -> UsageError:
    return UsageError(why, remedy=remedy, finding_id="speculation.head_layout")


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

    def __init__(self, c: HeadConfig, width: int, bias: bool = False) -> None:
        super().__init__()
        self.config = c
        wide = c.num_attention_heads * c.head_dim
        self.q_proj = nn.Linear(width, wide, bias=bias)
        self.k_proj = nn.Linear(width, c.num_key_value_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, c.num_key_value_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(wide, c.hidden_size, bias=False)
        self.stored: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        """What the cache makes of keys and values."""

    def forward(self, x: torch.Tensor, step: int, cache: Cache) -> torch.Tensor:
        """x [B, T, width] of step `step`; its keys and values join `cache`."""
        c, (batch, length, _) = self.config, x.shape
        groups = c.num_attention_heads // c.num_key_value_heads
        q = self.q_proj(x).view(batch, length, c.num_key_value_heads, groups, c.head_dim)
        k, v = (
            p(x).view(batch, length, c.num_key_value_heads, c.head_dim)
            for p in (self.k_proj, self.v_proj)
        )
        cos, sin = _rotary(c, torch.arange(length, device=x.device) + step, x.dtype)
        q = _rotated(q.permute(0, 2, 3, 1, 4), cos, sin)  # [B, K, G, T, D]
        cache.append(
            (self.stored(_rotated(k.transpose(1, 2), cos, sin)), self.stored(v.transpose(1, 2)))
        )
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
    """EAGLE-3's layer, `midlayer` in the file."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.hidden_norm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn, self.mlp = Attention(c, 2 * c.hidden_size), Mlp(c)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: int, cache: Cache
    ) -> torch.Tensor:
        """The state before the last norm, [B, T, H]."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, step, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


Teacher = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""(what `step` gives, its step) → (mean cross-entropy against the target, number of rows whose top
token is the target's).
"""


class Head(nn.Module):  # type: ignore[misc]
    """EAGLE-3's head. `d2t` [draft vocabulary] is what is added to a draft id to get the target's,
    as in the file.
    """

    d2t: torch.Tensor

    def __init__(self, config: HeadConfig, draft_ids: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(
            len(config.aux_layers) * config.hidden_size, config.hidden_size, bias=False
        )
        self.midlayer = Layer(config)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", draft_ids.long() - torch.arange(len(draft_ids)))

    @property
    def draft_ids(self) -> torch.Tensor:
        """The target's id of each draft id, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def first(self, seen: Observed) -> torch.Tensor:
        """The states that step 0 reads, [B, T, H]."""
        mixed: torch.Tensor = self.fc(seen.aux)
        return mixed

    def step(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: int, cache: Cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(state that the output reads, state for the next step), both [B, T, H]."""
        hidden = self.midlayer(embedded, hidden, step, cache)
        return self.norm(hidden), hidden

    def guess(self, state: torch.Tensor, target: Any) -> torch.Tensor:
        """The likeliest token of each row, [B, T]."""
        return self.draft_ids[self.lm_head(state).argmax(-1)]

    def teacher(self, target: Any, seen: Observed) -> Teacher:
        """The target's probabilities are renormalised over the draft vocabulary.

        A position whose likeliest token lies outside teaches nothing, and counts as missed.
        """
        rows = self.draft_ids
        with torch.no_grad():
            output = target.get_output_embeddings().weight
            wanted = linear(seen.last, output[rows]).float()
            top = torch.cat(
                [linear(part, output).argmax(-1) for part in seen.last.flatten(0, 1).split(4096)]
            )
            top = top.view(seen.ids.shape)
            known = torch.zeros(output.shape[0], dtype=torch.bool, device=rows.device).index_fill_(
                0, rows, True
            )
            taught = known[top] & seen.mask

        def teach(state: torch.Tensor, j: int) -> tuple[torch.Tensor, torch.Tensor]:
            use = shifted(taught, j + 1)
            logits, soft = (
                self.lm_head(state)[use].float(),
                softmax(shifted(wanted, j + 1)[use], -1),
            )
            loss = -(soft * logits.log_softmax(-1)).sum(-1).mean()
            return loss, (rows[logits.argmax(-1)] == shifted(top, j + 1)[use]).sum()

        return teach

    def start(self, target: Any, scale: torch.Tensor) -> None:
        """First weights: output rows and last norm of the target, small random ones elsewhere.

        `scale` [aux layers] is the rms of each hidden state, by which `fc` divides: they differ a
        hundredfold.
        """
        c = self.config
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0, 0.02)
            parts = self.fc.weight.view(c.hidden_size, len(c.aux_layers), c.hidden_size)
            parts.normal_(0, (len(c.aux_layers) * c.hidden_size) ** -0.5)
            parts /= scale.to(parts).clamp_min(1e-6)[None, :, None]
            self.lm_head.weight.copy_(
                target.get_output_embeddings().weight[self.draft_ids.to(target.device)]
            )
            self.norm.weight.copy_(target.base_model.norm.weight)


class Block(nn.Module):  # type: ignore[misc]
    """A decoder layer of Qwen2, `mtp_block` in vLLM."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn, self.mlp = Attention(c, c.hidden_size, bias=True), Mlp(c)

    def forward(self, hidden: torch.Tensor, step: int, cache: Cache) -> torch.Tensor:
        """[B, T, H] → [B, T, H]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), step, cache)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class MtpHead(nn.Module):  # type: ignore[misc]
    """MiMo's MTP layer as vLLM's `MiMoMTP` runs it, over the whole vocabulary by the target's own
    output.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config, h = config, config.hidden_size
        self.token_layernorm, self.hidden_layernorm = (
            RmsNorm(h, config.rms_norm_eps),
            RmsNorm(h, config.rms_norm_eps),
        )
        self.input_proj = nn.Linear(2 * h, h, bias=False)
        self.midlayer = Block(config)
        self.final_layernorm = RmsNorm(h, config.rms_norm_eps)

    def first(self, seen: Observed) -> torch.Tensor:
        """The target's states before its last norm, [B, T, H]."""
        return seen.aux

    def step(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: int, cache: Cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(state that the output reads, state for the next step): one and the same, after the last
        norm, [B, T, H].
        """
        if not step:  # vLLM puts zeros in place of the token at position 0
            embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], 1)
        both = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], -1)
        hidden = self.final_layernorm(self.midlayer(self.input_proj(both), step, cache))
        return hidden, hidden

    def guess(self, state: torch.Tensor, target: Any) -> torch.Tensor:
        """The likeliest token of each row, [B, T]."""
        output = target.get_output_embeddings().weight
        rows = state.to(output.dtype).flatten(0, -2)
        return torch.cat([linear(part, output).argmax(-1) for part in rows.split(ROWS)]).view(
            state.shape[:-1]
        )

    def teacher(self, target: Any, seen: Observed) -> Teacher:
        """The target's probabilities of all its tokens."""
        output = target.get_output_embeddings().weight

        def teach(state: torch.Tensor, j: int) -> tuple[torch.Tensor, torch.Tensor]:
            use = shifted(seen.mask, j + 1)
            loss, right = SharedLoss.apply(state[use], shifted(seen.last, j + 1)[use], output)
            return loss, right

        return teach

    def start(self, target: Any, scale: torch.Tensor) -> None:
        """First weights: the last norm of the target, small random ones elsewhere."""
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0, 0.02)
                    if module.bias is not None:
                        module.bias.zero_()
            self.input_proj.weight.normal_(0, self.input_proj.in_features**-0.5)
            self.final_layernorm.weight.copy_(target.base_model.norm.weight)


ROWS = 2048
"""Positions whose logits over a whole vocabulary are held at once."""


class SharedLoss(torch.autograd.Function):  # type: ignore[misc]
    """Cross-entropy of the target's and the head's distribution, both by one output that does not
    learn.

    Logits and gradient are made part by part, so that a vocabulary of 150,000 fits: ∂/∂x =
    (softmax(x Wᵀ) − p) W / N.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, last: torch.Tensor, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, last [N, H], output [V, H] → (mean over N, number of rows with the same top token)."""
        gradient = torch.empty_like(x)
        loss, right = (
            x.new_zeros((), dtype=torch.float32),
            torch.zeros((), dtype=torch.long, device=x.device),
        )
        for i in range(0, len(x), ROWS):
            q = linear(x[i : i + ROWS].to(output.dtype), output).float()
            p = linear(last[i : i + ROWS].to(output.dtype), output).float()
            right += (q.argmax(-1) == p.argmax(-1)).sum()
            p, q = p.softmax(-1), q.log_softmax(-1)
            loss -= (p * q).sum()
            gradient[i : i + ROWS] = (q.exp_().sub_(p)).to(output.dtype) @ output
        n = max(len(x), 1)
        ctx.save_for_backward(gradient / n)
        ctx.mark_non_differentiable(right)
        return loss / n, right

    @staticmethod
    def backward(ctx: Any, by: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Scaled by what comes in."""
        return ctx.saved_tensors[0] * by, None, None


AnyHead = Head | MtpHead


def _rotary(
    c: HeadConfig, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.arange(0, c.head_dim, 2, device=positions.device, dtype=torch.float32) / c.head_dim
    angles = positions[:, None].float() * c.rope_theta**-half
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
