"""What a real checkout's data sets have, and what is drawn with --dynamic-cp; prints JSON. A process of its own:

    python -m tests.megatron_lm.checkout_data CHECKOUT CASES

CASES: JSON, name -> command line of pretrain_gpt.py. megatron.core must come from the checkout, so nothing of it may be
imported before.
"""

import contextlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

NUM_DRAWN = 300


def parse(argv: list[str]) -> Any:
    """Return the arguments as Megatron-LM parses them, and the size of its vocabulary."""
    from megatron.training import arguments, global_vars

    from megatron.integrations.lm_adaptor import flags

    sys.argv = ["pretrain_gpt.py", *argv]
    # Newer checkouts have ours here, which would prepare a run.
    args = inspect.unwrap(arguments.parse_args)(extra_args_provider=flags.add_flags)
    flags.refuse_without_effect(args)
    # Of validate_args, what data sets read.
    args.data_parallel_size = 1
    if args.data_path is not None and args.split is None:
        args.split = "969, 30, 1"
    global_vars._GLOBAL_TOKENIZER = global_vars.build_tokenizer(args)
    return args


def documents(argv: list[str]) -> list[dict[str, Any] | None]:
    """Return for each split its documents, of ours and of Megatron-LM, and how often each prefix is drawn."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset

    import pretrain_gpt
    from megatron.integrations.lm_adaptor import varlen
    from tests.megatron_lm.gpt_documents import as_document, gpt_documents, varlen_documents

    args = parse(argv)
    data = varlen.build(args, varlen.data_tokenizer(args))
    config = pretrain_gpt.core_gpt_dataset_config_from_args(args)
    ours = data.data_sets(args, (10 * NUM_DRAWN,) * 3)
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, [NUM_DRAWN] * 3, lambda: True, config).build()
    splits: list[dict[str, Any] | None] = []
    for varlen_data, dataset in zip(ours, theirs, strict=True):
        assert (varlen_data is None) == (dataset is None)
        if varlen_data is None:
            splits.append(None)
            continue
        parts = getattr(dataset, "datasets", [dataset])
        owner = {}
        for number, part in enumerate(parts):
            owner |= dict.fromkeys(gpt_documents(part.dataset_path, part.indices, config), number)
        drawn = [owner.get(as_document(varlen_data[index])) for index in range(NUM_DRAWN)]
        splits.append(
            {
                "ours": varlen_documents(varlen_data, 10 * NUM_DRAWN),
                "theirs": sorted(owner),
                "drawn": [drawn.count(number) for number in range(len(parts))],
                "weights": getattr(dataset, "weights", [1]),
            }
        )
    return splits


def chats(argv: list[str]) -> list[list[Any]]:
    """Return (tokens, labels, loss mask) of each conversation of each line, as Megatron-LM's items reach a plan."""
    from megatron.core.datasets.utils import Split
    from megatron.training.datasets.sft_dataset import SFTDataset

    import pretrain_gpt
    from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
    from megatron.integrations.foreign.samples import read_item
    from megatron.integrations.lm_adaptor.data import only_item

    args = parse(argv)
    config = pretrain_gpt.core_gpt_dataset_config_from_args(args)
    lines = SFTDataset.build_low_level_dataset(args.data_path[0], config)
    dataset = SFTDataset(lines, args.data_path[0], range(len(lines)), len(lines), Split.train, config)
    found = []
    for index in range(len(dataset)):
        item = only_item([dataset[index]])
        samples = read_item(item, ChunkNeeds(tokens=True, labels=True))
        assert sum(sample.seqlen for sample in samples) == len(item["tokens"])
        found.append([[getattr(s, name).tolist() for name in ("tokens", "labels", "loss_mask")] for s in samples])
    return found


def main() -> None:
    checkout, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    from megatron.integrations.lm_adaptor.checkout import open_checkout
    from megatron.integrations.lm_adaptor.replacements import activate

    with contextlib.redirect_stdout(sys.stderr):
        activate(open_checkout(checkout / "pretrain_gpt.py"))
        import torch.distributed as dist

        from megatron.integrations.lm_adaptor import cpu

        cpu.load_dataset_helpers()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        found = {name: (chats if "--sft" in argv else documents)(argv) for name, argv in cases.items()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
