"""Checkpoints: whole or not there, verified before they are read, read as data, and loaded on any layout.

Read in this order:

- `content_hash`, `manifest`: files with their hashes, and the file that lists them
- `disk`: what a refused write means
- `checkpoint_files`: the folders, which get their names last
- `optimizer_state`: the optimizer's part; `state` has all of what is saved
- `extra_states`: of TransformerEngine, never asked of a file
- `norm_names`: of norms, which layers of TransformerEngine call otherwise
- `safe_loading`: files as data, not as code
- `interchange`: Megatron-LM's checkpoints, to and fro
- `loading`: from a folder into a run
- `writer_process`: the process of a rank that writes its files
- `save_lock`: no other job saves into the same folder
- `saving`: from a run into a folder
"""
