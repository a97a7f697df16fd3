"""What is decided and done about TransformerEngine before the first step."""

import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.enums import AttnBackend

from dynamic_cp.errors import DisagreementError, MemoryLimitError, UnsupportedFeatureError
from dynamic_cp.types import CP_COMM_TYPES, Topology
from megatron.decide import doctor
from megatron.dynamic_cp.attention.te import support as te_kernels
from megatron.dynamic_cp.attention.te import support as te_support
from megatron.dynamic_cp.attention.te.support import Kernel, missing_exchanges, provider, release_of
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups, lane_blocks, two_level_blocks
from megatron.dynamic_cp.repairs import releases
from megatron.trainer.setup import layers, warm_up
from megatron.trainer.setup.warm_up import token_buckets, warm_up_attention, warm_up_packs
from tests.distributed import parity, reference
from tests.distributed.harness import initialize_model_parallel, refuses, run_forked, run_ranks
from tests.distributed.real_transformer_engine import engine, extension
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.wheels import NEWEST, OLDEST, PINNED, VERSIONS, wheel_or_skip
from tests.layer_choices import chosen_layers, needs_of
from tests.trainer.commandline import command_line

SETUP = Path(__file__).parents[2] / "setup.py"
BUILDING = {"NVTE_PROJECT_BUILDING": "1"}
"""Has TransformerEngine ask for nothing but its extension."""
H100, A100, WORKSTATION = (9, 0), (8, 0), (12, 0)
GPU = {"capability": H100, "flash_attn": None, "attention_backend": "auto", "bf16": True, "kv_channels": 128}


NO_GATHER = ("all_gather",)


@pytest.mark.parametrize(
    ("version", "capability", "flash_attn", "backend", "kernel", "lacking"),
    [
        ("2.9.0", H100, None, "auto", "cuDNN", NO_GATHER), ("2.11.0+5671fd36", H100, None, "auto", "cuDNN", NO_GATHER),
        ("2.11.0", H100, 2, "flash", "flash-attn 2", NO_GATHER), ("2.11.0", (10, 0), None, "fused", "cuDNN", NO_GATHER),
        ("2.11.0", A100, 2, "auto", "flash-attn 2", NO_GATHER), ("2.17.1", H100, None, "auto", "cuDNN", NO_GATHER),
        ("2.18.0.dev0", H100, None, "auto", "cuDNN", ()), ("2.20.2", A100, 2, "auto", "flash-attn 2", NO_GATHER),
        ("2.20.2", WORKSTATION, 4, "auto", "flash-attn 4", ()), ("2.20.2", H100, 3, "flash", "flash-attn 3", ()),
        ("2.20.2", H100, 2, "auto", "cuDNN", ()), ("2.20.2", H100, None, "fused", "cuDNN", ()),
    ],
)  # fmt: skip
def test_auto_leaves_out_what_a_version_lacks_or_its_kernel_computes_wrongly(
    version: str, capability: tuple[int, int], flash_attn: int | None, backend: str, kernel: str,
    lacking: tuple[str, ...],
) -> None:  # fmt: skip
    settings = {**GPU, "capability": capability, "flash_attn": flash_attn, "attention_backend": backend}
    choice = chosen_layers(None, "auto", version=version, **settings)
    assert (choice.impl, choice.kernel, choice.left_out) == ("transformer_engine", kernel, lacking)
    said = choice.describe()
    assert version in said
    assert f"attention by {kernel})" in said
    assert said.endswith("the planner does without all_gather") == bool(lacking)
    if not lacking:
        assert chosen_layers(None, "all_gather", version=version, **settings).kernel == kernel
    elif version == "2.20.2":
        with pytest.raises(UnsupportedFeatureError, match=f"{kernel} would run here and compute something else"):
            chosen_layers(None, "all_gather", version=version, **settings)


def test_masks_of_samples_are_refused_where_the_layers_compute_their_own_only() -> None:
    with pytest.raises(UnsupportedFeatureError) as refused:
        chosen_layers(None, "auto", version="2.20.2", **GPU).check_masks("prompts with several responses")
    assert str(refused.value) == (
        "prompts with several responses have masks of their own, and TransformerEngine's attention, which this model "
        "has, computes the mask of its layers only (TransformerEngine 2.20.2 is installed): use --transformer-impl "
        "local"
    )
    chosen_layers("local", "auto", version="2.20.2", **GPU).check_masks("prompts with several responses")


def test_norms_inside_matrices_cannot_be_recomputed() -> None:
    with pytest.raises(UnsupportedFeatureError, match="--recompute-modules layernorm: norms are parts of the matrices"):
        chosen_layers(None, "auto", version="2.20.2", recomputes_norms=True, **GPU)
    assert chosen_layers("local", "auto", version="2.20.2", recomputes_norms=True, **GPU).impl == "local"


def test_who_does_an_exchange() -> None:
    def ways(version: str, kv_heads: int, kernel: Kernel = "cuDNN") -> list[str]:
        possible = [one for one in CP_COMM_TYPES if one not in missing_exchanges(CP_COMM_TYPES, version, kernel)]
        sizes = {"a2a": 4, "a2a+p2p": 2}
        return [
            f"{one} {provider(one, version, kernel, kv_heads=kv_heads, inner_cp_size=sizes.get(one, 1))}"
            for one in sorted(possible)
        ]

    assert ways("2.10.0", 8) == ["a2a wrapped", "a2a+p2p wrapped", "p2p native"]
    assert ways("2.17.0", 8) == ["a2a wrapped", "a2a+p2p wrapped", "p2p native"], "permitted, and slow"
    assert ways("2.18.0", 8) == ["a2a native", "a2a+p2p wrapped", "all_gather native", "p2p native"]
    assert ways("2.19.0", 8) == ["a2a native", "a2a+p2p native", "all_gather native", "p2p native"]
    assert ways("2.19.0", 2) == ["a2a wrapped", "a2a+p2p native", "all_gather native", "p2p native"]
    assert ways("2.19.0", 1) == ["a2a wrapped", "a2a+p2p wrapped", "all_gather native", "p2p native"]
    assert ways("2.17.0", 8, "flash-attn 2") == ways("2.17.0", 8)
    assert ways("2.20.2", 8, "flash-attn 2") == ["a2a native", "a2a+p2p native", "p2p native"]
    assert ways("2.20.2", 8, "flash-attn 3") == ways("2.20.2", 8)
    assert ways("2.20.2", 8, "flash-attn 4") == ["a2a native", "a2a+p2p wrapped", "all_gather native", "p2p native"]


@pytest.mark.parametrize(
    ("installed", "capability", "release", "taken"),
    [
        ((2,), A100, (2, 20), 2), ((2, 3), A100, (2, 20), 2), ((2, 3), H100, (2, 11), 3),
        ((2, 3, 4), H100, (2, 20), 3), ((2, 4), H100, (2, 20), 4), ((2, 4), H100, (2, 18), 2),
        ((4,), WORKSTATION, (2, 18), None), ((), H100, (2, 20), None),
    ],
)  # fmt: skip
def test_which_flash_attn_is_taken(
    installed: tuple[int, ...], capability: tuple[int, int], release: tuple[int, int], taken: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    flags = SimpleNamespace(is_installed=2 in installed, v3_is_installed=3 in installed, v4_is_installed=4 in installed)
    utils = SimpleNamespace(FlashAttentionUtils=flags)
    monkeypatch.setattr(te_kernels.importlib, "import_module", lambda name: utils)
    assert te_kernels.installed_flash_attn(capability, release) == taken


def test_the_page_has_the_table_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs/GPU.md").read_text()
    header, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| 2.") or line.startswith("| TransformerEngine |")
    )
    assert [row[0] for row in rows] == sorted(
        {te_support.shown(r) for r in te_support.NATIVE_SINCE.values()}, key=te_support.release_of
    )
    assert len(rows) == 3
    kernels = [line for line in page.splitlines() if line.startswith(("| cuDNN", "| flash-attn "))]
    assert len(kernels) == len(get_args(Kernel))
    of_kernels = [[cell.strip() for cell in line.strip("|").split("|")] for line in kernels]
    newest = rows[-1][0]
    told = [(version, "cuDNN", cells) for version, *cells in rows]
    told += [(newest, kernel, cells) for kernel, *cells in of_kernels]
    for version, kernel, cells in told:
        for exchange, cell in zip(header[1:], cells, strict=True):
            lacking = exchange in missing_exchanges(CP_COMM_TYPES, version, kernel)
            expected = "-" if lacking else provider(exchange, version, kernel, kv_heads=8, inner_cp_size=2)
            assert cell == expected, (version, kernel, exchange)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"exchange": "all_gather", "version": "2.11.0"}, ["all_gather", "2.18", "2.11.0 is installed", "p2p"]),
        ({"exchange": "all_gather", "version": "2.20.2", "capability": A100, "flash_attn": 2},
         ["all_gather", "cuDNN or flash-attn 3", "flash-attn 2 would run here", "p2p or auto", "impl local"]),
        ({"version": "2.7.0"}, ["2.7.0 is installed", "2.9 is needed", "--transformer-impl local"]),
        ({"version": None, "why_missing": "No module named 'transformer_engine'"}, ["2.9", "No module", "local"]),
        ({"capability": None}, ["needs CUDA devices", "--transformer-impl local"]),
        ({"capability": A100}, ["sm80", "sm90", "flash-attn", "install", "--transformer-impl local"]),
        ({"capability": (7, 0), "flash_attn": 2}, ["sm70", "sm80"]),
        ({"repeats": "0"}, ["NVTE_ALLOW_NONDETERMINISTIC_ALGO=0", "on sm90: unset it", "flash-attn", "impl local"]),
        ({"capability": A100, "flash_attn": 2, "attention_backend": "fused"},
         ["--attention-backend fused", "sm80", "auto"]),
        ({"attention_backend": "flash"}, ["--attention-backend flash", "flash-attn", "auto"]),
        ({"attention_backend": "unfused", "flash_attn": 2}, ["--attention-backend unfused", "several lanes", "auto"]),
        ({"attention_backend": "local", "flash_attn": 2}, ["--attention-backend local", "auto"]),
        ({"bf16": False}, ["--bf16", "fp32"]),
        ({"kv_channels": 36}, ["--kv-channels", "multiple of 8", "36"]),
        ({"kv_channels": 264}, ["up to 256", "264"]),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_if_it_was_asked_for(
    changed: dict, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"exchange": "p2p", "version": "2.11.0", **GPU, **changed}
    monkeypatch.setenv(te_support.REPEATS, settings.pop("repeats", "1"))
    with pytest.raises(UnsupportedFeatureError) as error:
        chosen_layers("transformer_engine", **settings)
    assert all(part in str(error.value) for part in said), str(error.value)
    if "exchange" not in changed:
        assert chosen_layers(None, **settings).impl == "local", "and nobody asked for it"
        assert chosen_layers("local", **settings).reason == "--transformer-impl local"


def choose_on_this_rank() -> None:
    """All of two ranks have the same layers and switch of TransformerEngine's ring, or the same error."""

    def choose(*versions: str | None, backend: str = "auto", capability: tuple[int, int] = H100) -> str:
        os.environ.pop(layers.BATCHED_RING, None)
        layers.installed_version = lambda: (versions[dist.get_rank()], "not there")
        layers.installed_flash_attn = lambda capability, release: None
        layers.compute_capability = lambda device: capability
        needs = needs_of("transformer_engine", "p2p", attention_backend=backend)
        return f"{layers.choose(needs, torch.device('cpu')).impl} {os.environ.get(layers.BATCHED_RING)}"

    both = ("2.11.0", "2.11.0")
    assert choose(*both) == "transformer_engine 1"
    assert choose(*both, backend=AttnBackend.fused.name) == "transformer_engine 1"
    flash = AttnBackend.flash.name
    refuses(UnsupportedFeatureError, lambda: choose(*both, backend=flash), "--attention-backend flash")
    refuses(UnsupportedFeatureError, lambda: choose(*both, capability=A100), "sm80")
    refuses(UnsupportedFeatureError, lambda: choose("2.11.0", None), "(not there)")
    refuses(DisagreementError, lambda: choose("2.11.0", "2.12.0"), "version of TransformerEngine")


def test_all_ranks_choose_alike() -> None:
    run_ranks(2, choose_on_this_rank)


def test_the_switch_of_a_user_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=layers.__name__)
    monkeypatch.setenv(layers.BATCHED_RING, "0")
    layers.batch_the_ring()
    assert os.environ[layers.BATCHED_RING] == "0"
    assert "first used" in caplog.text
    caplog.clear()
    monkeypatch.delenv(layers.BATCHED_RING)
    layers.batch_the_ring()
    assert os.environ[layers.BATCHED_RING] == "1"
    assert f"{layers.BATCHED_RING}=1" in caplog.text


# What is warmed.


def test_buckets_are_those_of_cudnn() -> None:
    assert token_buckets(700) == (700,)
    assert token_buckets(1024) == (1024,)
    assert token_buckets(10_000) == (1024, 2048, 4096, 8192, 10_000)
    assert token_buckets(100_000) == (1024, 2048, 4096, 8192, 16384, 32768, 65536, 98304, 100_000)


@pytest.mark.parametrize("num_lanes", [1, 2, 6, 8])
@pytest.mark.parametrize("exchanges", [("p2p",), ("a2a",), CP_COMM_TYPES, (*CP_COMM_TYPES, "blocks")])
def test_lanes_warm_the_same_in_their_groups(num_lanes: int, exchanges: tuple[str, ...]) -> None:
    """Each pack of a group is in the lists of all its lanes, in one order; each lane meets what plans may ask of it."""
    of_lane = []
    for lane in range(num_lanes):
        blocks = lane_blocks(lane, num_lanes)
        two_levels = two_level_blocks(lane, blocks, (2, 4) if "a2a+p2p" in exchanges else ())
        packs = warm_up_packs(blocks, two_levels, exchanges, max_tokens_per_rank=3000, query_heads=4)
        kinds = [(pack.rank_tokens, len(pack.padded_seqlens)) for pack in packs[:6]]
        assert kinds == [(tokens, number) for tokens in (1024, 2048, 3000) for number in (32, 64)]
        assert "blocks" not in {pack.cp_comm_type for pack in packs}, "there is no programme to run"
        assert {(pack.cp_size, pack.cp_comm_type) for pack in packs} >= {(1, "p2p")} | {
            (size, one)
            for _, size in blocks
            for one in exchanges
            if size > 1 and (one == "all_gather" or (one == "a2a" and 4 % size == 0))
        }
        assert {pack.inner_cp_size for pack in packs if pack.cp_comm_type == "a2a+p2p"} == {
            inner for _, _, inner in two_levels
        }
        if "p2p" in exchanges:
            assert max(size for _, size in blocks) in {p.cp_size for p in packs if p.cp_comm_type == "p2p"}
        of_lane.append(packs)
    for lane, packs in enumerate(of_lane):
        for other in range(num_lanes):
            shared = [[p for p in mine if p.first_lane <= lane < p.first_lane + p.cp_size] for mine in of_lane]
            both = [p for p in packs if p.first_lane <= other < p.first_lane + p.cp_size]
            assert both == [p for p in shared[other] if p in both]


def warm_on_this_rank() -> tuple[int, int]:
    """Return (bytes that warming sent, packs)."""
    initialize_model_parallel()
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.dynamic_cp.attention.te.attention import TransformerEngineAttention

    exchanges = ("p2p", "a2a", "a2a+p2p")
    groups = DynamicCPGroups.build(Topology(num_lanes=4), timeout_s=30, exchanges=exchanges, inner_sizes=(2,))
    config = reference.transformer_config(reference.LLAMA)
    packs = warm_up_packs(
        groups.groups, groups.outer_groups, exchanges, max_tokens_per_rank=16, query_heads=config.num_attention_heads
    )
    sent = warm_up_attention(
        [TransformerEngineAttention(config, 1, AttnMaskType.causal, "self")], packs, groups,
        query_heads=config.num_attention_heads, kv_heads=config.num_query_groups, head_dim=config.kv_channels,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    assert len(packs) == 5
    # A kernel runs once alone and in each share of heads, and in each step of a ring.
    steps = [pack.cp_size // pack.inner_cp_size if pack.cp_comm_type != "a2a" else 1 for pack in packs]
    assert Counter(extension.CALLS) == {"fused_attn_fwd": sum(steps), "fused_attn_bwd": sum(steps)}, packs
    return sent, len(packs)


def test_warming_attends_to_every_pack() -> None:
    for sent, _ in run_ranks_with(PINNED, 4, warm_on_this_rank, timeout_s=60):
        assert sent > 0


def run_chunks_on_this_rank(layout: parity.Layout) -> None:
    """Run the warm-up of the allocator; check that it leaves no trace, and that it did run."""
    initialize_model_parallel(layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None)
    groups = DynamicCPGroups.build(layout.topology, timeout_s=30, exchanges=("p2p",))
    config, chunks = parity.build_chunks(layout, reference.LLAMA)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.distributed_optimizer,
        overlap_param_gather=layout.distributed_optimizer,
    )
    wrapped = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    largest = []
    for model in wrapped:
        reset = model.zero_grad_buffer

        def look_and_reset(model=model, reset=reset) -> None:
            largest.append(max(p.main_grad.abs().max().item() for p in model.parameters() if p.requires_grad))
            reset()

        model.zero_grad_buffer = look_and_reset
    random = torch.get_rng_state(), tensor_parallel.get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone()
    warm_up.run_chunks(config, chunks, wrapped, groups, 97, torch.device("cpu"))
    assert len(largest) == len(chunks)
    assert all(value > 0 for value in largest), "no gradient was computed"
    for model in wrapped:
        assert all(not p.main_grad.any() for p in model.parameters())
    assert torch.equal(random[0], torch.get_rng_state())
    assert torch.equal(random[1], tensor_parallel.get_cuda_rng_tracker().get_states()["model-parallel-rng"])


@pytest.mark.parametrize(
    "layout",
    [
        parity.Layout(1, pp=2, vpp=2, config={"hidden_dropout": 0.1}),
        parity.Layout(1, tp=2, sp=True, distributed_optimizer=True),
        parity.Layout(
            1,
            tp=3,
            sp=True,
            config={"num_attention_heads": 6, "num_query_groups": 3, "kv_channels": 16, "ffn_hidden_size": 252},
        ),
    ],
    ids=["pp2_vpp2_dropout", "tp2_sp_distributed_optimizer", "tp3_sp"],
)
def test_a_pack_through_the_chunks_leaves_no_trace(layout: parity.Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "VOCAB_SIZE", 252)
    run_ranks(layout.topology.world_size, run_chunks_on_this_rank, layout, timeout_s=60)


def run_out_of_memory() -> str:
    """Rank 1 has no memory left while rank 0 waits for it in the ring; only its word lets rank 0 go on."""
    number = torch.zeros(1)

    def compute() -> None:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        dist.recv(number, 1)

    try:
        warm_up._within_memory(compute, 8192)
    except MemoryLimitError as error:
        dist.send(number, 0)
        return str(error)
    return ""


def test_a_rank_without_memory_says_so_while_others_wait() -> None:
    waiting, said = run_ranks(2, run_out_of_memory)
    assert not waiting
    assert all(part in said for part in ("8192", "--max-seqlen-per-dp-cp-rank", "Tried to allocate"))


def test_versions_are_those_of_setup_and_of_the_tests() -> None:
    upper = re.findall(r'"transformer-engine\[pytorch\]>=(\d+\.\d+),<(\d+)\.(\d+); python_version>=', SETUP.read_text())
    assert [(least, int(major), int(minor) - 1) for least, major, minor in upper] == [("2.11", *te_support.NEWEST)]
    assert release_of(OLDEST) == te_support.OLDEST
    assert release_of(NEWEST) == te_support.NEWEST


def test_a_version_that_is_newer_than_tests_is_told_of() -> None:
    said = chosen_layers(None, "auto", version="2.21.0", **GPU).describe()
    assert "TransformerEngine 2.21.0 is installed, newer than 2.20, up to which tests go, attention by cuDNN" in said
    with mock.patch("importlib.metadata.version", return_value="2.21.0"):
        check = doctor._apex()
    assert check.state == "note"
    assert check.detail == "transformer_engine 2.21.0, newer than 2.20, up to which tests go"


def test_the_doctor_names_kernels_that_a_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for of, name, value in ((torch.cuda, "device_count", 1), (torch.cuda, "get_device_capability", H100),
                            (releases, "engine_version", "2.20.2"), (doctor, "why_no_flash", None)):  # fmt: skip
        monkeypatch.setattr(of, name, lambda *given, value=value: value)
    assert doctor.attention().detail.startswith("flash of torch; TransformerEngine's cuDNN; --fp8-recipe mxfp8 needs")
    monkeypatch.setattr(doctor, "why_no_flash", lambda *given: "needs torch 2.7")
    monkeypatch.setenv(te_support.REPEATS, "0")
    check = doctor.attention()
    assert (check.state, check.detail.count("no flash of torch: it needs torch 2.7; TransformerEngine has no")) == (
        "note",
        1,
    )


BROKEN = {
    "empty": ({}, "Found empty `transformer-engine` meta"),
    "no extension": (BUILDING, "Could not find shared object"),
}


@pytest.mark.by_day("pretrain_gpt.py-empty-2.20.2", "doctor-empty-2.20.2")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("command", ["pretrain_gpt.py", "doctor"])
def test_one_that_is_there_in_part_ends_the_start_in_a_line(command: str, broken: str, version: str) -> None:
    """megatron-core would end with it, in the middle of an import."""
    more, says = BROKEN[broken]
    environment = {**os.environ, "PYTHONPATH": f"{SETUP.parent}:{wheel_or_skip(version)}", **more}
    words = ["pretrain_gpt.py", *command_line("--mock-data --dynamic-cp")]
    words = words if command == "pretrain_gpt.py" else ["-m", "dynamic_cp.decide.cli", "doctor", "--json", "-"]
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=SETUP.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    wanted = f"TransformerEngine {version} is installed and cannot be imported ({says}"
    if command == "doctor":
        (check,) = [one for one in json.loads(done.stdout)["checks"] if one["state"] == "broken"]
        assert check["detail"].startswith(wanted)
        assert check["remedy"].startswith("pip install --no-build-isolation 'megatron-dynamic-cp[te]', or")
    else:
        assert done.stderr.startswith(f"error: {wanted}")
        assert done.stderr.count("\n") == 1


def import_with_old_cudnn() -> str:
    extension.CUDNN_VERSION = 91100
    with pytest.raises(RuntimeError):
        engine.load(NEWEST)
    with pytest.raises(UnsupportedFeatureError) as refused:
        releases.check_engine()
    return str(refused.value)


def test_an_old_cudnn_is_told_in_a_line() -> None:
    wheel_or_skip(NEWEST)
    said = run_forked(import_with_old_cudnn)
    assert said.startswith("TransformerEngine 2.20.2 is installed and cannot be imported (Transformer Engine requires")
    assert "cuDNN 9.12.0 or later" in said
    assert "\n" not in said
