"""The config.json of a model, of transformers or diffusers: read as a `ModelShape` and an `Architecture`, and written.

Read in this order: `entries` (of a config.json), `families` (of transformers, as rows), `rotation` (RoPE and experts),
`hybrids` (layers of one with linear attention), `hugging_face` (all of transformers), `diffusers`, `written` (the
way back, by the same rows).
"""
