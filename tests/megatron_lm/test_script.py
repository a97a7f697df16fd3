"""What the forward step of a script is given, in the forms of all releases."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.integrations.lm_adaptor.checkout import SUPPORTED_VERSIONS
from megatron.integrations.lm_adaptor.hooks import Adaptor
from megatron.integrations.lm_adaptor.replacements import SCRIPT, replaced_in

BATCH = {name: name for name in ("tokens", "labels", "loss_mask", "position_ids", "packed_seq_params")}

SIX_VALUES = """
def get_batch(data_iterator, vp_stage=None):
    raise AssertionError("the script's own")

def forward_step(data_iterator):
    tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params = get_batch(data_iterator, 0)
    return tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params
"""
TEN_FIELDS = """
counted = []

def get_batch(data_iterator, vp_stage=None):
    raise AssertionError("the script's own")

class PackedSeqParams:
    def __init__(self, **fields):
        raise AssertionError("the script's own")

def forward_step(data_iterator):
    (attention_mask, cu_seqlens, cu_seqlens_padded, hybrid_cp_group, labels, local_cp_size, loss_mask, max_seqlen,
     position_ids, tokens) = get_batch(data_iterator, 0)
    packed_seq_params = None
    if cu_seqlens is not None:
        cu_seqlens = SQUEEZED
        counted.append(cu_seqlens.numel())
        packed_seq_params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_q_padded=cu_seqlens_padded,
            total_tokens=int(cu_seqlens[-1]),
            max_seqlen_q=int(max_seqlen.item()), cp_group=hybrid_cp_group,
            local_cp_size=int(local_cp_size.item()) if local_cp_size is not None else None,
        )
    return tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params
"""
"""Only boundaries of two or more count for Megatron-LM's FLOPs."""
FORMS = {
    "0.16.1": SIX_VALUES,
    "0.17.1": SIX_VALUES,
    "0.18.2": TEN_FIELDS.replace("SQUEEZED", "cu_seqlens[0]"),
    "0.19.1": TEN_FIELDS.replace("SQUEEZED", "cu_seqlens.squeeze(0)"),
    "0.19.2": TEN_FIELDS.replace("SQUEEZED", "cu_seqlens.squeeze(0)"),
    "0.20.0": TEN_FIELDS.replace("SQUEEZED", "cu_seqlens.squeeze(0)"),
}


def prepare(version: str, namespace: dict[str, Any]) -> None:
    """Replace what the release says in a script."""
    in_script = {one.symbol: one.ours for one in replaced_in(version) if one.module == SCRIPT}
    made = Adaptor(get_args=Namespace, in_script=in_script, asked=Namespace(), forward_step=namespace["forward_step"])
    made.prepare_script()


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_the_forward_step_gets_the_micro_batch_of_the_plan(version: str) -> None:
    namespace: dict[str, Any] = {}
    exec(FORMS[version], namespace)
    prepare(version, namespace)
    given = namespace["forward_step"](iter([BATCH]))
    assert given == ("tokens", "labels", "loss_mask", None, "position_ids", "packed_seq_params")
    assert all(count < 2 for count in namespace.get("counted", [])), (
        "Megatron-LM sums up FLOPs of its own, on all ranks"
    )


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_a_script_of_another_form_is_refused(version: str) -> None:
    symbols = [one.symbol for one in replaced_in(version) if one.module == SCRIPT]
    for missing in symbols:
        namespace: dict[str, Any] = {}
        exec(FORMS[version].replace(f"{missing}(", f"my_{missing}("), namespace)
        with pytest.raises(UnsupportedFeatureError, match=f"does not call a {missing} of its own module"):
            prepare(version, namespace)
    with pytest.raises(UnsupportedFeatureError, match="does not call a get_batch"):
        prepare(version, {"forward_step": SimpleNamespace()})
