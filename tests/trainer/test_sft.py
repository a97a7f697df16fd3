"""Chats through the whole data path: loss on exactly the assistant's tokens, on one rank and on four."""

import contextlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron.dynamic_cp.step.schedule import sum_over_job
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.loop.training import _evaluating
from megatron.trainer.setup.run import set_up
from tests.distributed.harness import run_ranks
from tests.trainer.training_ranks import train

ROOT = Path(__file__).parents[2]
NUM_SAMPLES = 8
FLAGS = (
    "--distributed-backend gloo --sft --split 1,0,0 --seq-length 2048 --num-layers 2 --hidden-size 32 "
    "--ffn-hidden-size 32 --num-attention-heads 4 --position-embedding-type rope --lr 1e-3 --train-iters 1 "
    f"--global-batch-size {NUM_SAMPLES} --num-workers 0 --data-path"
)
# The order of float32 sums differs between layouts; the mutants below miss by more than a hundred times this.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """The data of the example, and what of each text is learned: found by looking for it, not by a template."""
    spec = importlib.util.spec_from_file_location("sft_chat", ROOT / "examples" / "sft_chat.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = module.lines(60)
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    masks = {}
    for line in lines:
        text, mask = b"", []
        for message in json.loads(line)["messages"]:
            head, body = f"<|im_start|>{message['role']}\n".encode(), f"{message['content']}<|im_end|>".encode()
            text += head + body + b"\n"
            mask += [0] * len(head) + [int(message["role"] == "assistant")] * len(body) + [0]
        masks[text] = mask
    return path, masks


def shifted(values):
    return replace(values, loss_mask=np.append(values.loss_mask[1:], np.float32(0)))


def dropped(values):
    return replace(values, loss_mask=np.ones_like(values.loss_mask))


MUTANTS = {"as it is": lambda values: values, "shifted": shifted, "dropped": dropped}


def sums_of_ranks(words, masks):
    """Return how the masked losses of the first global batch sum up; on one rank by mutant, and what they must be."""
    os.environ["RANK"] = str(dist.get_rank())
    run = set_up(parse_args(words, dist.get_world_size()))
    stream = run.splits.train
    real = stream.read
    samples = stream.global_batch(0, NUM_SAMPLES)
    found, cp_sizes, mutants = {}, set(), {"as it is": MUTANTS["as it is"]}
    with contextlib.closing(run), _evaluating(run.model):
        if dist.get_world_size() == 1:
            found["reference"], mutants = reference(run, stream, samples, masks), MUTANTS
        for name, mutate in mutants.items():
            stream.read = lambda sample_id, mutate=mutate: mutate(real(sample_id))
            with contextlib.closing(run.iterator_wrapper(stream, name)) as wrapper:
                data = wrapper.wrap(0, samples)
                cp_sizes |= {bucket.cp_size for bucket in wrapper.plan.buckets}
                logged = run.run_schedule(data, wrapper, forward_only=True)
            total = sum_over_job(logged, exchanged_bytes=0, stop=False, device=run.runtime.device)
            found[name] = total.loss_sum, total.num_tokens
    return found, cp_sizes


def reference(run, stream, samples, masks):
    """Return (sum, number) of the losses of a stock GPTModel with the same weights, by the test's own mask."""
    ours = run.trainable.chunks[0]
    stock = GPTModel(
        config=run.config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=ours.vocab_size,
        max_sequence_length=run.settings.planning.seq_length, position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )  # fmt: skip
    left = stock.load_state_dict(ours.state_dict(), strict=False)
    assert not left.missing_keys, left
    assert not [name for name in left.unexpected_keys if not name.endswith("_extra_state")], left
    loss_sum, num_tokens = 0.0, 0
    for sample in samples:
        values = stream.read(sample.sample_id)
        whole = bytes(np.append(values.tokens, values.labels[-1]).astype(np.uint8))
        mask = torch.tensor(masks[whole][1:], dtype=torch.float64)
        tokens, labels = (torch.from_numpy(np.ascontiguousarray(x))[None] for x in (values.tokens, values.labels))
        losses = stock(tokens, torch.arange(sample.seqlen)[None], None, labels=labels)[0]
        loss_sum += float((losses.double() * mask).sum())
        num_tokens += int(mask.sum())
    return loss_sum, num_tokens


def test_four_ranks_mask_exactly_the_tokens_of_the_assistant(chats):
    path, masks = chats
    words = f"{FLAGS} {path}".split()
    ((alone, _),) = run_ranks(1, sums_of_ranks, [*words, "--max-seqlen-per-dp-cp-rank", "2048"], masks)
    by_rank = run_ranks(4, sums_of_ranks, [*words, "--dynamic-cp", "--max-seqlen-per-dp-cp-rank", "512"], masks)
    assert set().union(*(sizes for _, sizes in by_rank)) == {1, 2, 4}
    expected_sum, expected_num = alone.pop("reference")
    num_all = sum(len(mask) - 1 for mask in masks.values())
    assert 0 < expected_num < num_all / 2
    for found in (alone, *(found for found, _ in by_rank)):
        assert found["as it is"][1] == expected_num
        assert found["as it is"][0] == pytest.approx(expected_sum, rel=TOLERANCE)
    # What a wrong mask gives is far from it, or these figures would show nothing.
    assert abs(alone["shifted"][0] / expected_sum - 1) > 100 * TOLERANCE
    assert alone["dropped"][1] > 2 * expected_num


def flags_of_example(tmp_path, name="sft_chat.sh", **variables):
    """Return what a script of the examples gives to torchrun."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (tools / "torchrun").write_text("#!/bin/sh\nexit 0\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = os.environ | {"PYTHON": str(tools / "python3"), "RUN_DIR": str(tmp_path / "run")} | variables
    command = ["sh", str(ROOT / "examples" / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    words = shlex.split(done.stdout.splitlines()[-1])
    assert words[:6] == ["torchrun", "--local-addr", "localhost", "--nproc-per-node", "4", "pretrain_gpt.py"]
    return words[6:]


@pytest.mark.nightly
def test_the_example_learns(tmp_path):
    """Evaluation included: `train` fails where it does."""
    words = flags_of_example(tmp_path)
    assert {"--sft", "--dynamic-cp"} < set(words)
    records = train(4, *words, "--train-iters 12 --lr-decay-iters 30 --num-workers 1")
    assert len(records) == 12
    losses = [record.loss for record in records.values()]
    assert losses[-1] < 0.8 * losses[0]
    assert {size for record in records.values() for size in record.plan.cp_histogram} == {1, 2, 4}


@pytest.mark.nightly
def test_a_run_that_goes_on_writes_the_date_of_its_start(tmp_path, monkeypatch):
    """A template with the date gives the same samples tomorrow; a new run has tomorrow's."""
    from megatron.trainer.setup import run
    from tests.trainer.training_ranks import losses

    class Day(run.date):
        today_is = "2026-11-25"

        @classmethod
        def today(cls):
            return cls.fromisoformat(cls.today_is)

    monkeypatch.setattr(run, "date", Day)
    template, path, saved = tmp_path / "t.jinja", tmp_path / "chats.jsonl", tmp_path / "saved"
    template.write_text(
        "{{ strftime_now('%A, %d %B') }};{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "Five and a bit."}]
    path.write_text(f"{json.dumps({'messages': chat})}\n" * 40)
    words = f"--sft --data-path {path} --chat-template {template} --split 1,0,0 --eval-iters 0 --lr-decay-iters 8"
    without = {"--mock-data"}
    whole = losses(train(2, words, f"--train-iters 4 --save {saved} --save-interval 2", without=without))
    (saved / "latest_checkpointed_iteration.txt").write_text("2\n")
    Day.today_is = "2026-12-31"
    assert losses(train(2, words, f"--train-iters 4 --load {saved}", without=without)) == whole[2:]
    assert losses(train(2, words, "--train-iters 4", without=without)) != whole
