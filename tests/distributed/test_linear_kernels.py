"""Kernels of linear attention: how flash-linear-attention is called, and what layers keep for backward."""

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.memory.activations import activation_bytes
from dynamic_cp.types import LinearAttention, ModelShape, PlanOptions, StateExchange, Topology
from megatron.decide.doctor import TOGETHER, table_of_versions
from megatron.dynamic_cp.attention.linear import kernels, states, thd
from megatron.dynamic_cp.attention.linear.kernels import check_linear_kernel, why_not_triton
from megatron.dynamic_cp.attention.linear.layer import keeps_by_hooks
from megatron.dynamic_cp.attention.linear.portable import PORTABLE
from megatron.dynamic_cp.attention.linear.recurrence import NORM_EPSILON, Runs, Steps
from megatron.dynamic_cp.flags.linear_attention import linear_attention_of
from megatron.dynamic_cp.model.linear_layers import DynamicCPGatedDelta, DynamicCPMamba
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.repairs import patches
from tests.distributed import reference
from tests.distributed.emulated_lanes import on_lanes
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.test_linear_attention import LAYERS, Whole, error
from tests.released_linear_kernels import RELEASED
from tests.wheels import FRAMEWORKS, wheel_or_skip

CUDA = torch.device("cuda", 0)


def runs_of(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor) -> Runs:
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    return Runs.build(cu_seqlens_cpu.diff().tolist(), cu_seqlens.device)


def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute as documented: a batch of 1, states of [runs, heads, key, value]."""
    assert {x.shape[0] for x in (q, k, v, g)} == {1}
    assert options["output_final_state"]
    steps = Steps(q[0], k[0], v[0], g[0], None if beta is None else beta[0], options["scale"])
    runs = runs_of(options["cu_seqlens"], options["cu_seqlens_cpu"])
    found, last = PORTABLE.scan(steps, runs, options["initial_state"])
    assert found is not None
    return found[None], last


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> tuple[Tensor, None]:
    """Compute as documented: a batch of 1, weights of [channels, kernel size]."""
    assert options["activation"] == "silu"
    runs = runs_of(options["cu_seqlens"], options["cu_seqlens_cpu"])
    return PORTABLE.convolve(x[0], weight, bias, runs)[None], None


def l2norm(x: Tensor, eps: float) -> Tensor:
    assert eps == NORM_EPSILON
    return PORTABLE.normalize(x)


def rmsnorm_fn(x: Tensor, weight: Tensor, bias: None, z: Tensor, eps: float, **options: Any) -> Tensor:
    return PORTABLE.gated_norm(x, z, weight, eps, options["group_size"], not options["norm_before_gate"])


DOCUMENTED: dict[str, Callable[..., Any]] = {
    "l2norm": l2norm,
    "chunk_gated_delta_rule": scan,
    "chunk_simple_gla": lambda q, k, v, g, **options: scan(q, k, v, g, None, **options),
    "causal_conv1d": causal_conv1d,
    "rmsnorm_fn": rmsnorm_fn,
}


def signatures_of_the_wheel() -> dict[str, inspect.Signature]:
    """Return the parameters of what is called; Triton, which its modules import, is not needed to read them."""
    with zipfile.ZipFile(wheel_or_skip(FRAMEWORKS, "fla-core", kernels.RELEASE)) as wheel:
        found = {}
        for name, module in kernels.FUNCTIONS.items():
            folder = module.replace(".", "/")
            source = f"{folder}.py"
            if source not in wheel.namelist():
                exported = ast.parse(wheel.read(f"{folder}/__init__.py"))
                (source,) = {
                    f"{node.module.replace('.', '/')}.py" if not node.level else f"{folder}/{node.module}.py"
                    for node in ast.walk(exported)
                    if isinstance(node, ast.ImportFrom) and node.module and name in {one.name for one in node.names}
                }
            (function,) = (
                node
                for node in ast.parse(wheel.read(source)).body
                if isinstance(node, ast.FunctionDef) and node.name == name
            )
            needed = len(function.args.args) - len(function.args.defaults)
            found[name] = inspect.Signature(
                [
                    inspect.Parameter(
                        argument.arg,
                        inspect.Parameter.POSITIONAL_OR_KEYWORD,
                        default=inspect.Parameter.empty if index < needed else None,
                    )
                    for index, argument in enumerate(function.args.args)
                ]
            )
    return found


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Functions with the parameters of the released wheel that do what its documentation says; counts their calls."""
    signatures = signatures_of_the_wheel()
    calls = dict.fromkeys(kernels.FUNCTIONS, 0)

    def function(name: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return DOCUMENTED[name](**signatures[name].bind(*args, **kwargs).arguments)

        return called

    monkeypatch.setattr(kernels, "_function", function)
    return calls


@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2"])
def test_flash_linear_attention_is_called_as_its_release_wants(kind: str, documented: dict[str, int]) -> None:
    whole = Whole(LAYERS[kind], (5, 33, 1, 8))
    with mock.patch.object(thd, "choose_linear_kernel", return_value=kernels.FLA):
        for way in thd.WAYS:
            found, _ = whole.on_lanes(2, way)
            assert error(found, whole.expected) < 1e-10
    scans = {"gated_delta_net": "chunk_gated_delta_rule", "mamba2": "chunk_simple_gla"}
    normalizes = {"l2norm"} if kind == "gated_delta_net" else set()
    assert {name for name, calls in documented.items() if calls} == {scans[kind], "causal_conv1d"} | normalizes
    # By heads each lane scans once, by states once more for summaries.
    assert (documented[scans[kind]], documented["causal_conv1d"]) == (2 + 4, 4)


WRONG: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "the state behind runs": lambda found, last: (found, last + 1),
    "the output": lambda found, last: (found.flip(1), last),
    "the gradient of": lambda found, last: (found, last.detach() + 0 * last),
}


@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2"])
def test_a_wrong_kernel_is_noticed_at_start(kind: str) -> None:
    def check(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> float:
        def scan(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return change(*PORTABLE.scan(*args, **kwargs))

        return check_linear_kernel(
            replace(PORTABLE, name="other", scan=scan), LAYERS[kind], torch.float32, torch.device("cpu")
        )

    assert check(lambda found, last: (found, last)) == 0
    for what, change in WRONG.items():
        with pytest.raises(UnsupportedFeatureError, match=f"other of linear attention is wrong on cpu: {what}"):
            check(change)


def forget_biases(x: Tensor, weight: Tensor, bias: Tensor | None, runs: Runs) -> Tensor:
    return PORTABLE.convolve(x, weight, None if bias is None else 0 * bias, runs)


def take_groups_in_rounds(steps: Steps, *args: Any, **kwargs: Any) -> Any:
    """Groups are copies of the first head's, which shows in gradients alone."""
    copies = steps.by_head()
    q, k = (x.detach() + 0 * x for x in (copies.q_THK, copies.k_THK))
    return PORTABLE.scan(copies._replace(q_THK=q, k_THK=k), *args, **kwargs)


def cut_wide_values(steps: Steps, runs: Runs, state: Tensor | None, **options: Any) -> Any:
    """A block of channels behind those that values have is left as it was."""
    found, last = PORTABLE.scan(steps, runs, state, **options)
    return found, last if state is None else torch.cat((last[..., :5], state[..., 5:]), dim=-1)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"convolve": forget_biases}, "the convolution"),
        ({"scan": take_groups_in_rounds}, "the gradient of queries"),
        ({"scan": cut_wide_values}, "the transition of runs"),
    ],
    ids=["biases", "groups", "summaries"],
)
def test_what_layers_ask_for_besides_is_checked_at_start(change: dict[str, Any], what: str) -> None:
    kernel = replace(PORTABLE, name="other", **change)
    with pytest.raises(UnsupportedFeatureError, match=f"is wrong on cpu: {what}"):
        check_linear_kernel(kernel, LAYERS["gated_delta_net"], torch.float32, torch.device("cpu"))


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
def test_released_programs_equal_the_portable_kernel_in_the_interpreter(tmp_path: Path) -> None:
    """The interpreter counts in int, which has no `to`; nothing else of the release is changed."""
    with zipfile.ZipFile(wheel_or_skip(FRAMEWORKS, "fla-core", kernels.RELEASE)) as wheel:
        wheel.extractall(tmp_path)
    for name in ("chunk_delta_h", "chunk_h"):
        source = tmp_path / f"fla/ops/common/{name}.py"
        text = source.read_text("utf-8")
        assert "i_t.to(tl.int64)" in text
        source.write_text(text.replace("i_t.to(tl.int64)", "i_t"), "utf-8")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_linear_kernels.py"))],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, *sys.path)))},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    errors = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(errors) == 6
    assert max(errors) < 2e-6, done.stdout


def test_gpus_need_flash_linear_attention() -> None:
    delta, mamba = (replace(LAYERS[kind], key_size=512) for kind in ("gated_delta_net", "mamba2"))
    kernels.choose_linear_kernel.cache_clear()
    with mock.patch.object(kernels, "find_spec", lambda package: None if package == "fla" else object()):
        for sizes in (LAYERS["gated_delta_net"], mamba):
            with pytest.raises(UnsupportedFeatureError, match="needs fla, which is not installed; install it with pip"):
                kernels.choose_linear_kernel(CUDA, sizes)
    with pytest.raises(UnsupportedFeatureError, match="keys of at most 256 channels, these have 512: give") as caught:
        kernels.choose_linear_kernel(CUDA, delta)
    assert "install" not in str(caught.value)
    with pytest.raises(UnsupportedFeatureError, match="runs on CUDA devices only: train"):
        kernels.choose_linear_kernel(torch.device("meta"), delta)
    assert kernels.choose_linear_kernel(torch.device("cpu"), delta) is PORTABLE


REFUSED = ["3.4.0", "3.5.1", "3.6.0", "3.7.0"]
"""Releases of Triton whose gated gradients are wrong on Hopper; fla-core raises in backward."""


@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2"])
def test_a_triton_that_cannot_train_is_named_at_start(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"triton": "", "capability": (9, 0), "tilelang": False}

    def find(package: str) -> object:
        return object() if package != "tilelang" or installed["tilelang"] else None

    functions = SimpleNamespace(**dict.fromkeys(kernels.FUNCTIONS))
    modules = {"triton": lambda: SimpleNamespace(__version__=installed["triton"])}
    monkeypatch.setattr(kernels, "find_spec", find)
    monkeypatch.setattr(kernels, "import_module", lambda name: modules.get(name, lambda: functions)())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: installed["capability"])
    sizes = LAYERS[kind]

    def why_not(triton: str, capability: tuple[int, int] = (9, 0), *, tilelang: bool = False) -> str | None:
        installed.update(triton=triton, capability=capability, tilelang=tilelang)
        return kernels.why_not(CUDA, sizes)

    for version in REFUSED:
        said = f"refuses to train {kind} on a Hopper GPU with Triton {version}, .* Triton 3.7.1 or newer .torch 2.13"
        assert re.match(said, str(why_not(version)))
        assert (why_not(version, tilelang=True) is None) == (kind == "gated_delta_net")
        assert why_not(version, (8, 0)) is why_not(version, (10, 0)) is None
    assert all(why_not(version) is None for version in ("3.3.1", "3.7.1", "3.8.0"))
    assert why_not("3.2.0", (8, 0)) == "needs Triton 3.3 or newer, 3.2.0 is installed: docs/GPU.md#versions"
    modules["fla.ops.simple_gla"] = mock.Mock(side_effect=AssertionError("FLA_TRIL_PRECISION must be one of 'ieee'"))
    assert "cannot be imported (FLA_TRIL_PRECISION must be" in str(why_not("3.7.1"))
    kernels.choose_linear_kernel.cache_clear()
    installed.update(triton="3.6.0", capability=(9, 0), tilelang=False)
    with pytest.raises(UnsupportedFeatureError, match="find no kernel: flash-linear-attention refuses to train"):
        kernels.choose_linear_kernel(CUDA, sizes)


def test_what_another_package_refuses_at_start_is_one_line() -> None:
    """Not a traceback of its own; memory that is out stays what it is."""

    def check(error: Exception) -> None:
        def scan(*_args: Any, **_kwargs: Any) -> Any:
            raise error

        kernel = replace(PORTABLE, name="other", scan=scan)
        check_linear_kernel(kernel, LAYERS["mamba2"], torch.float32, torch.device("cpu"))

    for refusal in (RuntimeError("Triton 1\n on this GPU"), AssertionError("K <= 256"), NotImplementedError()):
        with pytest.raises(UnsupportedFeatureError, match=r"kernel other .* refuses what start-up checks: .*#versions"):
            check(refusal)
    with pytest.raises(torch.OutOfMemoryError):
        check(torch.OutOfMemoryError("of 80 GiB"))


def test_the_page_on_gpus_has_the_table_of_versions() -> None:
    page = (Path(__file__).parents[2] / "docs/GPU.md").read_text(encoding="utf-8")
    assert "\n".join(table_of_versions()) in page
    refused = [one.triton for one in TOGETHER if why_not_triton(one.triton, (9, 0), LAYERS["mamba2"])]
    assert set(refused) == set(REFUSED)


TOKENS, HIDDEN = 512, 64
KINDS: dict[str, tuple[type, Any, dict[str, int]]] = {
    "gated_delta_net": (
        DynamicCPGatedDelta,
        reference.DELTA,
        {
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "mamba2": (DynamicCPMamba, reference.MAMBA,
        {"mamba_num_heads": 16, "mamba_num_groups": 2, "mamba_state_dim": 128, "mamba_head_dim": 64}),
}  # fmt: skip
SYMBOLS = {"gated_delta_net": "G", "mamba2": "M"}
LANES: list[tuple[int, StateExchange]] = [(1, "heads"), (2, "heads"), (2, "states")]


def kept_bytes(kind: str, more: dict[str, Any], lanes: list[tuple[int, StateExchange]]) -> list[float]:
    """Return for each way the bytes for a token that a layer keeps with its input, in bfloat16."""
    initialize_model_parallel()
    patches.repair_norm_recomputation()
    make, variant, sizes = KINDS[kind]
    config = reference.transformer_config(
        variant, hidden_size=HIDDEN, params_dtype=torch.bfloat16, bf16=True, **sizes, **more
    )
    layer = make(config, layer_number=1, pg_collection=ProcessGroupCollection.use_mpu_process_groups()).bfloat16()
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def of_lane(params: DynamicPackedSeqParams) -> float:
        x = torch.zeros(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out, _ = layer(x, None, packed_seq_params=params)
        assert out.requires_grad
        return sum(storage.nbytes() for storage in kept.values()) / TOKENS

    with (
        mock.patch.object(thd, "choose_linear_kernel", return_value=kernels.FLA),
        mock.patch.object(kernels, "_function", RELEASED.__getitem__),
        mock.patch.object(states, "keeps_by_hooks", return_value=False),  # these hooks only count
    ):
        found = [on_lanes((TOKENS * cp_size,), cp_size, of_lane, state_exchange=way) for cp_size, way in lanes]
    return [max(of_lanes) for of_lanes in found]


def expected_bytes(sizes: LinearAttention, options: PlanOptions, way: StateExchange) -> float:
    model = ModelShape(
        num_layers=3, hidden_size=HIDDEN, ffn_hidden_size=HIDDEN, num_attention_heads=1, num_query_groups=1,
        kv_channels=HIDDEN, vocab_size=8, linear_attention=sizes, layer_pattern=f"{SYMBOLS[sizes.kind]}*-",
    )  # fmt: skip
    (layer,) = (layer for _, layer in model.stages(1)[0].layers if layer.linear_attention)
    found = activation_bytes(model, Topology(num_lanes=1), options, layer)
    residual = HIDDEN * options.element_bytes.residual  # the input of the norm before it
    return found.per_layer - residual + (found.states_per_layer / TOKENS if way == "states" else 0)


@pytest.mark.by_day("gated_delta_net-repeated0", "gated_delta_net-repeated1")
@pytest.mark.parametrize(
    ("kind", "repeated"),
    [(kind, repeated) for kind in KINDS for repeated in ([], ["core_attn"])] + [("gated_delta_net", ["gdn_norm_out"])],
)
def test_a_layer_keeps_what_the_memory_model_says(kind: str, repeated: list[str]) -> None:
    more = {"recompute_granularity": "selective", "recompute_modules": repeated} if repeated else {}
    check_kept(kind, more, repeated)


def test_another_norm_is_computed_again_too() -> None:
    check_kept("gated_delta_net", {"normalization": "LayerNorm"}, [])


def check_kept(kind: str, more: dict[str, Any], repeated: list[str]) -> None:
    (found,) = run_ranks(1, kept_bytes, kind, more, LANES)
    config = reference.transformer_config(KINDS[kind][1], hidden_size=HIDDEN, **KINDS[kind][2])
    sizes = linear_attention_of(config)
    assert sizes is not None
    options = PlanOptions(
        max_tokens_per_rank=TOKENS, recompute="selective" if repeated else "none", recompute_modules=tuple(repeated),
        cp_comm_types=("p2p",),
    )  # fmt: skip
    for (cp_size, way), kept in zip(LANES, found, strict=True):
        assert kept == pytest.approx(expected_bytes(sizes, options, way), rel=0.1), (cp_size, way)


def test_checkpoints_that_are_not_reentrant_are_told_by_their_hooks() -> None:
    told = []

    def tell(x: Tensor) -> Tensor:
        told.append(keeps_by_hooks())
        return x * x

    x = torch.ones(2, requires_grad=True)
    tell(x).sum().backward()
    checkpoint(tell, x, use_reentrant=False).sum().backward()
    assert told == [False, True, True], "once, and in both passes of a checkpoint"
    assert not keeps_by_hooks(), "asking changes nothing"
