"""Transformer Engine's modules with the seam: what is refused, what stays as it was, and the te kernel on its own."""

from __future__ import annotations

import pytest
import te_modules

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
def test_other_comm_types_go_through_bit_for_bit(te_ranks, comm_type):
    assert te_ranks().run(te_modules.untouched, comm_type) == [True] * 4


def test_installing_twice_is_harmless_and_uninstalling_restores(te_ranks):
    for changed, same, restored in te_ranks().run(te_modules.install_and_uninstall):
        assert changed
        assert same
        assert restored


@pytest.mark.parametrize("later", [False, True], ids=["constructor", "set_context_parallel_group"])
def test_transformer_engine_alone_on_some_of_the_ranks(te_ranks, later):
    for errors in te_ranks().run(te_modules.without_megatrons_groups, later):
        assert max(errors) < 1e-2


REFUSED = {
    "megatron: dropout": ("megatron", {"attention_dropout": 0.1}, "attention_dropout=0.1", "use attention_dropout=0"),
    "megatron: window": ("megatron", {"window_size": (63, 0)}, "window_size=(63, 0)", "sliding-window"),
    "megatron: sinks": ("megatron", {"softmax_type": "learnable"}, "softmax_type='learnable'", "sinks"),
    "megatron: FP8": ("megatron", {"fp8_dot_product_attention": True}, "fp8_dot_product_attention=True", "FP8"),
    "megatron: max logit": ("megatron", {"qk_clip": True}, "return_max_logit=True", "maximum attention logit"),
    "te: dropout": ("te", {"attention_dropout": 0.1}, "attention_dropout=0.1", "use attention_dropout=0"),
    "te: sinks": ("te", {"softmax_type": "off-by-one"}, "softmax_type='off-by-one'", "sinks"),
    "te: packed": ("te", {"qkv_format": "thd", "attn_mask_type": "padding_causal"}, "qkv_format='thd'", "packed"),
    "te: padding": ("te", {"attn_mask_type": "padding"}, "attn_mask_type='padding'", "another cp_comm_type"),
    "te: cross attention": ("te", {"attention_type": "cross"}, "attention_type='cross'", "cross attention"),
    "call: bias": ("call", {"attn_bias_type": "post_scale_bias"}, "attn_bias_type='post_scale_bias'", "bias"),
    "call: window": ("call", {"window_size": (15, 0)}, "window_size=(15, 0)", "sliding-window"),
    "call: FP8": ("call", {"fp8": True}, "fp8=True", "FP8"),
    "call: dropout": ("call", {"dropout_p": 0.1}, "dropout_p=0.1", "dropout"),
    "call: max logit": ("call", {"return_max_logit": True}, "return_max_logit=True", "maximum attention logit"),
    "call: mask": ("call", {"attn_mask_type": "padding_causal"}, "attn_mask_type='padding_causal'", "masks"),
    "call: fp32": ("call", {"fp32": True}, "torch.float32 is not supported", "bfloat16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name_before_any_kernel(te_ranks, name):
    where, more, *says = REFUSED[name]
    for answer in te_ranks().run(te_modules.refusal, where, more):
        for text in says:
            assert text in answer


def test_softcap_is_refused_where_transformer_engine_has_it(te_ranks):
    import te_emulation

    if te_emulation.te_version() < (2, 20):
        pytest.skip("this Transformer Engine has no softcap")
    for answer in te_ranks().run(te_modules.refusal, "te", {"softcap": 30.0}):
        assert "softcap=30.0 with cp_comm_type 'mesh': capped scores" in answer


def test_fp32_with_a_half_only_kernel_is_refused_before_any_communication(te_ranks):
    for text, sent in te_ranks().run(te_modules.fp32_is_refused_before_any_communication):
        assert "kernel te: dtype torch.float32 is not supported" in text
        assert sent == 0


def test_the_te_kernel_equals_the_reference_on_every_block(te_ranks):
    for name, error in te_ranks().run(te_modules.block_errors)[0].items():
        assert error < (4e-3 if "bfloat16" in name else 1e-3), name


def test_the_te_kernel_refuses_dtypes_and_head_dims_by_name(te_ranks):
    answers = te_ranks().run(te_modules.check_refusals)[0]
    assert "--mesh-kernel te: dtype torch.float32 is not supported" in answers["fp32"]
    assert "head dim 12 is not supported" in answers["head dim 12"]
    assert "head dim 264 is not supported" in answers["head dim 264"]
    assert "head dim of V 260 is not supported" in answers["V of 260"]


def test_a_version_out_of_range_is_refused_by_name(te_ranks):
    for answer in te_ranks().run(te_modules.another_version):
        assert "is not supported; install 'transformer-engine>=1.0,<1.1'" in answer
