"""Checkpoints: complete or absent, verified before they are read, never run as code, loaded on any layout.

Read in this order: `manifest` (files and hashes), `checkpoint_files` (folders, the lock of a folder, refused writes),
`state` (what is saved, under which names), `safe_loading` (files as data), `interchange` (Megatron-LM's checkpoints),
`loading` (a folder into a run), `saving` (a run into a folder, by a forked process of each rank).
"""
