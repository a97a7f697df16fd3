"""Checkpoints: whole or not there, verified before they are read, read as data, and loaded on any layout.

Read in this order:

- `manifest`: the files of a checkpoint with their hashes
- `checkpoint_files`: the folders, which get their names last; the lock of a folder; what a refused write means
- `state`: all of what is saved, and under which names
- `safe_loading`: files as data, not as code
- `interchange`: Megatron-LM's checkpoints, to and fro
- `loading`: from a folder into a run
- `saving`: from a run into a folder, by a process that each rank forks
"""
