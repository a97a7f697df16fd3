"""Plants faults in copies of the code, one at a time in each, and says for each fault whether its tests notice it.

    python -m tools.plant_faults [--tests-of FOLDER] [NAME ...]

Whoever removes or merges tests runs it before and after: `--tests-of` takes tests/ from another checkout. A fault is a
piece of text that stands once in the code, wherever that moves, so a fault that no longer fits is told and not skipped.
Two faults are tried at a time, each in a copy of its own (runs/planted-0, -1), by forks of a process that has imported
what no fault changes: torch and megatron-core, two thirds of what a fault would compute otherwise. Only a fault in the
planner's compiled loops has them compiled anew.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.machinery import SourceFileLoader
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CODE = ("dynamic_cp", "megatron")
ALSO_COPIED = (
    *("benchmarks", "docs", "examples", "tests", "tools"),
    *("pyproject.toml", "setup.py", "pretrain_gpt.py", "README.md", "SECURITY.md"),
)
COPIES = [ROOT / "runs" / f"planted-{number}" for number in range(2)]
STAYS = (
    *("pytest", "numba", "torch.distributed.checkpoint"),
    *(f"megatron.core.{name}" for name in ("models.gpt.gpt_model", "optimizer", "dist_checkpointing.strategies")),
)
"""What is imported before forking."""
LIMIT_S = 3600
"""Seconds after which tests are ended that hang where pytest's own limits do not hold yet."""
_FORK = multiprocessing.get_context("fork")
_number = count()


class Fault(NamedTuple):
    """A piece of code, what takes its place, and the words of pytest that should notice."""

    right: str
    wrong: str
    tests: str


PARITY = "tests/distributed/test_parity.py -k mixed_exchanges and long_tail"
FULL = "tests/distributed/test_masks.py -k every_exchange"
HEADS = "tests/distributed/test_parity.py -k of_the_day and dense"
DELTA = "tests/distributed/test_parity.py -k of_the_day and delta"
ROUTED = "tests/distributed/test_parity.py -k of_the_day and experts"
BIASED = "tests/distributed/test_parity.py -k of_the_day and further"
PROMISES = "tests/property/test_plans.py -k every_kind_of_case and seeds0"
RESUMED = "tests/trainer/test_training.py -k test_a_resumed_run"
PLACED = "tests/distributed/test_placed_attention.py -k dense_softmax"
LOGITS = "tests/trainer/test_weights.py -k logits_are_those"
QUESTIONS = "tests/trainer/test_questions.py -k pairs_apart"
NANO_BATCHES = "tests/distributed/test_nano_batches.py -k every_token or positions"
TICKS = "tests/distributed/test_ticks.py -k equal_single_process and day"
EXPERTS = "tests/distributed/test_experts.py"
REPORTS = "tests/distributed/test_upstream_faults.py"
NORMS = REPORTS + " -k norm_that_gradients"
POST_TRAINING = "tests/distributed/test_post_training.py -k equal_a and day"
HYBRIDS = "tests/distributed/test_hybrids.py"
ENGINE = "tests/distributed/test_transformer_engine_attention.py -k equals_float64"
LINEAR = "tests/distributed/test_linear_attention.py -k token_after_token"
MASKS = "tests/distributed/test_masks.py -k test_attention_equals"
RANGED_PACKS = "tests/distributed/test_ranged_packs.py"
FAKE_CUDA = "tests/fake_cuda/test_fake_cuda.py"
FAULTS = {
    "a tile is called full one column early": Fault(
        "(last <= np.minimum.reduceat(end, starts)[rows])",
        "(last <= np.minimum.reduceat(end, starts)[rows] + 1)",
        f"{RANGED_PACKS} -k test_tiles_are",
    ),
    "kernels get heads that lie in pieces": Fault(
        "return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()", "return x_THD", f"{RANGED_PACKS} -k in_pieces"
    ),
    "flash gets a log-sum-exp that lies in pieces": Fault(
        "        lse_HT.contiguous(),\n        pack.cu_rows,\n        pack.cu_columns,\n        max(2, pack.max_rows)",
        "        lse_HT,\n        pack.cu_rows,\n        pack.cu_columns,\n        max(2, pack.max_rows)",
        f"{FAKE_CUDA} -k never_waits",
    ),
    "a ring uses keys before they are there": Fault(
        "with _failures_named(self._group, self._params):\n            for work in self._pending:\n"
        "                work.wait()\n",
        "with _failures_named(self._group, self._params):\n            pass\n",
        f"{FAKE_CUDA} -k never_waits",
    ),
    "places of a pass are copied to the device while the host waits": Fault(
        "places=to_device(places, device)",
        "places=torch.from_numpy(places).to(device)",
        f"{FAKE_CUDA} -k post_training",
    ),
    "a chain on a stream of its own does not wait for what it sends": Fault(
        "        stream.wait_stream(torch.cuda.current_stream(stream.device))\n",
        "",
        f"{FAKE_CUDA} -k faults_are_noticed",
    ),
    "the norm of a gated delta net has the gradient of a TP rank's heads": Fault(
        "parameter.register_hook(lambda gradient: gradient * self.tp_size)",
        "pass",
        DELTA,
    ),
    "sections of a projection are saved as one": Fault(
        'found = {"in_proj.weight": self.rows, "conv1d.weight": self.channels}',
        'found = {"conv1d.weight": self.channels}',
        f"{HYBRIDS} -k checkpoints",
    ),
    "steps of Mamba-2 have no bias": Fault(
        'softplus(sections["dt"].to(exact) + self.dt_bias.to(exact))',
        'softplus(sections["dt"].to(exact))',
        HYBRIDS,
    ),
    "a half of a layer keeps the other one": Fault(
        "half.pre_mlp_layernorm, half.mlp, half.mlp_bda = IdentityOp, IdentityOp, IdentityFuncOp",
        "pass",
        f"{HYBRIDS} -k another_half",
    ),
    "a framework gets the slower groups": Fault(
        "reason = min(candidates, key=lambda name: (largest_of",
        "reason = max(candidates, key=lambda name: (largest_of",
        "tests/unit/scheduler",
    ),
    "a framework's pipeline is forgotten": Fault(
        '"pp_size": state.get_pipeline_model_parallel_world_size(),', '"pp_size": 1,', "tests/unit/scheduler"
    ),
    "a framework's groups lose a sample": Fault(
        "            overflow += more\n",
        "            del more\n",
        "tests/unit/scheduler tests/megatron_lm/test_scheduler.py",
    ),
    "results of a pass lie as lanes hold them": Fault(
        "np.where(shard < sample.seqlen, self.starts[index] + shard, self.num_tokens)",
        "np.where(shard < sample.seqlen, np.arange(here.start, here.stop), self.num_tokens)",
        POST_TRAINING,
    ),
    "a response is summed over one shard": Fault(
        "    if group.size() > 1:\n        dist.all_reduce(total, group=group)\n", "", POST_TRAINING
    ),
    "weights are those of the token before": Fault(
        "{name: values[places] for name", "{name: values.roll(1)[places] for name", POST_TRAINING
    ),
    "advantages are over the batch, not its groups": Fault(
        "advantages = values - means[numbers]", "advantages = values - values.mean()", POST_TRAINING
    ),
    "gradients of a response's sum stay on their lane": Fault(
        "return _summed(gradients[0], ctx.group), None", "return gradients[0], None", POST_TRAINING
    ),
    "a response counts on every lane": Fault(
        "local.sums(shares[None], len(self.counts))[0, local.present]).sum()", "1).sum()", POST_TRAINING
    ),
    "a value head is trained on one part of the sequence": Fault(
        "config.sequence_parallel  # type: ignore[attr-defined]  # sum over TP ranks", "False", POST_TRAINING
    ),
    "the scheduler is not restored": Fault('    _load_scheduler(trainable.scheduler, run["scheduler"])\n', "", RESUMED),
    "the optimizer is not restored": Fault(
        '    request.apply(loaded["optimizer_state"], run["iteration"])\n', "", RESUMED
    ),
    "a resumed run reads a sample again": Fault(
        'consumed_samples=run["consumed_samples"], coefficients',
        'consumed_samples=run["consumed_samples"] - 1, coefficients',
        RESUMED,
    ),
    "random states are not restored": Fault(
        '        set_rng_state(loaded["rng"])\n',
        "        pass\n",
        "tests/trainer/test_training.py -k test_dropout_resumes",
    ),
    "an exit interval is ignored": Fault(
        "stop = stop or _divides(training.exit_interval, position.iteration)",
        "stop = bool(stop)",
        "tests/trainer/test_training.py -k leaves_at_an_interval or continues_the_run",
    ),
    "a run that leaves does not save": Fault(
        "(due or stop or finished)",
        "(due or finished)",
        "tests/trainer/test_training.py -k leaves_at_an_interval or continues_the_run",
    ),
    "the levels of an exchange change places for TransformerEngine": Fault(
        "group = [params.heads_group, params.ring_group]", "group = [params.ring_group, params.heads_group]", ENGINE
    ),
    "TransformerEngine takes boundaries for those of padding": Fault(
        "cu_seqlens_q_padded=params.cu_seqlens_q_padded,", "cu_seqlens_q_padded=params.cu_seqlens_q.clone(),", ENGINE
    ),
    "TransformerEngine's group is left set": Fault(
        "            self.set_context_parallel_group(*before)\n", "            pass\n", ENGINE
    ),
    "attention is summed in bfloat16": Fault(
        "SUM_DTYPE = torch.float32",
        "SUM_DTYPE = torch.bfloat16",
        "tests/distributed/test_attention.py tests/distributed/test_placed_attention.py -k in_float32",
    ),
    "every layer is rotated": Fault(
        "self._rotates = not (unrotated and unrotated[self.layer_number - 1])", "self._rotates = True", HEADS
    ),
    "YaRN has no concentration": Fault(
        "self._concentration = concentration(self.config)", "self._concentration = 1.0", HEADS
    ),
    "heads have the gates of others": Fault(
        "torch.sigmoid(gate.reshape(x.shape).float())", "torch.sigmoid(gate.flip(2).reshape(x.shape).float())", HEADS
    ),
    "backward forgets a learned sink": Fault(
        "self.out_THD, self.lse_HT = with_offset(self.out_THD, self.lse_HT, offset_H)",
        "self.out_THD, _ = with_offset(self.out_THD, self.lse_HT, offset_H)",
        HEADS,
    ),
    "lanes have the sinks of the first heads": Fault(
        "self.heads = slice(first, first + self._query_share)", "self.heads = slice(0, self._query_share)", HEADS
    ),
    "what other lanes project up is forgotten": Fault(
        "share if self.grad_weight is None else self.grad_weight.add_(share)",
        "share if self.grad_weight is None else self.grad_weight",
        BIASED,
    ),
    "the rotated key learns from one head": Fault(
        "grad_k_THD[..., widths.content :].sum(dim=1, dtype=SUM_DTYPE)",
        "grad_k_THD[:, 0, widths.content :].to(SUM_DTYPE)",
        BIASED,
    ),
    "router losses are over the static group": Fault(
        "in (self.tp_group if self.config.sequence_parallel else None, self.params.cp_group):",
        "in (self.tp_group if self.config.sequence_parallel else None, self.tp_cp_group):",
        BIASED,
    ),
    "biases of experts are added in full": Fault(
        "(output + of_tokens * probs[:, None])", "(output + of_tokens * (probs[:, None] > 0))", ROUTED
    ),
    "beta is taken for alpha": Fault('"beta": heads, "alpha": heads}', '"alpha": heads, "beta": heads}', DELTA),
    "chunks are convolved alone": Fault(
        "    if not (num_before and rows.has_links):\n", "    if num_before or rows.has_links:\n", LINEAR
    ),
    "a transition is not transposed in backward": Fault(
        "transposed(transitions.index_select(1, before))", "transitions.index_select(1, before)", LINEAR
    ),
    "gradients of states stay on their lane": Fault(
        "behind = ctx.chain.gradients(of_state, of_all)", "behind = torch.zeros_like(of_state)", LINEAR
    ),
    "heads take their groups in rounds": Fault(
        "x_TGK.repeat_interleave(per_group, dim=1).narrow", "x_TGK.repeat(1, per_group, 1).narrow", LINEAR
    ),
    "branches see a token of a sibling": Fault(
        "Rectangle(one.stop, one.end - one.stop, one.start, one.num_tokens, False)",
        "Rectangle(one.stop, one.end - one.stop, one.start, one.num_tokens + 1, False)",
        MASKS,
    ),
    "rows see the ranges of the row before": Fault(
        "np.concatenate((ranges, of_padding))",
        "np.concatenate((ranges[:1], ranges[:-1], of_padding))",
        MASKS,
    ),
    "what a node gives back is lost": Fault(
        "                self._pass.add(one, came, is_collected=which == COLLECT)\n",
        "                self._pass.add(one, came, is_collected=False) if which == DELIVER else None\n",
        PLACED,
    ),
    "gradients of a ring are not collected": Fault("                        grad_kv += spare_grad\n", "", PARITY),
    "padding counts in the loss": Fault(
        "num_tokens = mask.sum().to(torch.int)", "num_tokens = torch.ones_like(mask).sum().to(torch.int)", PARITY
    ),
    "keys of other lanes are not seen in the ring": Fault(
        "                    sums.attend(pack, seen_2THD)\n",
        "                    sums.attend(pack, seen_2THD) if pack.columns is None else None\n",
        PARITY,
    ),
    "positions of a shard count from 0, as of megatron-core's static group": Fault(
        "lambda: cos_sin_at(frequencies, params.positions, dtype, concentration)",
        "lambda: cos_sin_at(frequencies, torch.arange(len(params.positions)), dtype, concentration)",
        PARITY,
    ),
    "labels are shifted after sharding": Fault(
        "    return {name: np.concatenate(column) for name, column in columns.items()}\n\n\ndef _positions(",
        "    found = {name: np.concatenate(column) for name, column in columns.items()}\n"
        '    return found | {"labels": np.roll(found["tokens"], -1)}\n\n\ndef _positions(',
        PARITY,
    ),
    "the tokens of a lane are not counted": Fault(
        "num_tokens = mask.sum().to(torch.int)",
        "num_tokens = mask.sum().to(torch.int) * min(1, torch.distributed.get_rank())",
        PARITY,
    ),
    "an empty place has losses": Fault(
        "    return {name: np.concatenate(column) for name, column in columns.items()}\n\n\ndef _positions(",
        "    found = {name: np.concatenate(column) for name, column in columns.items()}\n"
        '    return found if bucket.samples else found | {"loss_mask": found["loss_mask"] + 1}\n\n\ndef _positions(',
        PARITY,
    ),
    "a chunk sees no gathered keys but its own": Fault(
        "            sums.attend(pack, gathered_2SHD)\n",
        "            sums.attend(pack, gathered_2SHD) if pack.causal else None\n",
        PARITY,
    ),
    "gathered rows lie in the order of lanes": Fault(
        "order[rows_to_tokens] = np.arange(len(order))", "order[:] = np.arange(len(order))", PARITY
    ),
    "heads come back from other lanes": Fault(
        "return all_to_all_heads(sent_RHD.unflatten(0, (self._num_lanes, -1)), self._group, self._params)",
        "return all_to_all_heads(sent_RHD.unflatten(0, (self._num_lanes, -1)), self._group, self._params).flip(0)",
        HEADS,
    ),
    "copies of KV heads go out one round after the other": Fault(
        "x_THD.repeat_interleave(self._copies, dim=1)", "x_THD.repeat(1, self._copies, 1)", HEADS
    ),
    "gradients of norms are not summed over tensor-parallel ranks": Fault(
        "for parameter in norm.parameters():\n            parameter.sequence_parallel = config.sequence_parallel",
        "for parameter in norm.parameters():\n            parameter.sequence_parallel = False",
        HEADS,
    ),
    "the second chunk of a shard is the neighbour's": Fault(
        "mirrored = 2 * cp_size - 1 - cp_rank", "mirrored = cp_size + cp_rank", PARITY
    ),
    "gradients of a KV head's copies are not summed": Fault(
        ".sum(dim=2, dtype=dtype).to(grad_THD.dtype)", ".select(2, 0).to(grad_THD.dtype)", HEADS
    ),
    "an inner group orders its rows as the whole group does": Fault(
        "outer_size = params.cp_group.size() // group.size()", "outer_size = 1", PARITY
    ),
    "keys of padding are seen in the ring": Fault(
        "shown = [count_held(seqlen, padded, params.ring_size, kv_rank) for seqlen, padded in of_sequences]",
        "shown = [padded // params.ring_size for seqlen, padded in of_sequences]",
        FULL,
    ),
    "gathered keys of padding are seen": Fault(
        "_full_packs(rows, params.padded_seqlens, params.seqlens, device)",
        "_full_packs(rows, params.padded_seqlens, params.padded_seqlens, device)",
        FULL,
    ),
    "labels of an encoder are shifted": Fault(
        "np.append(document.labels[1:], IGNORED) if causal else",
        "np.append(document.labels[1:], IGNORED) if True else",
        "tests/distributed/test_masks.py -k labels",
    ),
    "a tile of placed attention is dropped": Fault(
        "        tiles[lane][division].append((numbers[row, ROW], numbers[column, COLUMN]))\n",
        "        if row != column + 1:\n"
        "            tiles[lane][division].append((numbers[row, ROW], numbers[column, COLUMN]))\n",
        PLACED,
    ),
    "a relay hands on what it did not add up": Fault(
        "        self.finish(COLLECT, division)\n        self.begin(DELIVER, division)\n",
        "        self.begin(DELIVER, division)\n        self.finish(COLLECT, division)\n",
        PLACED,
    ),
    "a place of a buffer keeps the sums of what was there": Fault("            self._pass.clear(one)\n", "", PLACED),
    "gradients of fetched keys are not given back": Fault(
        "        total_2SHD.index_add_(1, one.columns, torch.stack((grad_k_SHD, grad_v_SHD)).to(SUM_DTYPE))\n",
        "",
        PLACED,
    ),
    "rows of a tile see the ranges of their sample": Fault(
        "np.clip(bounds - starts, 0, lengths)", "np.clip(bounds, 0, lengths)", PLACED
    ),
    "a message of placed attention is not counted": Fault(
        "params.stats.bytes_sent += sum(sent.nbytes for sent in self._sent)",
        "params.stats.bytes_sent += sum(sent.nbytes for sent in self._sent[1:])",
        PLACED,
    ),
    "imported keys are values": Fault(
        "MODULE.(q k v)_proj.weight | (queries keys keys) hidden",
        "MODULE.(q v k)_proj.weight | (queries keys keys) hidden",
        LOGITS,
    ),
    "the gate is the up projection": Fault(
        "mlp.linear_fc1.weight | mlp.(gate up)_proj.weight",
        "mlp.linear_fc1.weight | mlp.(up gate)_proj.weight",
        LOGITS,
    ),
    "all queries lie before all keys": Fault(
        "grouped = [part.reshape(fused.num_groups, -1, *part.shape[1:]) for part in parts]",
        "grouped = [part.reshape(1, -1, *part.shape[1:]) for part in parts]",
        LOGITS,
    ),
    "imported weights run with other norms": Fault(
        '    _check_imported_flags(trainable.arguments, run.get("flags", {}), folder, finetune)\n',
        "",
        "tests/trainer/test_weights.py -k another_model_is_refused",
    ),
    "positions of masked samples go on": Fault(
        "    return np.where(shard < sample.seqlen, take_shard(by_mask, shard), shard)\n",
        "    return shard\n",
        "tests/distributed/test_placed_attention.py -k tokens_of_their_homes",
    ),
    "placed lanes do not hold multiples": Fault(
        "num_tokens = placed_share(programme.num_tokens, bucket.inner_cp_size, multiple)",
        "num_tokens = placed_share(programme.num_tokens, bucket.inner_cp_size)",
        "tests/distributed/test_parity.py -k placed_by_plan",
    ),
    "a lane exchanges blocks with others than those with its heads": Fault(
        "return self.first_in_group + lane * self.inner_cp_size + self.inner_rank",
        "return self.first_in_group + lane * self.inner_cp_size",
        "tests/distributed/test_placed_attention.py -k heads",
    ),
    "heads exchanged around blocks cost nothing": Fault(
        "heads_s = heads.constant + heads.per_token * np",
        "heads_s = 0.0 * np",
        "tests/unit/mechanisms/test_blocks.py -k a2a",
    ),
    "what is given back is not sent": Fault(
        "back = (query, kv) if backward else (query + lse, 0.0)",
        "back = (query, kv) if backward else (lse, 0.0)",
        "tests/unit/placement/test_programmes.py -k test_sent_bytes",
    ),
    "bytes to other nodes are called those inside": Fault(
        "np.where(nodes[self.sender] == nodes[self.receiver], IN_NODE, ACROSS_NODES)",
        "np.where(nodes[self.sender] == nodes[self.receiver], ACROSS_NODES, IN_NODE)",
        "tests/unit/pricing/test_sent.py",
    ),
    "waiting for other lanes is called computing": Fault(
        '(prices.without_exchange, {"with_exchange": False})',
        "(prices.without_exchange, {})",
        "tests/unit/command/test_comparison.py -k placed",
    ),
    "tiles have the color of who holds their keys": Fault(
        "of_tile = tiles[:, LANE] // lanes_per_color",
        "of_tile = placement.homes[tiles[:, COLUMN], HOLDER] // lanes_per_color",
        "tests/unit/report/test_pictures.py -k test_tiles_are_drawn",
    ),
    "full attention is placed as causal": Fault(
        "masked = with_masks(samples, cost_model.mask)",
        "masked = samples",
        "tests/unit/mechanisms/test_blocks.py -k full_tiles",
    ),
    "no more is tried where nothing fits yet": Fault(
        "if number >= len(groupings) + most_candidates and tried.fastest():",
        "if number >= len(groupings) + most_candidates:",
        "tests/unit/search/test_placed_rows.py -k until_something_fits",
    ),
    "lanes are as uneven as usual, however full": Fault(
        "token_tolerance=min(_TOKEN_TOLERANCE, most_tokens / num_tokens - 1.0),",
        "token_tolerance=_TOKEN_TOLERANCE,",
        "tests/unit/search/test_placed_rows.py -k last_token",
    ),
    "homes are trimmed however many they become": Fault(
        "few = np.flatnonzero(is_cut.sum(axis=(1, 2)) <= (_MOST_TIMES - 1) * len(homes))",
        "few = np.arange(1)",
        "tests/unit/placement/test_cuts.py -k many_more",
    ),
    "relays of equal load look at one kind": Fault(
        "cost = own, load[0, relay] + load[1, relay], total[relay]",
        "cost = own, load[what, relay], total[relay]",
        "tests/unit/placement/test_relays.py",
    ),
    "in a pool gradients are summed up before the last backward": Fault(
        "self._begin_by_themselves and unit.micro_batch == self._last)",
        "self._begin_by_themselves and unit.micro_batch == 0)",
        TICKS,
    ),
    "in a pool the sums of the first chunk begin for all": Fault(
        "self._begin[first.chunk](self._model[first.chunk]", "self._begin[0](self._model[0]", TICKS
    ),
    "a lane takes its ticks for those of one chunk": Fault("vp_size=len(self._chunks),", "vp_size=1,", TICKS),
    "nano-batches go back by the programme of forward": Fault(
        "packs = self._packs_of(device)[is_backward]", "packs = self._packs_of(device)[False]", TICKS
    ),
    "padding of the first nano-batch is not counted": Fault("self.sizes[0] - len(rows[0])]", "0]", NANO_BATCHES),
    "both nano-batches are rotated as the first tokens": Fault(
        "self.params.positions.index_select(0, rows)", "self.params.positions[: len(rows)]", NANO_BATCHES
    ),
    "other servers are relays than the plan counts": Fault(
        "self._relay_servers), relay_order(tasks))", "self._relay_servers))", TICKS
    ),
    "servers without tokens get no more attention than others": Fault(
        "shares = _BESIDE if np.ptp(beside) > 0 and not search.is_at_home else (0.0,)",
        "shares = (0.0,)",
        "tests/unit/pool/test_task_plans.py -k nothing_else",
    ),
    "what nano-batches compute again drops something else": Fault(
        "            random._set_all_rng_states(*self._kept.random[nano_batch])\n",
        "",
        "tests/distributed/test_nano_batches.py -k drops",
    ),
    "in nano-batches the layer before is computed again behind the gradients": Fault(
        "if self.beside is not None and nano_batch == NUM_NANO_BATCHES - 1:",
        "if self.beside is not None and nano_batch == 0:",
        TICKS,
    ),
    "no static packing is tried": Fault(
        "for others in (self._megatron_dev, self._better_static):",
        "for others in (self._megatron_dev,):",
        PROMISES,
    ),
    "the layers' edges are swapped": Fault(
        "return virtual == 0, virtual == pp_size * vp_size - 1",
        "return virtual == pp_size * vp_size - 1, virtual == 0",
        "tests/unit/pipeline",
    ),
    "chunks of a pool go forward order back": Fault(
        "return Unit(micro_batch, chunk if is_forward else vp_size - 1 - chunk)",
        "return Unit(micro_batch, chunk)",
        "tests/unit/pool/test_ticks.py",
    ),
    "tasks made on other stages stay there": Fault(
        "(rows[:, servers] + shift * topology.num_lanes)",
        "(rows[:, servers] + 0 * topology.num_lanes)",
        "tests/unit/pool/test_task_plans.py -k made_once",
    ),
    "biases of experts count on the first tensor-parallel rank alone": Fault(
        "                parameter.tensor_model_parallel = True\n", "", NORMS
    ),
    "learned sinks count on the first tensor-parallel rank alone": Fault(
        "            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)\n",
        "",
        NORMS,
    ),
    "gathered logits are taken for a share of the words": Fault(
        "    patches.repair_gathered_logits()\n", "", REPORTS + " -k in_these_situations"
    ),
    "groups of others are taken for megatron-core's own": Fault(
        "        if ranks != _ranks_of(expected):\n", "        if not ranks:\n", REPORTS + " -k megatron_cores_own"
    ),
    "a target behind the end of a sample counts": Fault(
        "take_shard(getattr(values, name), shard + depth))",
        'take_shard(getattr(values, name), shard + depth * (name != "loss_mask")))',
        REPORTS + " -k behind_the_end",
    ),
    "padded tokens of a rank are too few": Fault(
        "round_up(units * multiple // bucket.cp_size,",
        "round_up(units * multiple // bucket.cp_size - bucket.cp_size // 2,",
        "tests/unit/plans tests/unit/packing tests/unit/search",
    ),
    "labels are not shifted": Fault("labels=document[1:],", "labels=document[:-1],", "tests/unit/data/test_stream.py"),
    "a response begins with the end of the one before": Fault(
        "            tokens[segment.start] = document[segments[segment.parent].stop]\n",
        "            pass\n",
        QUESTIONS,
    ),
    "positions of a response go on from the one before": Fault(
        "            positions[segment.start : segment.stop] += segment.position - segment.start\n",
        "            pass\n",
        QUESTIONS,
    ),
    "a prefix counts once, not once for each branch": Fault(
        "np.repeat([one.num_branches for one in segments], ",
        "np.repeat([1 for one in segments], ",
        "tests/distributed/test_masks.py -k tree_of_turns",
    ),
    "rows that see more than two ranges see the first two": Fault(
        "    for first in range(0, max(most, 1), 2):\n",
        "    for first in range(0, 2, 2):\n",
        "tests/distributed/test_masks.py -k dense",
    ),
    "a prompt is learned": Fault(
        "np.arange(len(tokens)) >= len(prompt)",
        "np.arange(len(tokens)) >= 0",
        QUESTIONS,
    ),
    "masks of a mixed batch go to other samples": Fault(
        "masks[chosen] = part.masks(numbers)",
        "masks[chosen] = part.masks(numbers[::-1])",
        "tests/unit/data/test_questions.py",
    ),
    "samples of a request change places": Fault(
        "return tuple(GlobalBatch(self.sample_ids, self.seqlens, self.masks))",
        "return tuple(GlobalBatch(self.sample_ids, self.seqlens[::-1], self.masks))",
        "tests/trainer/test_training.py -k test_the_same_seed",
    ),
    "a replay takes another layout's plans": Fault(
        "if plan.topology != self._topology:",
        "if False:",
        "tests/trainer/test_dump.py -k does_not_fit",
    ),
    "a save beside the training is waited for": Fault(
        "trainable, in_background = self._trainable, self._in_background and not wait",
        "trainable, in_background = self._trainable, False",
        "tests/trainer/test_async_save.py -k files_are_those",
    ),
    "a flipped bit is read": Fault(
        "            if found != records[path][ALGORITHM]:\n                raise _damaged(path)\n",
        "            pass\n",
        "tests/trainer/test_failures.py -k damaged",
    ),
    "a checkpoint of Megatron-LM begins the data anew": Fault(
        '"consumed_samples": getattr(args, "consumed_train_samples", 0),',
        '"consumed_samples": 0,',
        "tests/trainer/test_interchange.py -k there_and_back",
    ),
    "a document is cut too short": Fault(
        "num_predicted = np.minimum(num_predicted, seq_length)",
        "num_predicted = np.minimum(num_predicted, seq_length - 1)",
        "tests/trainer/test_data_sources.py -k ranks or epoch",
    ),
    "a planner that dies twice is asked again": Fault(
        "            if self._deaths[given_out.key] > 1:\n",
        "            if self._deaths[given_out.key] > 9:\n",
        "tests/faults/test_planner_faults.py -k kills_the_planner_twice",
    ),
    "a signalled rank waits on for a dead rank 0": Fault(
        "if waited_s > limit_s or rank_zero_is_silent():",
        "if waited_s > limit_s:",
        "tests/faults/test_rank_faults.py -k dead_rank_0_ends_the_wait",
    ),
    "SIGUSR1 ends a rank at once": Fault(
        "EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)",
        "EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT)",
        "tests/trainer/test_units.py -k first_signal",
    ),
    "get_batch of newer checkouts has a field less": Fault(
        "        None,  # cu_seqlens_padded\n", "", "tests/megatron_lm/test_hooks.py"
    ),
    "old checkouts are taken for new ones and new for old": Fault(
        "return _numbers(version) >= _numbers(self.since)",
        "return _numbers(version) < _numbers(self.since)",
        "tests/megatron_lm/test_checkout.py tests/megatron_lm/test_hooks.py",
    ),
    "what newer checkouts lack is replaced in them, too": Fault(
        "self.until is not None and self.until.is_in(version)",
        "False",
        "tests/megatron_lm/test_checkout.py tests/megatron_lm/test_hooks.py",
    ),
    "a checkout builds its model from a configuration a release early": Fault(
        'since="0.19",\n    what="`megatron.training.models` builds',
        'since="0.18",\n    what="`megatron.training.models` builds',
        "tests/megatron_lm/test_checkout.py",
    ),
    "padding is sent to experts": Fault(
        "probs, routing_map = probs.masked_fill(~is_real, 0), routing_map & is_real",
        "routing_map = routing_map.clone()",
        f"{EXPERTS} -k published",
    ),
    "a recomputed router has the parameters of what ran last": Fault(
        "        self.recompute_mlp, self.mlp.moe_layer_recompute = self.mlp.moe_layer_recompute, False\n",
        "",
        ROUTED,
    ),
    "experts of all ranks start alike": Fault(
        "torch.manual_seed(seed + number)", "torch.manual_seed(seed)", f"{EXPERTS} -k start_alike"
    ),
    "routers learn from evaluations": Fault(
        "if not (self.training and torch.is_grad_enabled()):  # evaluation, or",
        "if self.training and not torch.is_grad_enabled():  # not evaluation, only",
        "tests/trainer/test_experts.py -k evaluations",
    ),
    "routers count both passes of a recomputation": Fault(
        "if not (self.training and torch.is_grad_enabled()):",
        "if not self.training:",
        f"{EXPERTS} -k counted_once",
    ),
    "biases of experts move by the first micro-batch only": Fault(
        "            if self.enable_expert_bias:\n                self.local",
        "            if self.enable_expert_bias and self.sums is None:\n                self.local",
        f"{EXPERTS} -k counted_once",
    ),
    "biases of experts move by the first layer only": Fault(
        "            if self.enable_expert_bias:\n                self.local",
        "            if self.enable_expert_bias and self.layer_number == 1:\n                self.local",
        BIASED,
    ),
    "the number of an expert is that of its rank": Fault(
        "first = self.ep_group.rank() * self.num_local_experts",
        "first = self.ep_group.rank()",
        f"{EXPERTS} -k start_with",
    ),
    "the z-loss of a prompt counts once": Fault(
        "dim=-1).square() * owners.copies).sum()", "dim=-1).square() * is_real[:, 0]).sum()", f"{QUESTIONS} and routers"
    ),
    "biases of experts know a prompt once": Fault(
        "(routing_map * owners.copies[:, None]).sum(dim=0)", "routing_map.sum(dim=0)", f"{QUESTIONS} and routers"
    ),
    "positions of later tokens stay at the next one": Fault(
        "np.where(shard + depth < len(values.tokens), positions + depth, 0)",
        "np.where(shard + depth < len(values.tokens), positions + min(depth, 1), 0)",
        "tests/distributed/test_features.py -k later_columns",
    ),
    "routers of modules are taken for those of the first layers": Fault(
        "before = self.config.num_layers if",
        "before = -self.config.num_layers if not",
        "tests/trainer/test_experts.py -k another_layout",
    ),
    "a stage without experts cannot save an optimizer of them": Fault(
        "    DistributedOptimizer.state_dict = _also_of_nothing(DistributedOptimizer.state_dict)\n",
        "",
        "tests/trainer/test_experts.py -k another_layout",
    ),
    "a calibration moves the biases of experts": Fault(
        "                bias.copy_(values)\n", "                pass\n", f"{EXPERTS} -k no_training"
    ),
    "an index is taken that another way of reading made": Fault(
        "if dict(index.request) != dict(request):", "if False:", "tests/unit/data/test_index_cache.py"
    ),
    "the identity of data does not see what is learned": Fault(
        "                        digest.update(is_target.tobytes())\n",
        "                        pass\n",
        "tests/unit/data/test_chat.py -k fingerprint",
    ),
    "orders of samples go along to every worker": Fault(
        'return self.__dict__ | {"_orders": {}}', "return self.__dict__", "tests/unit/data/test_stream.py -k pickling"
    ),
    "mapped files are looked at before every read": Fault(
        "if self._dataset is not None and now_s < self._look_again_s:",
        "if False:",
        "tests/unit/data/test_indexed.py -k looked_at",
    ),
    "a small file is read by a process on every core": Fault(
        "min(num_usable_cpus(), MAX_PROCESSES, total_bytes // per_process)",
        "min(num_usable_cpus(), MAX_PROCESSES)",
        "tests/unit/data/test_token_lengths.py -k number_of_processes",
    ),
    "latents are exchanged of a model that has none": Fault(
        "if all(map(needs_latents, names)) and not kv_lora_rank:", "if False:", "tests/unit/mechanisms"
    ),
    "a config that asks for no window gets it": Fault(
        'config.get("use_sliding_window", not family.asked)',
        'config.get("use_sliding_window", True)',
        "tests/unit/models/test_catalog.py -k leave_out",
    ),
    "factors that no plan asks for are kept": Fault(
        "if not in_use or change[0] >= in_use[-1])", "if True)", "tests/unit/learning -k forgotten"
    ),
    "files of a checkpoint are compared by no rank": Fault(
        "largest_first[share::num_shares]}",
        "largest_first[share :: num_shares + (num_shares > 1)]}",
        "tests/trainer/test_checkpoint_files.py -k ranks_divide",
    ),
    "gradient buckets grow with lanes of a static group": Fault(
        "1_000_000 * (num_lanes // static_cp_size)",
        "1_000_000 * num_lanes",
        "tests/unit/pricing/test_reduction.py -k static_group",
    ),
    "workers free what they have inherited": Fault(
        "    os.register_at_fork(after_in_child=gc.freeze)\n", "", "tests/distributed/test_prefetch.py -k garbage"
    ),
    "times of all steps are kept": Fault(
        "deque(maxlen=keep_steps)", "deque()", "tests/distributed/test_bucket_times.py -k latest"
    ),
    "masks of items are left out where none are looked for": Fault(
        "        if not self._has_masks:\n            raise",
        "        if False:\n            raise",
        "tests/distributed/test_probing.py -k masks_that_cannot_be",
    ),
    "YaRN has the concentration of rotated dimensions alone": Fault(
        "/ (0.1 * of_all * math.log(stretch) + 1))",
        "/ 1.0)",
        "tests/distributed/test_features.py -k concentration",
    ),
    "log probabilities of a torch loop hold all logits": Fault(
        "zip(hidden.split(chunk_tokens, 1), labels.split(chunk_tokens, 1), strict=True)",
        "[(hidden, labels)]",
        "tests/distributed/test_post_training.py -k logits_of_a_chunk",
    ),
    "no loss mask is sent where some samples bring labels": Fault(
        "num_masks > 0 or (num_labels > 0 and num_made_labels > 0)",
        "num_masks > 0",
        "tests/distributed/test_rerouting.py -k does_not_follow",
    ),
    "homes are cut in as many parts as there are lanes": Fault(
        "min(min(wanted, most), lanes_of[node])",
        "min(most, lanes_of[node])",
        "tests/unit/placement/test_cuts.py -k shared_out_homes",
    ),
    "what is computed again in nano-batches is sent behind attention": Fault(
        "[*again.launches, *own.attends, *again.attends]",
        "[*own.attends, *again.launches, *again.attends]",
        "tests/unit/pool/test_ticks.py -k every_step",
    ),
    "cuDNN is for sm90 alone": Fault(
        "capability < FUSED_SINCE or capability in NOT_FUSED",
        "capability != FUSED_SINCE or capability in NOT_FUSED",
        "tests/distributed/test_transformer_engine_start.py -k leaves_out",
    ),
    "a checkpoint without random states cannot be loaded": Fault(
        '    if "rng_state" not in checkpoint:\n        return\n',
        "",
        "tests/megatron_lm/test_hooks.py -k other_numbers",
    ),
    "an exchange keeps Megatron-LM's name": Fault(
        "return _EXCHANGE_NAMES.get(name, name)", "return name", "tests/megatron_lm/test_flags.py -k named_as"
    ),
    "a path that is written in another way has another index": Fault(
        "return [os.path.join(cache_path, file_name(os.path.realpath(files.root)))]",
        "return [os.path.join(cache_path, file_name(files.root))]",
        "tests/unit/data/test_index_cache.py -k relative_paths",
    ),
    "a group without a difference has no advantages": Fault(
        "deviations[numbers] + 1e-6", "deviations[numbers]", "tests/distributed/test_post_training.py -k not_refused"
    ),
    "homes that adjoin on a lane pass on states": Fault(
        "(self.lane == self.lane[before]) & (self.row == self.row[before] + self.length[before])",
        "False",
        "tests/unit/pricing/test_linear_attention.py -k homes_pay",
    ),
    "items are probed a batch at a time": Fault(
        "stop = consumed_samples + num_samples * self._num_batches",
        "stop = consumed_samples + num_samples",
        "tests/distributed/test_probing.py -k on_the_fly",
    ),
    "a failing rank that is asked to end may hang": Fault(
        "        signal.alarm(TIME_TO_SPEAK_S)", "        pass", "tests/trainer/test_units.py -k little_time"
    ),
    "a trace of some lanes shows others": Fault(
        "range(max(span.bucket.first_lane, lanes.start), min(span.bucket.lanes.stop, lanes.stop))",
        "range(span.bucket.first_lane, span.bucket.lanes.stop)",
        "tests/unit/report/test_trace.py -k can_be_chosen",
    ),
    "marks in calls of tools are taken for spans": Fault(
        "        if has_mark(message):\n",
        '        if has_mark(message.get("content")):\n',
        "tests/unit/data/test_chat.py -k name_file_and_line",
    ),
    "a sweep lists settings that save no memory": Fault(
        "point.peak_bytes < _WORTH_BYTES * front[-1].peak_bytes",
        "point.peak_bytes < front[-1].peak_bytes",
        "tests/unit/command/test_sweep.py -k front_keeps",
    ),
}


def place_of(fault: Fault, root: Path) -> Path:
    """Return the one file below `root` that holds the piece of code.

    Raises:
        LookupError: none does, or it stands more than once.
    """
    files = [path for folder in CODE for path in sorted((root / folder).rglob("*.py"))]
    found = [path for path in files for _ in range(path.read_text(encoding="utf-8").count(fault.right))]
    if len(found) != 1:
        raise LookupError(f"{fault.right.strip()!r} stands {len(found)} times in the code, not once")
    return found[0]


def copy_of(root: Path, tests_of: Path) -> None:
    """Copy what tests need into `root`, with what is compiled of the same code."""
    shutil.rmtree(root, ignore_errors=True)
    for part in (*CODE, *ALSO_COPIED):
        source = (tests_of if part == "tests" else ROOT) / part
        if source.is_dir():
            shutil.copytree(source, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, root / part)
    (root / "dynamic_cp" / "__pycache__").mkdir()
    for compiled in (ROOT / "dynamic_cp" / "__pycache__").glob("kernels-*"):
        (root / "dynamic_cp" / "__pycache__" / compiled.name).symlink_to(compiled)


@contextlib.contextmanager
def planted(fault: Fault, root: Path) -> Iterator[None]:
    """Put a fault into the copy meanwhile; afterwards remove it and what was compiled with it."""
    place, compiled = place_of(fault, root), root / "dynamic_cp" / "__pycache__"
    text, before, kernels = place.read_text(encoding="utf-8"), place.stat(), set(compiled.glob("kernels-*"))
    place.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    at_s = time.time() + next(_number)  # compiled code is known by the second
    os.utime(place, (at_s, at_s))
    try:
        yield
    finally:
        place.write_text(text, encoding="utf-8")
        os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
        for made in set(compiled.glob("kernels-*")) - kernels:
            shutil.rmtree(made)


def import_what_stays() -> None:
    """Import for all forks what no fault changes, as tests do: without triton, with one thread."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    module = ModuleType("stand_in_for_triton")  # alone: its packages can have faults
    file = ROOT / "megatron" / "dynamic_cp" / "repairs" / "triton_imports.py"
    SourceFileLoader(module.__name__, str(file)).exec_module(module)
    module.install()
    for name in STAYS:
        importlib.import_module(name)
    for name in modules_with_faults():
        del sys.modules[name]
    gc.freeze()


def modules_with_faults() -> list[str]:
    """Return the modules that are imported of the code that gets faults: torch imports what this gives torchrun."""
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return [
        name
        for name, file in files.items()
        if file is not None and name.partition(".")[0] in CODE and not name.startswith("megatron.core")
    ]


def first_failure(tests: str, root: Path) -> str | None:
    """Return the first failure of the copy's tests; None when all passed."""
    printed = root.with_suffix(".log")
    process = _FORK.Process(target=_run, args=(tests, root, printed))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    lines = printed.read_text(encoding="utf-8", errors="replace").splitlines()
    if process.exitcode not in (0, 1):  # nothing ran: no evidence of anything
        raise RuntimeError("\n".join([f"{tests}: {process.exitcode}", *lines[-40:]]))
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition(" - ")[0] if failed else None


def _run(tests: str, root: Path, printed: Path) -> None:
    """Become pytest in the copy."""
    files, _, expression = tests.partition(" -k ")
    words = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", *files.split()]
    code = -1
    try:
        with printed.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(root)
        sys.path[:] = [str(root), *(one for one in sys.path if Path(one).resolve() != ROOT)]
        importlib.invalidate_caches()
        import pytest

        sys.argv = ["pytest", *words, *(["-k", expression] if expression else [])]
        code = int(pytest.main(sys.argv[1:]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what the parent would do at its end is not done here


def tests_without_faults(faults: Iterable[Fault]) -> list[str]:
    """Return the words of pytest for all tests of the faults, each file once."""
    expressions: dict[str, list[str]] = {}
    for fault in faults:
        files, _, expression = fault.tests.partition(" -k ")
        expressions.setdefault(files, []).append(expression)
    return [
        files if "" in found else f"{files} -k {' or '.join(f'({one})' for one in dict.fromkeys(found))}"
        for files, found in expressions.items()
    ]


def _take(free: multiprocessing.queues.SimpleQueue[Path]) -> None:
    """Have this process of the pool work in a copy of its own."""
    global _copy
    _copy = free.get()


def _try_without(tests: str) -> str | None:
    return first_failure(tests, _copy)


def _try_with(fault: Fault) -> tuple[str | None, float]:
    """Return what noticed a fault, and the seconds that took."""
    started_s = time.monotonic()
    with planted(fault, _copy):
        return first_failure(fault.tests, _copy), time.monotonic() - started_s


def main() -> int:
    """Return 1 when a fault was not noticed, 2 when a test fails without one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAULTS)}; default: all")
    parser.add_argument("--tests-of", type=Path, default=ROOT, help="checkout whose tests/ are run")
    asked = parser.parse_args()
    faults = {name: FAULTS[name] for name in asked.names or FAULTS}
    COPIES[0].parent.mkdir(exist_ok=True)
    with COPIES[0].with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time has the copies
        free = _FORK.SimpleQueue()
        for copy in COPIES:
            copy_of(copy, asked.tests_of)
            free.put(copy)
        import_what_stays()
        with ProcessPoolExecutor(len(COPIES), mp_context=_FORK, initializer=_take, initargs=(free,)) as pool:
            for failure in pool.map(_try_without, tests_without_faults(faults.values())):
                if failure is not None:
                    print(f"FAILED without any fault: {failure}", flush=True)
                    pool.shutdown(cancel_futures=True)
                    return 2
            missed = 0
            for name, (failure, took_s) in zip(faults, pool.map(_try_with, faults.values()), strict=True):
                missed += failure is None
                print(f"{name}: {failure or 'NOT NOTICED'} ({took_s:.0f} s)", flush=True)
    print(f"{len(faults) - missed} passed, {missed} failed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
