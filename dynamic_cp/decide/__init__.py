"""What helps to decide before a job starts: the command `dynamic-cp`, and what else no run needs.

A leaf: it imports the planner, and neither planner nor runtime import it. Read in this order: `length_formats` and
`length_files` (lengths in files of any kind, and pipes), `distribution` (lengths to draw, and what given ones are
like), `workloads` (by name), `given_batches` (of a file), `mask_rules` (masks by length), `bounds` (what no plan can
beat, and the exact search of tiny batches), `config_json` (of a model, read and written), `sent` (bytes that a plan
sends), `plan_in_memory` (with a limit of tokens that memory holds), `longer_alone` (with samples above it),
`plan_arrays` (for loops of any kind), `stage_splits` (how layers are shared out), `setting` (one way to lay out and
plan a job, and what is tried), `comparison` (policies at one layout), `files` (written whole or not at all), `report`
(pictures, HTML), `sweep` (layouts), `doctor` (what is installed), `cli` (the command), `calibration` (measurements to a
file of hardware), `first_day` (of a node).

Rooms that hand nothing on, with files in the order to read them:

config_json: the config.json of a model, of transformers or diffusers: read as a `ModelShape` and an `Architecture`, and
    written. Files: `architecture` (a model beyond its shape, and both as flags), `entries` (of a config.json),
    `families` (of transformers, as rows), `rotation` (RoPE and experts), `hybrids` (layers of one with linear
    attention), `hugging_face` (all of transformers), `diffusers`, `written` (the way back, by the same rows).

first_day: `dynamic-cp first-day`, what a node's first hour shows, each part in processes of its own. Files: `day` (the
    job, its parts with their commands and files, and which are still to be run), `page` (predicted beside measured),
    `command` (the options).
"""
