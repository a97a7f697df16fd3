"""A small trainer on megatron-core with Megatron-LM's flag names; `pretrain_gpt.py` is its command line.

Its rooms import only earlier ones: `data` (samples and their lengths), `flags` (a command line to settings), `ending`
(exit codes, signals, the last line), `checkpoints`, `reporting` (log, TensorBoard, profiles), `setup` (settings to a
run), `loop` (its iterations). A process begins in `main`.

Rooms in the order of their imports, each with its files in the order to read them:

data: documents -> a deterministic, endless stream of samples whose lengths are known before anything is read. Files:
    `config` (a run's flags about data), `source` (what a source of documents is), `hugging_face`, `tokenizer` (text to
    tokens), `mock` (random tokens), `indexed` (.bin/.idx files), `records` (files of records to lines), `lines` (a line
    to documents), `chat_template` (messages to a text), `chat_records` (forms of chats to messages), `chat_format`
    (what of a text is learned), `chat` (a line of chats to documents), `chat_reader` (which template), `workers` (tasks
    over processes, with progress), `files` (--data-path to files), `index_file` (the file of an index), `index_cache`
    (finds or makes it), `tokenizing` (writes it), `documents` (an index as a source), `stream` (documents to samples,
    shuffled in every epoch; position to sample: lengths of a global batch, tokens of a sample), `build` (all of it),
    `index_once` (once per job).

flags: from a command line and a launcher's variables to a run's settings: frozen values, made once, before torch.
    Files: `environment` (variables of a launcher and of GPU runs, hidden messages), `settings` (flags and the values
    that they become, sizes of growing global batches), `derive` (what planner and checkpoints know of a model),
    `validation` (completes and checks parsed flags), `arguments` (the command line).

ending: how a run ends: exit codes, signals, one line that says why, and no rank that waits for ever. Files: `exits`
    (exit codes, signals, which rank reports), `failures` (errors of device or network), `stop_guard` (kills stopped
    processes).

checkpoints: complete or absent, verified before they are read, never run as code, loaded on any layout. Files:
    `manifest` (files and hashes), `checkpoint_files` (folders, the lock of a folder, refused writes), `state` (what is
    saved, under which names), `safe_loading` (files as data), `interchange` (Megatron-LM's checkpoints), `loading` (a
    folder into a run), `saving` (a run into a folder, by a forked process of each rank).

reporting: what a run reports, in Megatron-LM's words where it has some. Files: `log` (log line, scalars, summary),
    `profiling` (--profile).

setup: from settings to everything a training loop needs, in an order that lets errors appear early and cheaply. Files:
    `initialize` (device, process groups, seeds), `layers` (TransformerEngine's or local ones), `fusions` (which there
    are, each compiled once), `planned_runtime` (the token limit that memory allows, CP groups, planner, dump and
    replay), `model` (model chunks, optimizer, learning-rate schedule), `warm_up` (on a GPU, first-time costs before the
    first step), `run` (the samples, and all of it in order).

loop: the iterations of a run. Files: `refining` (corrects the cost model), `training` (the loop).
"""

import dynamic_cp  # noqa: F401  # knows the old names of what moved
