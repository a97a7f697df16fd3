"""Bytes of a rank: `activations` (of a layer), `memory_model` (all of them, communicators too; what fits)."""
