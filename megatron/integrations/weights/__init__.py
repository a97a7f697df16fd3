"""Weights of Hugging Face models into checkpoints of the trainer, and out of them: `dynamic-cp weights`.

Read in this order:

- `rows`: a line of a table of names, and which tensor is made of which
- `hybrid_names`: lines of layers with linear attention, and of halves of layers
- `names`: one table of names per family
- `fused`: from several tensors to one, and back
- `safetensors_folder`: a folder of transformers, tensor by tensor
- `checkpoint_tensors`: the tensors of a checkpoint, one at a time
- `adapters`: those of a checkpoint, merged into its weights or by themselves
- `described`: the model that a checkpoint's flags describe
- `output`: a folder that gets its name when it is whole
- `importing`: from a folder of transformers to a checkpoint
- `exporting`: from a checkpoint to a folder of transformers
- `command`: the options of `dynamic-cp weights`
"""
