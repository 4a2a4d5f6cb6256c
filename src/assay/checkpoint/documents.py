"""What each JSON document of a checkpoint may say: keys with types and bounds.

A key that is in no table is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from assay.checkpoint.document_types import (
    ANYTHING,
    DTYPE,
    FILES,
    HEADS,
    ID,
    IDS,
    LAYER,
    LAYERS,
    LENGTH,
    LIST,
    MAYBE,
    MAYBES,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_TOKENS,
    NAMES,
    NUMBERS,
    OBJECT,
    RECIPES,
    SWITCH,
    TEXT,
    TEXTS,
    TILE,
    TOKEN,
    TOKENS,
    VOCABULARY,
    WIDTH,
    WIDTHS,
    Each,
    Kind,
    Nesting,
    Table,
    above,
    either,
    number,
    one_of,
    optional,
    several,
    whole,
)

ROPE: Table = Nesting(
    {
        "type": TEXT,
        "rope_type": TEXT,
        "factor": number(0, 1e6),
        "rope_theta": either(above(0, 1e18), NUMBERS),
        "original_max_position_embeddings": LENGTH,
        "low_freq_factor": number(0, 1e6),
        "high_freq_factor": number(0, 1e6),
        "short_factor": NUMBERS,
        "long_factor": NUMBERS,
        "partial_rotary_factor": number(0, 1),
        "mrope_section": NUMBERS,
        **optional(
            {
                "beta_fast": number(0, 1e6),
                "beta_slow": number(0, 1e6),
                "mscale": number(0, 1e6),
                "alpha": number(0, 1e9),
                "mscale_all_dim": number(0, 1e6),
                "attention_factor": number(0, 1e6),
                "truncate": SWITCH,
                "mrope_interleaved": SWITCH,
            }
        ),
    }
)

_BITS = number(0.5, 32)

_GROUP = whole(-1, 1 << 20)

_SCHEME: Table = {
    "num_bits": whole(1, 32),
    "group_size": _GROUP,
    "type": one_of("int", "float"),
    "symmetric": SWITCH,
    "strategy": one_of("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"),
    "dynamic": either(SWITCH, one_of("local")),
    "block_structure": TILE,
}

_MODULES = Each({"bits": _BITS, "group_size": _GROUP, "sym": SWITCH, "desc_act": SWITCH})

QUANTIZATION: Table = {
    "quant_method": TEXT,
    "bits": _BITS,
    "w_bit": _BITS,
    "group_size": _GROUP,
    "q_group_size": _GROUP,
    "mode": TEXT,
    "sym": SWITCH,
    "desc_act": SWITCH,
    "zero_point": SWITCH,
    "lm_head": either(SWITCH, OBJECT),
    "version": TEXT,
    "format": TEXT,
    "modules_to_not_convert": NAMES,
    "ignored_layers": NAMES,
    "ignore": NAMES,
    "exclude_modules": NAMES,
    "modules_in_block_to_quantize": LIST,
    "block_name_to_quantize": NAMES,
    "to_quant_block_names": either(TEXT, LIST),
    "packing_format": TEXT,
    "dynamic": _MODULES,
    "extra_config": _MODULES,
    "weight_block_size": TILE,
    "activation_scheme": one_of("static", "dynamic"),
    "fmt": TEXT,
    "scale_fmt": TEXT,
    "quant_algo": TEXT,
    "kv_cache_quant_algo": TEXT,
    "kv_cache_scheme": _SCHEME,
    "load_in_4bit": SWITCH,
    "load_in_8bit": SWITCH,
    "llm_int8_skip_modules": TEXTS,
    "quant_type": RECIPES,
    "skip_modules": TEXTS,
    "producer": {"name": TEXT},
    "quant_config": {"weight_quant_params": {"nbits": _BITS, "group_size": _GROUP}},
    "quantized_layers": Each({"quant_algo": TEXT, "group_size": _GROUP}),
    "config_groups": Each(
        {
            "targets": TEXTS,
            "weights": _SCHEME,
            "input_activations": _SCHEME,
            "output_activations": _SCHEME,
            "format": TEXT,
        }
    ),
    **optional(
        {
            "damp_percent": number(0, 1),
            "true_sequential": SWITCH,
            "static_groups": SWITCH,
            "checkpoint_format": TEXT,
            "data_type": TEXT,
            "iters": whole(0, 1 << 20),
            "nsamples": whole(0, 1 << 30),
            "backend": TEXT,
            "bnb_4bit_quant_type": TEXT,
            "bnb_4bit_use_double_quant": SWITCH,
            "bnb_4bit_compute_dtype": TEXT,
            "llm_int8_threshold": number(0, 1e6),
            "quantization_status": TEXT,
            "global_compression_ratio": number(0, 1e6),
        }
    ),
}

_MODELOPT: Table = {**QUANTIZATION, "quantization": QUANTIZATION}

_MODEL: Table = {
    "architectures": several(TEXT),
    "model_type": TEXT,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTHS,
    "num_hidden_layers": whole(1, MOST_LAYERS),
    "num_attention_heads": either(HEADS, several(HEADS)),
    "num_key_value_heads": either(HEADS, several(HEADS)),
    "head_dim": MAYBE,
    "vocab_size": whole(1, MOST_TOKENS),
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": SWITCH,
    "attention_bias": SWITCH,
    "mlp_bias": SWITCH,
    "use_qk_norm": SWITCH,
    "layer_types": TEXTS,
    "torch_dtype": DTYPE,
    "dtype": DTYPE,
    "rope_theta": either(above(0, 1e18), NUMBERS),
    "rope_scaling": ROPE,
    "rope_parameters": ROPE,
    "partial_rotary_factor": number(0, 1),
    "sliding_window": whole(-1, MOST_POSITIONS),
    "use_sliding_window": SWITCH,
    "num_experts": MAYBES,
    "n_routed_experts": MAYBES,
    "num_local_experts": MAYBES,
    "n_shared_experts": MAYBES,
    "moe_intermediate_size": MAYBES,
    "shared_expert_intermediate_size": MAYBE,
    "num_experts_per_tok": MAYBES,
    "first_k_dense_replace": LAYER,
    "decoder_sparse_step": LAYER,
    "mlp_only_layers": either(LAYERS, Kind("an empty list", lambda v: v == [])),
    "q_lora_rank": MAYBE,
    "kv_lora_rank": MAYBE,
    "qk_rope_head_dim": MAYBE,
    "qk_nope_head_dim": MAYBE,
    "v_head_dim": MAYBE,
    "index_topk": MAYBE,
    "full_attention_interval": whole(1, MOST_LAYERS),
    "linear_num_key_heads": WIDTH,
    "linear_num_value_heads": WIDTH,
    "linear_key_head_dim": WIDTH,
    "linear_value_head_dim": WIDTH,
    "linear_conv_kernel_dim": WIDTH,
    "num_nextn_predict_layers": whole(0, 64),
    "num_mtp_layers": whole(0, 64),
    "mtp_num_hidden_layers": whole(0, 64),
    "num_mtp_modules": whole(0, 64),
    "mtp_config": {"num_nextn_predict_layers": whole(0, 64)},
    "draft_vocab_size": whole(1, MOST_TOKENS),
    "target_hidden_size": WIDTH,
    "num_aux_hidden_states": whole(1, 64),
    "eagle_aux_hidden_state_layer_ids": LAYERS,
    "aux_hidden_state_layer_ids": LAYERS,
    "target_layer_ids": LAYERS,
    "dspark_target_layer_ids": LAYERS,
    "num_target_layers": whole(1, MOST_LAYERS),
    "mask_token_id": ID,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "layer_ids": LAYERS,
        "use_aux_hidden_state": SWITCH,
    },
    "dflash_config": {
        "target_layer_ids": LAYERS,
        "layer_ids": LAYERS,
        "mask_token_id": ID,
        "use_aux_hidden_state": SWITCH,
    },
    "bos_token_id": IDS,
    "eos_token_id": IDS,
    "decoder_start_token_id": IDS,
    "auto_map": OBJECT,
    "quantization_config": _MODELOPT,
    "compression_config": _MODELOPT,
    "quantization": QUANTIZATION,
    **optional(
        {
            "pad_token_id": IDS,
            "rms_norm_eps": number(0, 1),
            "layer_norm_eps": number(0, 1),
            "hidden_act": TEXT,
            "initializer_range": number(0, 1e3),
            "attention_dropout": number(0, 1),
            "use_cache": SWITCH,
            "pretraining_tp": whole(0, 1 << 16),
            "rope_interleave": SWITCH,
            "n_group": MAYBE,
            "topk_group": MAYBE,
            "norm_topk_prob": SWITCH,
            "routed_scaling_factor": number(0, 1e6),
            "scoring_func": TEXT,
            "topk_method": TEXT,
            "router_aux_loss_coef": number(0, 1e6),
            "output_router_logits": SWITCH,
            "transformers_version": TEXT,
            "max_window_layers": LAYER,
            "moe_layer_freq": either(LAYER, several(LAYER)),
            "ep_size": whole(0, 1 << 16),
            "attn_logit_softcapping": number(0, 1e6),
            "final_logit_softcapping": number(0, 1e6),
            "query_pre_attn_scalar": number(0, 1e6),
            "block_size": whole(1, 1 << 20),
            "index_head_dim": MAYBE,
            "index_n_heads": MAYBE,
            "speculators_model_type": TEXT,
            "attn_output_gate": SWITCH,
            "hidden_activation": TEXT,
            "time_step_limit": ANYTHING,
        }
    ),
}

NESTED = ("text_config", "llm_config", "language_config", "transformer_layer_config")
"""Where a config keeps the language model's part, if not at its top."""

CONFIG: Table = {
    **_MODEL,
    **dict.fromkeys(NESTED, _MODEL),
    "vision_config": OBJECT,
    "audio_config": OBJECT,
}

GENERATION: Table = {
    "temperature": number(0, 10),
    "top_p": above(0, 1),
    "min_p": number(0, 1),
    "top_k": whole(-1, MOST_TOKENS),
    "repetition_penalty": above(0, 5),
    "max_new_tokens": LENGTH,
    "max_length": LENGTH,
    "do_sample": SWITCH,
    "bos_token_id": IDS,
    "eos_token_id": IDS,
    "decoder_start_token_id": IDS,
    **optional(
        {
            "pad_token_id": IDS,
            "transformers_version": TEXT,
            "typical_p": number(0, 1),
            "num_beams": whole(1, 1024),
        }
    ),
}

_MARKS = optional(
    dict.fromkeys(("special", "lstrip", "rstrip", "normalized", "single_word"), SWITCH)
)

_NAMED = Kind("text, or a list of named templates", lambda v: isinstance(v, str | list))

TOKENIZER_CONFIG: Table = {
    "bos_token": TOKEN,
    "eos_token": TOKEN,
    "pad_token": TOKEN,
    "unk_token": TOKEN,
    "chat_template": _NAMED,
    "added_tokens_decoder": Each({"content": TEXT, **_MARKS}),
    "additional_special_tokens": TOKENS,
    **optional(
        {
            "cls_token": TOKEN,
            "sep_token": TOKEN,
            "mask_token": TOKEN,
            "model_max_length": above(0, 1e31),
            "tokenizer_class": TEXT,
            "clean_up_tokenization_spaces": SWITCH,
            "add_bos_token": SWITCH,
            "add_eos_token": SWITCH,
            "add_prefix_space": SWITCH,
            "padding_side": TEXT,
            "legacy": SWITCH,
            "split_special_tokens": SWITCH,
            "extra_special_tokens": either(OBJECT, TOKENS),
            "errors": TEXT,
        }
    ),
}

TOKENIZER: Table = {
    "model": {
        "type": TEXT,
        "vocab": VOCABULARY,
        "merges": LIST,
        **optional(
            {
                "unk_token": TEXT,
                "dropout": number(0, 1),
                "fuse_unk": SWITCH,
                "byte_fallback": SWITCH,
                "unk_id": ID,
                "ignore_merges": SWITCH,
                "continuing_subword_prefix": TEXT,
                "end_of_word_suffix": TEXT,
            }
        ),
    },
    "added_tokens": Each({"id": ID, "content": TEXT, **_MARKS}, list),
    **optional(
        {
            "version": TEXT,
            "normalizer": OBJECT,
            "pre_tokenizer": OBJECT,
            "post_processor": OBJECT,
            "decoder": OBJECT,
            "truncation": OBJECT,
            "padding": OBJECT,
        }
    ),
}

INDEX = "model.safetensors.index.json"

SIDECARS = (
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
)

TABLES: Mapping[str, Table] = {
    "config.json": CONFIG,
    "generation_config.json": GENERATION,
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "tokenizer.json": TOKENIZER,
    "chat_template.json": {"chat_template": _NAMED},
    INDEX: {"metadata": {"total_size": number(0, 1 << 60)}, "weight_map": FILES},
    **dict.fromkeys(SIDECARS, _MODELOPT),
}
"""By file name."""
