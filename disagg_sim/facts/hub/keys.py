"""Keys of ``config.json`` that count no weight and no byte of cache, and those that only one value of is modelled."""

from __future__ import annotations

from typing import Any

_NO_SIZE = """
    _attn_implementation_autoset _name_or_path architectures attention_dropout auto_map aux_loss_alpha
    attention_value_scale base_model_ep_plan base_model_tp_plan bad_words_ids
    begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size ep_size exponential_decay_length_penalty
    final_logit_softcapping attn_logit_softcapping finetuning_task for_llm_compressor forced_bos_token_id
    forced_eos_token_id gate_lower_bound head_dtype hidden_act hidden_activation hidden_dropout id2label
    initial_context_length initializer_range is_decoder label2id length_penalty logits_scaling
    max_length max_window_layers min_length mamba_hidden_act mlp_hidden_act moe_renormalize
    moe_router_activation_func moe_router_dtype n_group no_repeat_ngram_size norm_topk_prob
    num_beam_groups num_beams num_expert_group num_logits_to_keep num_return_sequences original_max_position_embeddings
    output_attentions output_hidden_states output_multiplier output_router_logits output_scores partial_rotary_factor
    prefix pretraining_tp problem_type pruned_heads qk_head_dim qk_scale_factor query_pre_attn_scalar
    remove_invalid_values repetition_penalty rescale_prenorm_residual residual_in_fp32 return_dict
    return_dict_in_generate rotary_dim routed_scaling_factor router_aux_loss_coef router_jitter_noise
    scoring_func seq_aux suppress_tokens swiglu_alpha swiglu_limit swa_rope_theta temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p topk_group torch_dtype torchscript transformers_version
    typical_p unsloth_version unsloth_fixed use_bfloat16 use_bidirectional_attention use_cache use_grouped_topk
    use_mamba_kernels use_mrope vocab_size_per_layer_input attention_type attn_temperature_tuning floor_scale attn_scale
    cache_implementation no_rope_layers no_rope_layer_interval bos_token eos_token
    activation_situ_beta activation_situ_linear_beta layer_rope_theta compress_rope_theta
    time_step_floor time_step_limit time_step_max time_step_min time_step_rank quantization_config
    kv_cache_scheme use_gemma_norm model_type qk_norm_type output_gate_type moe_shared_expert_overlap
"""
#: Of training, generation, numerics, positions and files: they move no tensor's size.
NO_SIZE = frozenset(_NO_SIZE.split())
#: The same by how they begin or end.
NO_SIZE_BEGINS = ("mtp_", "rope_", "initializer_", "rms_norm_", "layer_norm_eps", "layernorm_eps", "indexer_rope_")
NO_SIZE_ENDS = ("_token_id", "_token_ids", "_eps", "_epsilon", "_token_index", "_dropout", "_loss_coef")

#: Key -> the values that can be expressed, and what any other would mean.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_encoder_decoder": ((False,), "encoders are not modelled"),
    "add_cross_attention": ((False,), "cross attention is not modelled"),
    "mlp_bias": ((False,), "biases of gated layers are not modelled"),
    "num_kv_shared_layers": ((0,), "caches that layers share are not modelled"),
    "hidden_size_per_layer_input": ((0,), "embeddings of each layer are not modelled"),
    "use_double_wide_mlp": ((False,), "layers of double width are not modelled"),
    "engram_layer_ids": (([],), "tables of n-grams are not modelled"),
}
