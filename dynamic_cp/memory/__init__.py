"""Bytes of a rank: `activations` (of a layer), `communicators` (how many), then `memory_model` (all of them, against the
device's memory).
"""
