"""The words of mamba-ssm, causal-conv1d, fla and Transformers for recurrences and their layers: what to write in their place."""

from __future__ import annotations

_OFFSETS = "write cu=, int32 offsets (B + 1,), with all sequences in one row: (total, ...) without the axis B"
_MEMORY = "write y, state = layer.with_state(x, state), and layer.step(x, state) for one token"
_LEAVE_OUT = "leave it out: it changes no result"
_STATE_LAYOUT = "leave it out: a state is (B, Hv, Dk, Dv); write state.mT for the other order"
_GATE = "write g= as the logarithm of the decay, -exp(A_log) softplus(a + dt_bias), and beta= as numbers from 0 to 1"
_INIT = "rooftile.integrations.mamba_ssm has it; or write the first values into the layer's parameters"

_PACKED = dict.fromkeys(("cu_seqlens", "seq_idx", "offsets", "cu_seqlens_cpu"), _OFFSETS)
_UNUSED = dict.fromkeys(
    ("chunk_size", "mode", "nrows", "backnrows", "use_fast_path", "use_mem_eff_path", "chunk_indices", "layer_idx"), _LEAVE_OUT
)

# these calls and their steps: ssd, selective_scan, gated_delta
CALL = {
    **_PACKED, **_UNUSED,
    **dict.fromkeys(("initial_state", "initial_states", "ssm_state"), "write state="),
    **dict.fromkeys(
        ("output_final_state", "return_final_states", "return_last_state", "return_varlen_states"),
        "write return_state=; it is True by default, and the call returns (y, state)",
    ),
    "head_first": "leave it out: tensors are (B, T, H, D); write x.transpose(1, 2) of (B, H, T, D)",
    **dict.fromkeys(("use_qk_l2norm_in_kernel", "qk_l2norm"), "write qk_norm=; it is True by default"),
    **dict.fromkeys(("dt_softplus", "delta_softplus"), "write softplus="),
    "delta_bias": "write dt_bias=", "delta": "write dt=", "u": "write x=",
    **dict.fromkeys(("dt_min", "dt_max"), "write dt_limit=(least, most), which clamps steps after softplus"),
    **dict.fromkeys(("state_v_first", "transpose_state_layout"), _STATE_LAYOUT),
    **dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "A_log"), _GATE),
    **dict.fromkeys(("state_batch_indices", "ssm_state_indices"), "write slots="),
    "state_dtype": "leave it out: states are float32, or float64 for float64 tensors",
}  # fmt: skip

# causal_conv and conv_step
CONVOLUTION = {
    **_PACKED, **_UNUSED,
    **dict.fromkeys(("initial_state", "initial_states", "cache", "conv_state"), "write tail=, oldest input first"),
    **dict.fromkeys(
        ("output_final_state", "return_final_states"), "write return_tail=; it is True by default, and the call returns (y, tail)"
    ),
    "final_states_out": "leave it out: the call returns (y, tail)",
    **dict.fromkeys(("conv_state_indices", "cache_indices"), "write slots="),
}  # fmt: skip

# the constructors of layers
LAYER = {
    **_UNUSED,
    **dict.fromkeys(("d_model", "hidden_size"), "write dim="),
    **dict.fromkeys(("d_state", "ssm_state_size"), "write state_size="),
    **dict.fromkeys(("d_conv", "conv_kernel", "conv_size", "conv_kernel_dim", "linear_conv_kernel_dim"), "write conv="),
    **dict.fromkeys(("headdim", "mamba_headdim"), "write head_dim="), **dict.fromkeys(("ngroups", "n_groups"), "write groups="),
    **dict.fromkeys(("dt_rank", "time_step_rank"), "write rank=; None is mamba-ssm's 'auto'"),
    **dict.fromkeys(("dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range"), _INIT),
    **dict.fromkeys(("norm_eps", "rms_norm_eps", "layer_norm_epsilon"), "write eps="),
    **dict.fromkeys(("use_conv_bias", "conv1d_bias"), "write conv_bias="),
    **dict.fromkeys(("use_bias", "proj_bias"), "write bias="),
    "d_inner": "write expand=: the channels are expand dim", "intermediate_size": "write expand=: the channels are expand dim",
    "rmsnorm": "leave it out: there always is one", "norm_before_gate": "leave it out: the norm is of y silu(z)",
    "use_gate": "leave it out: there always is one", "use_short_conv": "leave it out: there always is one",
    "num_heads": "write key_heads= and value_heads=", "num_v_heads": "write value_heads=", "num_k_heads": "write key_heads=",
    "linear_num_key_heads": "write key_heads=", "linear_num_value_heads": "write value_heads=",
    "linear_key_head_dim": "write key_dim=", "linear_value_head_dim": "write value_dim=", "head_v_dim": "write value_dim=",
    "head_k_dim": "write key_dim=", "expand_v": "write value_dim=, the width of a value head",
    "allow_neg_eigval": "there is none: beta is from 0 to 1",
}  # fmt: skip

# the calls of layers
LAYER_CALL = {
    **_PACKED, "hidden_states": "write x=", "u": "write x=",
    **dict.fromkeys(
        ("inference_params", "cache_params", "past_key_values", "use_cache", "cache_position", "state", "initial_states"), _MEMORY
    ),
    "attention_mask": "there is no padding: pack the sequences, (total, dim) with cu=",
    "seqlen": "leave it out: x is (B, T, dim)", "output_attentions": "leave it out: there are none",
}  # fmt: skip
