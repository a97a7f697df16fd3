"""What the replaced functions do, on stand-ins for Megatron-LM's, and what its log and its script are given."""

import argparse
import copy
import logging
import signal
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader

from dynamic_cp.errors import DataError, UnsupportedFeatureError
from megatron.dynamic_cp.agreement import phase
from megatron.integrations.lm_adaptor import flags, hooks
from megatron.integrations.lm_adaptor.checkout import SUPPORTED_VERSIONS
from megatron.integrations.lm_adaptor.counts import StepFlops
from megatron.integrations.lm_adaptor.hooks import Adaptor
from megatron.integrations.lm_adaptor.replacements import SCRIPT, replaced_in
from megatron.integrations.lm_adaptor.session import DRAWN_FROM, LANES, choose_lane
from tests.distributed.harness import initialize_model_parallel, run_ranks


def adaptor(**values: Any) -> hooks.Adaptor:
    """Return one with dynamic CP on."""
    return hooks.Adaptor(**{"get_args": argparse.Namespace, "asked": argparse.Namespace(), "elapsed_s": 0.5, **values})


def loader_args(**changes: Any) -> argparse.Namespace:
    values = {
        "dataloader_type": "single", "global_batch_size": 2, "num_workers": 1, "exit_signal_handler": True,
        "exit_signal": signal.SIGTERM,
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


def loader_of(args: argparse.Namespace) -> DataLoader[Any]:
    groups = SimpleNamespace(lane=0, num_lanes=1)
    session = SimpleNamespace(runtime=SimpleNamespace(groups=groups))
    made = adaptor(get_args=lambda: args, session=session)
    loader: DataLoader[Any] = hooks.build_pretraining_data_loader(made, None, [1, 2, 3, 4], 0)
    assert made.loaders == [loader], "its workers are not ended with the run"
    return loader


def test_workers_outlive_the_signal_that_ends_the_run() -> None:
    """With --exit-signal-handler the run saves after the signal; a launcher sends it to workers, too."""
    before = signal.getsignal(signal.SIGTERM)
    init = loader_of(loader_args()).worker_init_fn
    assert init is not None, "the first signal kills the workers, and the run with them"
    try:
        init(0)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert loader_of(loader_args(exit_signal_handler=False)).worker_init_fn is None


def forward_step(data_iterator: Any, model: Any) -> Any:
    return get_batch(data_iterator), model


def get_batch(_data_iterator: Any) -> Any:
    return None


def test_script_that_runs_the_last_rank_alone_is_refused() -> None:
    """process_non_loss_data_func makes the last rank run a schedule that the others do not."""
    made = adaptor(forward_step=forward_step, process_non_loss_data=lambda *_: None)
    with pytest.raises(UnsupportedFeatureError, match="process_non_loss_data_func"):
        made.prepare_script()


def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> argparse.Namespace:
    """Megatron-LM's names and order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--distributed-backend", default="nccl")
    parser = parser if extra_args_provider is None else extra_args_provider(parser)
    return parser.parse_args([])


def own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--own")
    return parser


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.trainer.setup.initialize.choose_backend", lambda *_, **__: "nccl")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("by_name", [True, False])
def test_flags_are_added_to_those_of_the_script(by_name: bool) -> None:
    made = adaptor(asked=None)
    given: Any = ((), {"extra_args_provider": own}) if by_name else ((own,), {})
    parsed = hooks.parse_args(made, parse_args, *given[0], **given[1])
    assert {"own", "dynamic_cp", "dynamic_cp_dump", "use_varlen_dataset"} <= set(vars(parsed))
    assert not made.is_on


def test_a_first_look_at_some_flags_stays_as_it_is() -> None:
    """Megatron-LM reads the command line once more, without the others, where it sets up restarts."""
    assert vars(hooks.parse_args(adaptor(), parse_args, ignore_unknown_args=True)) == {"distributed_backend": "nccl"}


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("flags_first", [True, False])
def test_the_script_is_prepared_once_its_flags_and_functions_are_known(
    monkeypatch: pytest.MonkeyPatch, flags_first: bool
) -> None:
    """Until 0.17 pretrain() reads the flags, from 0.18 on the script does so before it."""
    monkeypatch.setattr(flags, "translate", lambda args: args)
    monkeypatch.setattr(flags, "overridden", lambda *_: [])
    seen: list[str] = []

    class InScript(dict[str, Any]):
        def items(self) -> Any:
            seen.append("prepared")
            return super().items()

    made = adaptor(asked=None, in_script=InScript())

    def parse() -> None:
        seen.append("parsed")
        args = {"dynamic_cp": True, "distributed_backend": "nccl", "rank": 0, "tensor_model_parallel_size": 1}
        hooks.parse_args(
            made,
            lambda extra_args_provider=None: argparse.Namespace(
                **args, use_varlen_dataset=True, eod_id=None, varlen_mock_dataset_config_json=None
            ),
        )

    def pretrain(provider: Any, forward_step_func: Any, process_non_loss_data_func: Any = None) -> str:
        seen.append("pretrain")
        if not flags_first:
            parse()
        return "trained"

    if flags_first:
        parse()
    assert hooks.pretrain(made, pretrain, "data", forward_step) == "trained"
    assert seen == (["parsed", "prepared", "pretrain"] if flags_first else ["pretrain", "parsed", "prepared"])


def training_log(
    loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, scale: Any, flag: Any, skipped: Any,
    grad_norm: Any, *_: Any, **__: Any
) -> str:  # fmt: skip
    """Megatron-LM's names and order."""
    return f"logged {iteration}"


def test_each_iteration_ends_its_step_and_some_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    import contextlib

    ended: list[Any] = []
    shown: list[Any] = []
    written: list[Any] = []
    routed: list[int] = []

    class Session:
        flops = SimpleNamespace(start_interval=lambda: None)

        def show_routers(self, num_micro_batches: int) -> None:
            assert len(ended) < iteration, "the log that comes now has them"
            routed.append(num_micro_batches)

        def end_step(self, iteration: int, **values: Any) -> str:
            ended.append((iteration, values))
            return f"record {iteration}"

    args = argparse.Namespace(log_interval=2, tensorboard_log_interval=3)
    made = adaptor(
        get_args=lambda: args,
        session=Session(),
        samples=SimpleNamespace(counted=lambda _: contextlib.nullcontext(), num_micro_batches=7),
    )
    modules = {
        "megatron.training.utils": SimpleNamespace(print_rank_last=shown.append),
        "megatron.integrations.lm_adaptor.counts": SimpleNamespace(
            plan_line=lambda record: f"line of {record}", write_scalars=lambda *given: written.append(given)
        ),
    }
    monkeypatch.setattr(hooks.importlib, "import_module", modules.__getitem__)
    for iteration in range(1, 7):
        assert hooks.training_log(made, training_log, {"lm loss": 4.0}, {}, 1e-3, iteration, 1.0, False, 0, 2.5, 1) == (
            f"logged {iteration}"
        )
    assert routed == [7] * 6
    assert [iteration for iteration, _ in ended] == [1, 2, 3, 4, 5, 6], "the dump and the refinement see each of them"
    assert ended[0][1] == {"losses": {"lm loss": 4.0}, "learning_rate": 1e-3, "grad_norm": 2.5, "elapsed_s": 0.5}
    assert shown == [f"line of record {iteration}" for iteration in (2, 4, 6)]
    assert written == [("record 3", 3), ("record 6", 6)]


def test_coefficients_and_random_states_of_a_checkpoint_are_taken_over() -> None:
    resumed: list[Any] = []
    made = adaptor(session=SimpleNamespace(resume=resumed.append))
    state = {"args": "theirs", "rng_state": []}
    args = argparse.Namespace(finetune=False)

    def load(_folder: Any, _args: Any, rank0: bool = False, **_: Any) -> Any:
        return state, "name", False, "type"

    assert hooks.load_base_checkpoint(made, load, "folder", args, rank0=True)[0] is state
    assert resumed == [], "only the arguments were asked for"
    assert hooks.load_base_checkpoint(made, load, "folder", args)[1:] == ("name", False, "type")
    assert resumed == [state]
    hooks.load_base_checkpoint(made, load, "folder", argparse.Namespace(finetune=True))
    hooks.load_base_checkpoint(made, lambda *_, **__: (None, "", False, None), "folder", args)
    made.asked = None
    hooks.load_base_checkpoint(made, load, "folder", args)
    assert resumed == [state], "a new run, no checkpoint, or dynamic CP off"


@pytest.mark.parametrize("on_cpu", [True, False])
def test_cpu_ranks_keep_outputs_that_gloo_still_sends(on_cpu: bool) -> None:
    """With and without --dynamic-cp: interleaved schedules freed them, and gave wrong losses."""
    configs = [SimpleNamespace(deallocate_pipeline_outputs=True) for _ in range(2)]
    built = [SimpleNamespace(module=SimpleNamespace(config=config)) for config in configs], "optimizer", "scheduler"
    made = adaptor(asked=None, on_cpu=on_cpu)
    assert hooks.setup_model_and_optimizer(made, lambda *_: built, "provider") is built
    assert [config.deallocate_pipeline_outputs for config in configs] == [not on_cpu] * 2


def test_cpu_ranks_load_what_the_distributed_optimizer_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.integrations.lm_adaptor import cpu

    done: list[str] = []
    monkeypatch.setattr(cpu.cpu_backend, "enable", lambda: done.append("shims"))
    monkeypatch.setattr(cpu.patches, "repair_optimizer_checkpoint", lambda: done.append("optimizer"))
    monkeypatch.setattr(cpu.patches, "repair_expert_routing", lambda: None)
    monkeypatch.setattr(cpu, "SHIMS", ())
    monkeypatch.setattr(cpu.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(cpu.torch, "set_num_threads", lambda _: None)
    cpu.enable(1)
    assert done == ["shims", "optimizer"]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_reading_moves_no_generator_of_cpu_ranks(on_cpu: bool) -> None:
    """Dropout draws from the same one there: TP ranks, of which the first reads, and a resumed run would part."""
    made = adaptor(asked=None, on_cpu=on_cpu, get_args=loader_args)
    loader = hooks.build_pretraining_data_loader(made, lambda data, _: DataLoader(data), [1, 2], 0)
    before = torch.get_rng_state()
    assert len(list(loader)) == 2
    assert torch.equal(torch.get_rng_state(), before) == on_cpu
    assert hooks.build_pretraining_data_loader(made, lambda data, _: data, "the script's own", 0) == "the script's own"


@pytest.fixture
def starting_up() -> Iterator[None]:
    before = phase.current()
    phase.enter("starting up")
    yield
    phase.enter(before)


@pytest.mark.usefixtures("starting_up")
def test_errors_say_where_a_run_was() -> None:
    """With and without --dynamic-cp: what fails leaves its phase behind, what succeeds goes back."""
    made = adaptor(asked=None, get_args=lambda: argparse.Namespace(curr_iteration=4))
    seen: list[str] = []

    def note(*_: Any, **__: Any) -> None:
        seen.append(phase.current())

    def evaluate(prefix: str, forward_step: Any, iterator: Any, model: Any, iteration: int, *_: Any) -> None:
        note()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    hooks.load_checkpoint(made, note, "model", "optimizer", "scheduler", checkpointing_context={})
    hooks.train_step(made, note, iteration=4)
    hooks.save_checkpoint(made, note, 5, "model", train_data_iterator=None)
    hooks.maybe_finalize_async_save(made, note, blocking=False)
    hooks.maybe_finalize_async_save(made, note, blocking=True, terminate=True)
    hooks.evaluate_and_print_results(made, evaluate, "iteration 5", "step", "data", "model", 5, None, "config")
    assert seen == [
        "loading the checkpoint", "iteration 5", "iteration 5, saving", "naming the previous checkpoint",
        "waiting for the files of the last checkpoint", "evaluation after iteration 5",
    ]  # fmt: skip
    assert phase.current() == "iteration 5"
    with pytest.raises(OSError, match="no space left"):
        hooks.save_checkpoint(made, fail, 6, "model")
    assert phase.current() == "iteration 6, saving"

    def refuse(*_: Any, **__: Any) -> None:
        raise CheckpointException("read", {0: (OSError("metadata is None"), None)})  # type: ignore[dict-item]

    assert not issubclass(CheckpointException, Exception), "it passes whoever reports exceptions"
    with pytest.raises(RuntimeError, match="metadata is None"):
        hooks.load_checkpoint(made, refuse, "model", "optimizer", "scheduler")
    assert phase.current() == "loading the checkpoint"


@pytest.mark.parametrize("persistent", [False, True])
def test_a_save_starts_no_process_for_its_results(monkeypatch: pytest.MonkeyPatch, persistent: bool) -> None:
    """Megatron-core's manager would outlive a rank that fails or is killed. A worker that lives on keeps its queue."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    given: list[Any] = []
    monkeypatch.setattr(filesystem_async, "_results_queue", "of the worker")
    made = adaptor(get_args=lambda: argparse.Namespace(use_persistent_ckpt_worker=persistent))
    for iteration in (1, 2):
        hooks.save_checkpoint(made, lambda _: given.append(filesystem_async._results_queue), iteration)
    if persistent:
        assert given == ["of the worker"] * 2
        return
    given[1].put("second")
    given[0].put("first")
    assert [results.get_nowait() for results in given] == ["first", "second"]


@pytest.mark.usefixtures("starting_up")
@pytest.mark.parametrize("forward_only", [False, True])
def test_a_step_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, forward_only: bool) -> None:
    from megatron.integrations.lm_adaptor import session

    seen: list[str] = []

    class Wrapper:
        rank_tokens = ()

        def __next__(self) -> Any:
            seen.append(phase.current())
            return SimpleNamespace(seqlen_sum=1, seqlen_squared_sum=1)

    def run_schedule(*_: Any, **__: Any) -> list[Any]:
        seen.append(phase.current())
        return []

    made: Any = object.__new__(session.Session)
    made._theirs = argparse.Namespace(curr_iteration=2)
    made._refining = SimpleNamespace(forward_step=None)
    made.flops = SimpleNamespace(add=lambda _: None)
    made._chunks = []
    compared: list[Any] = []
    made.runtime = SimpleNamespace(
        model_shape=None,
        settings=SimpleNamespace(verify="digest"),
        check_attention=lambda chunks: compared.append((*chunks, len(seen))) or "",
    )
    made._wrapper = lambda *_: Wrapper()
    monkeypatch.setattr(session, "run_schedule", run_schedule)
    monkeypatch.setattr(session, "batch_flops", lambda *_: SimpleNamespace(model_flops=1.0))
    iterator = SimpleNamespace(name="train")
    for _ in range(2):
        seen.clear()
        made.run_step(
            forward_step_func=None, data_iterator=iterator, model="model", seq_length=8, forward_only=forward_only
        )
    assert compared == [("model", 0)], "attention is compared once, before the data of the first step"
    if forward_only:
        assert set(seen) == {"starting up"}, "an evaluation has its own name"
    else:
        assert seen == ["iteration 3, plan and samples", "iteration 3, forward and backward passes"]
        assert phase.current() == "iteration 3, the optimizer's step"


def test_chats_are_tokens_with_either_transformers(tmp_path: Path) -> None:
    """Megatron-LM takes the first of what apply_chat_template returns for tokens; in 5 that is a dict."""
    from transformers import AutoTokenizer

    from tests.unit.data.made_tokenizers import write_tokenizer

    folder = str(write_tokenizer(tmp_path))

    class Theirs:
        def __init__(self, path: str, prompt_format: str) -> None:
            self.prompt_format = prompt_format
            self._tokenizer = AutoTokenizer.from_pretrained(path)

        def tokenize(self, chat: list[dict[str, str]]) -> Any:
            whole = self._tokenizer.apply_chat_template(chat, tokenize=True, return_tensors="np")[0]
            turns = [self._tokenizer.apply_chat_template([turn], tokenize=True) for turn in chat]
            return whole.copy().tolist(), turns

    replaced = hooks.sft_tokenizer(adaptor(), Theirs)
    made = replaced(folder, prompt_format="some")
    chat = [{"role": "user", "content": "What runs?"}, {"role": "assistant", "content": "The river."}]
    whole, turns = made.tokenize(chat)
    assert whole == turns[0] + turns[1]
    assert made.prompt_format == "some"
    assert issubclass(replaced, Theirs)
    assert made._tokenizer.decode(whole).startswith("<|im_start|>user")


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_says_what_is_overridden(monkeypatch: pytest.MonkeyPatch, caplog: Any, rank: int) -> None:
    parsed = argparse.Namespace(distributed_backend="nccl", dynamic_cp=True, rank=rank, tensor_model_parallel_size=1)
    monkeypatch.setattr(flags, "refuse_without_effect", lambda _: None)
    monkeypatch.setattr(flags, "translate", lambda args: args)
    monkeypatch.setattr(flags, "overridden", lambda *_: [(logging.WARNING, "--one becomes 2"), (logging.INFO, "three")])
    made = adaptor()
    with caplog.at_level(logging.INFO):
        hooks.parse_args(made, lambda: parsed)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == ([("WARNING", "dynamic CP: --one becomes 2"), ("INFO", "dynamic CP: three")] if rank == 0 else [])


LOGGED = [[[10.0, 2.0], [9.0, 3.0], [0.0, 0.0]], [[700.0, 100.0]]]
"""Lane -> micro-batches: [sum of losses, number of tokens]. Evaluation adds these up and divides once."""


def _sum(width: int) -> list[list[float]]:
    from megatron.integrations.lm_adaptor.session import sum_over_lanes

    initialize_model_parallel()
    assert sum_over_lanes([]) == [], "stages before the last"
    logged = [{"lm loss": torch.tensor(entry[:width])} for entry in LOGGED[dist.get_rank()]]
    return [entry["lm loss"].tolist() for entry in sum_over_lanes(logged)]


def test_tokens_of_all_lanes_and_micro_batches_weigh_alike() -> None:
    assert run_ranks(2, _sum, 2) == [[[719.0, 105.0]]] * 2


def test_a_loss_function_that_logs_means_is_refused() -> None:
    with pytest.raises(RuntimeError, match=rf"{DataError.__name__}.* logs 1 values as 'lm loss', \[sum of losses, num"):
        run_ranks(2, _sum, 1)


def test_an_interval_begins_without_the_step_before_it() -> None:
    flops = StepFlops()
    for steps, mean in (((8.0,), 8.0), ((2.0,), 2.0), ((1.0, 4.0, 4.0), 3.0)):
        for step in steps:
            flops.add(step)
            assert flops.latest == step
        assert flops.mean == mean
        flops.start_interval()
        assert (flops.latest, flops.mean) == (steps[-1], mean)


def test_the_sum_over_a_run_takes_each_step_as_it_was() -> None:
    flops = StepFlops()
    made = adaptor(session=SimpleNamespace(flops=flops))
    total = 0.0
    for step in (8.0, 2.0, 5.0):
        flops.add(step)
        total += hooks.num_floating_point_operations(made, None, None, 1)
    assert total == 15.0
    made.is_logging = True
    assert hooks.num_floating_point_operations(made, None, None, 1) == 5.0
    flops.add(1.0)
    assert hooks.num_floating_point_operations(made, None, None, 1) == 4.0


def state_of(lane: int) -> dict[str, Any]:
    return {"random_rng_state": "python's", **{name: f"{name} of {lane}" for name in DRAWN_FROM}}


def saved_by_all(sharded: bool) -> dict[str, Any]:
    """Return what lane 0 saves."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import ShardedObject

    from megatron.integrations.lm_adaptor.session import add_lanes

    states: Any = [state_of(dist.get_rank())]
    if sharded:
        states = ShardedObject("rng_state", states, (1, 1), (0, 0), replica_id=dist.get_rank())
    assert dist.group.WORLD is not None
    add_lanes(states, dist.group.WORLD)
    return {"rng_state": states.data if sharded else states}


@pytest.mark.parametrize("sharded", [True, False], ids=["torch_dist", "torch"])
def test_each_lane_gets_its_own_state_back(sharded: bool) -> None:
    checkpoint = run_ranks(3, saved_by_all, sharded)[0]
    assert {name: checkpoint["rng_state"][0][name] for name in DRAWN_FROM} == {
        name: state_of(0)[name] for name in DRAWN_FROM
    }, "the stock checkout would go on with another state"
    for lane in range(3):
        loaded = copy.deepcopy(checkpoint)
        choose_lane(loaded, lane, 3)
        del loaded["rng_state"][0][LANES]
        assert loaded["rng_state"] == [state_of(lane)]


@pytest.mark.parametrize("lanes", [1, 2])
def test_other_numbers_of_lanes_are_said(caplog: pytest.LogCaptureFixture, lanes: int) -> None:
    """One: a checkpoint without dynamic CP."""
    state = state_of(0) | ({LANES: [state_of(7)] * lanes} if lanes > 1 else {})
    for lane in (0, 1):
        with caplog.at_level(logging.WARNING):
            choose_lane({"rng_state": [state]}, lane, 4)
    assert [record.getMessage() for record in caplog.records] == [
        f"the checkpoint has the random states of {lanes} lanes, this run has 4: dropout differs from now on"
    ]
    assert state["torch_rng_state"] == "torch_rng_state of 0"
    choose_lane(saved_without := {"model": 1}, 0, 2)
    assert saved_without == {"model": 1}


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
