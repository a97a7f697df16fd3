"""Bytes of a rank: `activations` (of a layer), `communicators` (how many), `memory_model` (all of them; what fits)."""
