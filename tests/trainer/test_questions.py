"""Prompts with several responses through the whole trainer: as their pairs apart, on lanes and stages, and resumed."""

import contextlib
import json
import os
import random

import pytest
import torch
import torch.distributed as dist

from megatron.dynamic_cp.model.experts import routers
from megatron.dynamic_cp.step.schedule import sum_over_job, sum_over_routers
from megatron.trainer.checkpoints import checkpoint_files
from megatron.trainer.data.build import build_splits
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup.run import data_config, set_up
from tests.distributed.harness import run_ranks
from tests.distributed.parity import in_jobs_of_their_own, reference_name
from tests.trainer.commandline import SMALL, command_line
from tests.trainer.forked_planner import warm_up
from tests.trainer.test_sft import flags_of_example
from tests.trainer.training_ranks import losses, run_command, train
from tests.unit.data.test_questions import apart

TOLERANCE = 5e-6
LANES = "--dynamic-cp --split 1,0,0 --max-seqlen-per-dp-cp-rank 64 --dynamic-cp-verify full --overlong error"
STAGES = f"{LANES} --pipeline-model-parallel-size 2 --max-seqlen-per-dp-cp-rank 128"


def made_lines(seed, number=6):
    """Return prompts with 1 to 4 responses; some need both lanes."""
    rng = random.Random(seed)

    def text(low, high):
        return "".join(rng.choice("abcde fgh") for _ in range(rng.randint(low, high)))

    return [
        {
            "prompt": text(40, 60) if index % 4 == 3 else text(2, 20),
            "responses": [text(0, 14) for _ in range(1 + index % 4)],
        }
        for index in range(number)
    ]


def write(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def made_trees():
    """Return lines of turns at three levels and at two, of which the first needs both lanes."""
    below = [{"text": "d fgh", "children": [{"text": "a"}, {"text": ""}]}, {"text": "bcde" * 5}]
    tries = [{"text": "h gf", "children": [{"text": text, "learned": False}, *below]} for text in ("ee", "c")]
    small = [{"text": "efg", "children": [{"text": "h"}, {"text": "c" * index}]} for index in range(4)]
    return [{"turns": turns} for turns in ({"text": "abc " * 9, "learned": False, "children": tries}, *small)]


def num_learned(line):
    """Return the tokens that a line without a branching learns."""
    if "responses" in line:
        return sum(len(text) + 1 for text in line["responses"])
    turn, before, number = line["turns"], 0, 0
    while turn is not None:
        children = turn.get("children")
        number += (len(turn["text"]) + (not children) - (not before)) * turn.get("learned", True)
        before, turn = before + 1, children[0] if children else None
    return number


@pytest.fixture(scope="module", params=["questions", "trees"])
def files(request, tmp_path_factory):
    """The same responses or branches: together, and each with a prompt of its own; learned tokens; some CP sizes."""
    folder = tmp_path_factory.mktemp(request.param)
    lines = made_lines(1, 12) if request.param == "questions" else made_trees()
    alone = [*apart(lines)]
    together, pairs = write(folder / "together.jsonl", lines), write(folder / "apart.jsonl", alone)
    return (
        f"--data-path {together} --global-batch-size {len(lines)}",
        f"--data-path {pairs} --global-batch-size {len(alone)}",
        sum(map(num_learned, alone)),
        {"questions": {1, 2}, "trees": {2}}[request.param],
    )


only_questions = pytest.mark.parametrize("files", ["questions"], indirect=True)


def gradients_of(runs, look=lambda name, run: None):
    """Return for each run loss, learned tokens, CP sizes and this rank's gradients, from equal weights."""
    os.environ["RANK"] = str(dist.get_rank())
    found, weights = {}, None
    for name, words in in_jobs_of_their_own(runs):
        run = set_up(parse_args(words, dist.get_world_size()))
        (chunk,) = run.trainable.chunks
        parameters = {reference_name(chunk, one): parameter for one, parameter in chunk.named_parameters()}
        if weights is None:
            weights = {one: parameter.detach().clone() for one, parameter in parameters.items()}
        for one, parameter in parameters.items():
            parameter.data.copy_(weights[one])
        for wrapped in run.model:
            wrapped.zero_grad_buffer()
        batch = run.splits.train.global_batch(0, run.settings.training.global_batch_size)
        with contextlib.closing(run), contextlib.closing(run.iterator_wrapper(run.splits.train, "train")) as wrapper:
            logged = run.run_schedule(wrapper.wrap(0, batch), wrapper, forward_only=False)
            sizes = {bucket.cp_size for bucket in wrapper.plan.buckets if any(one.mask for one in bucket.samples)}
            look(name, run)
        total = sum_over_job(logged, exchanged_bytes=0, stop=False, device=run.runtime.device)
        gradients = {one: parameter.main_grad.clone() for one, parameter in parameters.items()}
        found[name] = total.loss_sum, total.num_tokens, sizes, gradients
    return found


WINDOWS = ("", "--window-size 11,0 --window-attn-skip-freq 2")


@pytest.mark.by_day("questions---window-size 11,0 --window-attn-skip-freq 2")
@pytest.mark.parametrize(
    ("files", "windows"),
    [*(("questions", one) for one in WINDOWS), ("trees", ""), ("trees", "--window-size 11,0 --window-sink-tokens 2")],
    indirect=["files"],
)
def test_loss_and_gradients_are_those_of_the_pairs_apart_on_lanes_and_on_stages(files, windows):
    warm_up()
    together, apart = (f"{one} {windows}" for one in files[:2])
    runs = {"apart": f"{LANES} {apart}", "lanes": f"{LANES} {together}", "stages": f"{STAGES} {together}"}
    runs = {name: command_line(SMALL, words) for name, words in runs.items()}
    compared = set()
    for found in run_ranks(2, gradients_of, runs, timeout_s=120):
        loss, num_tokens, _, expected = found.pop("apart")
        assert num_tokens == files[2]
        for name, (loss_sum, number, sizes, gradients) in found.items():
            assert number == num_tokens
            assert loss_sum == pytest.approx(loss, rel=TOLERANCE)
            assert name == "stages" or sizes >= files[3]
            for one, gradient in gradients.items():
                error = (gradient - expected[one]).abs().max() / expected[one].abs().max()
                assert error <= TOLERANCE, f"{name}, {one}: {error:.1e}"
                compared.add((name, one))
    assert {one for name, one in compared if name == "stages"} == {one for name, one in compared if name == "lanes"}
    assert len(compared) > 20


ROUTED = (
    "--num-experts 8 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-z-loss-coeff 0.1"
)


def routers_of(runs):
    """Return what `gradients_of` does, and behind it the moved biases of each run's experts, and what is logged."""
    counted = {}

    def count(name, run):
        biases = torch.stack([router.expert_bias for router in routers(run.model)])
        counted[name] = biases, sum_over_routers(run.model, run.runtime.device)

    found = gradients_of(runs, count)
    return {name: (*found[name], *counted[name]) for name in runs}


@pytest.mark.by_day("trees")
@pytest.mark.parametrize(
    ("files", "flags"),
    [
        *(("questions", flags) for flags in ("", "--moe-aux-loss-coeff 0.1", "--expert-model-parallel-size 2")),
        ("trees", "--moe-aux-loss-coeff 0.1"),
    ],
    indirect=["files"],
)
def test_losses_and_biases_of_routers_are_those_of_the_pairs_apart(files, flags):
    """Some samples are on two lanes: placed, or by heads where a loss counts sequences or lanes share experts."""
    warm_up()
    together, apart = (f"{one} {ROUTED} {flags}" for one in files[:2])
    runs = {name: command_line(SMALL, LANES, words) for name, words in (("apart", apart), ("lanes", together))}
    for found in run_ranks(2, routers_of, runs, timeout_s=120):
        loss, _, _, expected, biases, logged = found["apart"]
        loss_sum, _, sizes, gradients, biases_together, logged_together = found["lanes"]
        assert sizes >= files[3]
        assert loss_sum == pytest.approx(loss, rel=TOLERANCE)
        for one, gradient in gradients.items():
            error = (gradient - expected[one]).abs().max() / expected[one].abs().max()
            assert error <= TOLERANCE, f"{one}: {error:.1e}"
        assert torch.equal(biases_together, biases)
        assert biases.any()
        for name in ("aux_loss", "z_loss"):
            assert logged_together.mean(name) == pytest.approx(logged.mean(name), rel=TOLERANCE)
        assert logged.mean("z_loss") > 1
        assert (logged.mean("aux_loss") > 0.5) == ("aux-loss" in flags)


@pytest.mark.nightly
def test_a_run_evaluates_saves_and_goes_on_to_the_last_digit(tmp_path, capfd):
    """With workers that pack, a dump of its plans, and a replay of those."""
    data = write(tmp_path / "a.jsonl", made_lines(2, 20))
    words = f"{LANES} --split 80,20,0 --data-path {data} --global-batch-size 5 --num-workers 1 --lr-decay-iters 4"
    folder, dump = tmp_path / "saved", tmp_path / "dump"
    saving = f"--save {folder} --save-interval 2 --eval-iters 1 --dynamic-cp-dump {dump} --train-iters 4"
    records = train(2, words, saving)
    said = capfd.readouterr().out
    assert "20 JSON lines, 20 prompts with 50 responses of" in said
    assert "validation loss at iteration 4" in said
    plans = [json.loads(line) for line in (dump / "plans.jsonl").read_text().splitlines()]
    assert len(plans) == 5
    for plan in plans:
        assert "shared_question:" in json.dumps(plan["plan"])
        # FLOPs count the pairs of the masks.
        assert plan["facts"]["seqlen_squared_sum"] < sum(seqlen * seqlen for seqlen in plan["seqlens"])
    (folder / checkpoint_files.TRACKER).write_text("2\n")
    again = train(2, words, f"--load {folder} --train-iters 4 --dynamic-cp-replay {dump}")
    assert losses(again) == losses(records)[2:]


@only_questions
def test_an_exchange_that_serves_no_masks_is_one_message_on_all_ranks_at_the_start(files):
    together = files[0]
    for ended in run_command(2, LANES, together, "--cp-comm-type p2p"):
        assert ended.code != 0
        assert "which p2p cannot serve on several lanes, and the longest of its batch has" in ended.error
        assert (
            "a lane holds 64: allow a2a or blocks (--cp-comm-type), or raise --max-seqlen-per-dp-cp-rank" in ended.error
        )


def test_the_example_trains_the_same_responses_together_and_apart(tmp_path):
    words = flags_of_example(tmp_path, "several_responses.sh")
    together, apart = (
        build_splits(data_config(parse_args(one, 4))).train
        for one in (words, flags_of_example(tmp_path, "several_responses.sh", APART="1"))
    )
    assert (together.num_samples, apart.num_samples) == (192, 768)
    assert together.has_masks
    assert not apart.has_masks
    num_targets = [
        sum(int(stream.read(place).loss_mask.sum()) for place in range(stream.num_samples))
        for stream in (together, apart)
    ]
    assert num_targets[0] == num_targets[1] > 768
