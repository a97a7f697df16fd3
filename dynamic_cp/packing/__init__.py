"""Packers: lengths in, buckets in rows out (`table.Packing`). Read durations, table, then a packer, then judge.

`nested` packs without a pipeline, `blocks` with one (its parts are `profile` and `rows`); `static` and `megatron_dev`
are what others do. `fit`, `heap` and `padded` serve their inner loops. `judge` prices a packing exactly and makes it a
plan.
"""
