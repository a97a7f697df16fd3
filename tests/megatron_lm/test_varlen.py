"""--use-varlen-dataset: files, weights, splits, end of document and masks are those of the installed Megatron-LM."""

import argparse
import importlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list

from dynamic_cp.errors import DataError, InvalidInputError
from megatron.integrations.lm_adaptor import varlen
from megatron.integrations.lm_adaptor.checkout import NULL_TOKENIZER_COUNTS_EOD, tokenizer_module
from megatron.integrations.lm_adaptor.data import only_item
from tests.megatron_lm.gpt_documents import as_document, gpt_documents, varlen_documents
from tests.unit.data.made_tokenizers import write_tokenizer

EOD, PAD, NUM_IDS = 0, 2, 320
build_tokenizer = importlib.import_module(tokenizer_module()).build_tokenizer
PADDING_OF_THE_VOCABULARY = {
    "pad_vocab_size": False, "padded_vocab_size": None, "make_vocab_size_divisible_by": 1,
    "tensor_model_parallel_size": 1, "rank": 1,
}  # fmt: skip
NUM_DOCUMENTS = {"a": 30, "b": 20, "c": 8}
Prefixes = dict[str, str]
Documents = Callable[..., list[Any]]


def documents(name: str) -> list[list[int]]:
    """Return token ids without their end; one in four has an EOD and a padding id inside."""
    generator = np.random.default_rng(len(name) + ord(name[0]))
    made = [generator.integers(3, NUM_IDS, generator.integers(2, 40)).tolist() for _ in range(NUM_DOCUMENTS[name])]
    for document in made[::4]:
        document[1:1] = [EOD, PAD]
    return made


def write(prefix: Path, made: list[list[int]], end: list[int]) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in made:
        builder.add_item(torch.tensor(document + end))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Prefixes:
    """Prefixes: a, b, c, whose documents end in EOD, and "a without"."""
    folder = tmp_path_factory.mktemp("corpus")
    prefixes = {name: write(folder / name, documents(name), [EOD]) for name in NUM_DOCUMENTS}
    return prefixes | {"a without": write(folder / "without", documents("a"), [])}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Megatron-core's HuggingFaceTokenizer over a tokenizer.json made here, by the token it takes for padding."""
    made = {}
    for padding in ("none", "own", "eod"):
        folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        pad = {"none": {}, "own": {"pad_token": "<|im_end|>"}, "eod": {"pad_token": "<|endoftext|>"}}[padding]
        (folder / "tokenizer_config.json").write_text(json.dumps(config | pad))
        made[padding] = build_tokenizer(tokenizer_arguments(folder))
    return made


def tokenizer_arguments(folder: Path) -> argparse.Namespace:
    """Return what `build_tokenizer` of any release reads."""
    return argparse.Namespace(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder), trust_remote_code=False, vocab_file=None,
        merge_file=None,
        **dict.fromkeys(("tokenizer_metadata", "metadata_path", "tokenizer_special_tokens", "special_tokens")),
        chat_template=None, tokenizer_hf_use_fast=True, tokenizer_hf_no_use_fast=False,
        tokenizer_hf_include_special_tokens=False, tokenizer_hf_no_include_special_tokens=True,
        **PADDING_OF_THE_VOCABULARY,
    )  # fmt: skip


def arguments(**changes: Any) -> argparse.Namespace:
    values = {
        **dict.fromkeys(varlen.PATH_FLAGS), "split": None, "seed": 7, "seq_length": 64, "overlong": "split",
        "mock_data": False, "varlen_mock_dataset_config_json": None, "tokenizer_type": "HuggingFaceTokenizer",
        "legacy_tokenizer": False, "padded_vocab_size": 384, "eod_id": None, "eod_mask_loss": False,
        "allow_ambiguous_pad_tokens": False, "skip_train": False, "eval_iters": 0,
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


def blends(args: argparse.Namespace) -> tuple[Any, Any]:
    """Stand in for megatron.training.utils.get_blend_and_blend_per_split: a file is read here, not in the test."""
    if args.data_args_path is not None:
        return get_blend_from_list(Path(args.data_args_path).read_text().split()), None
    if args.data_path is not None:
        return get_blend_from_list(args.data_path), None
    return None, [get_blend_from_list(getattr(args, f"{name}_data_path")) for name in ("train", "valid", "test")]


@pytest.fixture(autouse=True)
def megatron_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    real = varlen.importlib.import_module
    theirs = {"megatron.training.utils": SimpleNamespace(get_blend_and_blend_per_split=blends)}
    monkeypatch.setattr(varlen.importlib, "import_module", lambda name, *of: theirs.get(name) or real(name, *of))


def gpt_config(tokenizer: Any, folder: Path, **changes: Any) -> GPTDatasetConfig:
    values = {"random_seed": 1, "sequence_length": 8, "blend": (["unused"], None), "split": "1,0,0"}
    off = ("reset_position_ids", "reset_attention_mask", "create_attention_mask", "eod_mask_loss")
    values |= {"path_to_cache": str(folder), "tokenizer": tokenizer, **dict.fromkeys(off, False)}
    return GPTDatasetConfig(**{**values, **changes})


@pytest.fixture
def tokenizer(tokenizers: dict[str, Any]) -> Any:
    return tokenizers["none"]


@pytest.fixture
def theirs(corpus: Prefixes, tokenizer: Any, tmp_path: Path) -> Documents:
    """What a GPTDataset makes of the documents of a prefix, of all by default."""
    config = gpt_config(tokenizer, tmp_path)

    def documents_of(name: str, indices: Sequence[int] | None = None) -> list[Any]:
        return gpt_documents(corpus[name], range(NUM_DOCUMENTS[name]) if indices is None else indices, config)

    return documents_of


def epoch(data: varlen.VarlenData, args: argparse.Namespace, split: int = 0, epochs: int = 1) -> list[Any]:
    """Return the different samples of a split."""
    stream = data.streams[split]
    assert stream is not None
    sizes = [0, 0, 0]
    sizes[split] = epochs * stream.num_samples
    dataset = data.data_sets(args, sizes)[split]
    assert dataset is not None
    assert len(dataset) == sizes[split]
    return varlen_documents(dataset, len(dataset))


@pytest.mark.parametrize("eod_mask_loss", [False, True])
@pytest.mark.parametrize("padding", ["none", "own", "eod", "eod, allowed"])
@pytest.mark.filterwarnings("ignore:The pad token id in the tokenizer collides")
def test_tokens_labels_and_masks_are_those_of_gpt_dataset(
    corpus: Prefixes, tokenizers: dict[str, Any], tmp_path: Path, padding: str, eod_mask_loss: bool
) -> None:
    tokenizer, allowed = tokenizers[padding.split(",")[0]], "allowed" in padding
    args = arguments(
        data_path=[corpus["a"]], split="1,0,0", eod_mask_loss=eod_mask_loss, allow_ambiguous_pad_tokens=allowed
    )
    config = gpt_config(tokenizer, tmp_path, eod_mask_loss=eod_mask_loss, allow_ambiguous_pad_tokens=allowed)
    theirs = gpt_documents(corpus["a"], range(NUM_DOCUMENTS["a"]), config)
    data = varlen.build(args, tokenizer)
    assert epoch(data, args) == theirs
    assert len(theirs) == NUM_DOCUMENTS["a"]
    assert data.eod == EOD
    masked = sum(mask.count(0.0) for _, _, mask in theirs)
    assert bool(masked) == (eod_mask_loss or padding in ("own", "eod, allowed")), "the options had nothing to mask"


def test_an_end_that_the_data_lack_is_appended(corpus: Prefixes, tokenizer: Any, theirs: Documents) -> None:
    """Of the same texts: as if they had it."""
    for name, said in (("a without", "EOD appended (id 0)"), ("a", "EOD in the data (id 0)")):
        args = arguments(data_path=[corpus[name]], split="1,0,0")
        data = varlen.build(args, tokenizer)
        assert epoch(data, args) == theirs("a")
        assert data.streams[0] is not None
        assert said in data.streams[0].describe()


def test_items_pass_the_loader(corpus: Prefixes, tokenizers: dict[str, Any]) -> None:
    args = arguments(data_path=[corpus["a"]], split="1,0,0", eod_mask_loss=True)
    dataset = varlen.build(args, tokenizers["own"]).data_sets(args, (5, 0, None))[0]
    assert dataset is not None
    item = only_item([dataset[3]])
    assert set(item) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert item["position_ids"].tolist() == list(range(len(item["tokens"])))


def test_shares_of_split_are_those_of_megatron_lm(
    corpus: Prefixes, tokenizer: Any, theirs: Documents, tmp_path: Path
) -> None:
    """Rounding, too; and a share that is not given is 0 there."""
    for split in ("900,70,30", "0.55, 0.3, 0.15", "7,3", "1"):
        config = gpt_config(tokenizer, tmp_path, blend=([corpus["a"]], None), split=split)
        splits = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()
        args = arguments(data_path=[corpus["a"]], split=split)
        data = varlen.build(args, tokenizer)
        for number, dataset in enumerate(splits):
            if dataset is None:
                assert data.streams[number] is None
            else:
                assert epoch(data, args, number) == theirs("a", dataset.indices), (split, number)


@pytest.mark.parametrize("flag", ["data_path", "data_args_path"])
def test_blend_draws_each_prefix_by_its_weight(
    corpus: Prefixes, tokenizer: Any, theirs: Documents, tmp_path: Path, flag: str
) -> None:
    words = ["0.3", corpus["a"], "0.1", corpus["b"], "0.6", corpus["c"]]
    (tmp_path / "arguments.txt").write_text("\n".join(words))
    args = arguments(**{flag: words if flag == "data_path" else str(tmp_path / "arguments.txt"), "split": "1,0,0"})
    data = varlen.build(args, tokenizer)
    owner = {document: name for name in NUM_DOCUMENTS for document in theirs(name)}
    dataset = data.data_sets(args, (1000, 0, 0))[0]
    assert dataset is not None
    for num_samples in (10, 100, 1000):
        drawn = Counter(owner[as_document(dataset[index])] for index in range(num_samples))
        expected = {"a": 0.3 * num_samples, "b": 0.1 * num_samples, "c": 0.6 * num_samples}
        assert all(abs(drawn[name] - wanted) < 1 for name, wanted in expected.items()), drawn
    assert epoch(data, args, epochs=12) == sorted(owner), "a document was never drawn"


def test_prefixes_without_weights_have_their_part_by_their_documents(
    corpus: Prefixes, tokenizer: Any, theirs: Documents
) -> None:
    args = arguments(data_path=[corpus["a"], corpus["b"]], split="1,0,0")
    assert epoch(varlen.build(args, tokenizer), args) == sorted(theirs("a") + theirs("b"))


def test_each_split_may_have_paths_of_its_own(corpus: Prefixes, tokenizer: Any, theirs: Documents) -> None:
    args = arguments(train_data_path=["0.5", corpus["a"], "0.5", corpus["c"]], valid_data_path=[corpus["b"]])
    data = varlen.build(args, tokenizer)
    assert epoch(data, args, 0, epochs=2) == sorted(theirs("a") + theirs("c"))
    assert epoch(data, args, 1) == theirs("b")
    assert data.streams[2] is None
    assert data.data_sets(args, (5, 5, 5))[2] is None
    other = arguments(train_data_path=args.train_data_path, valid_data_path=[corpus["c"]])
    assert varlen.build(other, tokenizer).fingerprint() != data.fingerprint(), "the same training data"


def test_a_folder_of_the_same_name_is_not_the_data(tokenizer: Any, tmp_path: Path) -> None:
    """Megatron-LM keeps the indexes of PREFIX in the folder PREFIX, unless it is told another place."""
    prefix = write(tmp_path / "data", documents("a"), [EOD])
    (tmp_path / "data" / "cache").mkdir(parents=True)
    (tmp_path / "data" / "cache" / "index.txt").write_text("no documents")
    args = arguments(data_path=[prefix], split="1,0,0")
    assert len(epoch(varlen.build(args, tokenizer), args)) == NUM_DOCUMENTS["a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "no data: give --data-path"),
        ({"data_path": ["a"], "train_data_path": ["b"], "split": "1"}, "--data-path and --train-data-path exclude"),
        ({"data_path": ["a"], "mock_data": True}, "--mock-data and --data-path exclude"),
        ({"data_args_path": "there"}, "--split is None with --data-args-path: give three shares"),
        ({"train_data_path": ["a"], "split": "8,1,1"}, "--split is 8,1,1 with --train-data-path: leave it out"),
        ({"data_args_path": "/nowhere", "split": "1"}, "--data-args-path: Megatron-LM cannot read this, FileNotFound"),
        ({"data_path": [], "split": "1"}, "--data-path: Megatron-LM cannot read this, ValueError"),
        ({"data_path": ["0", "a", "1", "b"], "split": "1"}, "weight 0.0 for a, it must be > 0"),
        ({"data_path": ["a"], "split": "0,0,0"}, "--data-path: --split 0,0,0 has no share above 0"),
        ({"data_path": ["/nowhere/a"], "split": "1"}, "/nowhere/a.bin is missing"),
        ({"data_path": "A", "split": "0,1,0"}, "no training data: give --train-data-path"),
        ({"data_path": "A", "split": "1,0,1", "eval_iters": 2}, "--eval-iters is 2, and no validation data are left"),
        ({"data_path": "A", "split": "999,1,0", "eval_iters": 2}, "--eval-iters is 2, and no validation data are left"),
    ],
)
def test_data_flags_that_cannot_be(corpus: Prefixes, tokenizer: Any, changes: dict[str, Any], message: str) -> None:
    changes = {name: [corpus["a"]] if value == "A" else value for name, value in changes.items()}
    with pytest.raises((InvalidInputError, DataError)) as caught:
        varlen.build(arguments(**changes), tokenizer)
    assert message in str(caught.value)


def test_evaluation_alone_needs_no_training_data(corpus: Prefixes, tokenizer: Any) -> None:
    args = arguments(valid_data_path=[corpus["a"]], skip_train=True, eval_iters=1)
    assert [stream is None for stream in varlen.build(args, tokenizer).streams] == [True, False, True]


class Tokenizer:
    """A tokenizer whose end of document is `eod`, or raises it."""

    vocab_size = 300

    def __init__(self, eod: Any) -> None:
        self._eod = eod

    @property
    def eod(self) -> Any:
        if isinstance(self._eod, type):
            raise self._eod
        return self._eod


@pytest.mark.parametrize("eod", [None, -1, AttributeError, NotImplementedError])
def test_tokenizer_without_an_end_of_document(eod: Any) -> None:
    """Hugging Face: None; sentencepiece: -1; others raise."""
    args = arguments(tokenizer_type="SomeTokenizer")
    with pytest.raises(InvalidInputError, match=r"SomeTokenizer has no token that ends a document: .* --eod-id"):
        varlen.document_ids(args, Tokenizer(eod))
    assert varlen.document_ids(arguments(eod_id=9), Tokenizer(eod)).eod == 9


def test_the_tokenizer_says_which_ids_there_are() -> None:
    """Its vocabulary, not the rows that padding adds; but never more than the model has."""
    ids = varlen.document_ids(arguments(padded_vocab_size=384), Tokenizer(5))
    assert (ids.vocab_size, ids.eod) == (300, 5)
    assert varlen.document_ids(arguments(padded_vocab_size=256), Tokenizer(5)).vocab_size == 256
    assert varlen.document_ids(arguments(eod_id=0), Tokenizer(5)).eod == 0
    for wrong in ({"eod_id": 300}, {"eod_id": -1}):
        with pytest.raises(InvalidInputError, match="is not among the 300 ids of --tokenizer-type Hugging"):
            varlen.document_ids(arguments(**wrong), Tokenizer(5))


def test_null_tokenizer_as_before() -> None:
    """Ids below --vocab-size, and the size itself for the end of document; in newer releases the last id below it."""
    given = 127 + NULL_TOKENIZER_COUNTS_EOD.here
    tokenizer = build_tokenizer(
        argparse.Namespace(tokenizer_type="NullTokenizer", vocab_size=given, **PADDING_OF_THE_VOCABULARY)
    )
    ids = varlen.document_ids(arguments(tokenizer_type="NullTokenizer", padded_vocab_size=128), tokenizer)
    assert (ids.vocab_size, ids.eod) == (128, 127)


@pytest.mark.parametrize("legacy", [True, False])
def test_the_tokenizer_is_that_of_megatron_lms_data_sets(monkeypatch: pytest.MonkeyPatch, legacy: bool) -> None:
    modules = {
        "megatron.training.global_vars": SimpleNamespace(get_tokenizer=lambda: "of training"),
        tokenizer_module(): SimpleNamespace(build_tokenizer=lambda _: "of core"),
    }
    monkeypatch.setattr(varlen.importlib, "import_module", modules.__getitem__)
    assert varlen.data_tokenizer(arguments(legacy_tokenizer=legacy)) == ("of training" if legacy else "of core")


def test_a_tokenizer_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's GPT2BPETokenizer asks a server, also where --vocab-file is given."""

    def fail(_args: Any) -> None:
        raise ValueError("Unable to instantiate HuggingFace AutoTokenizer for gpt2")

    monkeypatch.setattr(varlen.importlib, "import_module", lambda _: SimpleNamespace(build_tokenizer=fail))
    with pytest.raises(InvalidInputError, match=r"--tokenizer-type GPT2BPE: ValueError: Unable .* --legacy-tokenizer"):
        varlen.data_tokenizer(arguments(tokenizer_type="GPT2BPE"))


def test_a_token_that_the_vocabulary_lacks_is_an_error(tokenizer: Any, tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [[3, NUM_IDS, 4]], [EOD])
    args = arguments(data_path=[prefix], split="1,0,0")
    dataset = varlen.build(args, tokenizer).data_sets(args, (1, 0, 0))[0]
    assert dataset is not None
    with pytest.raises(DataError, match=f"holds token id {NUM_IDS}, the vocabulary has {NUM_IDS}"):
        dataset[0]


def test_the_log_says_what_ends_documents(
    corpus: Prefixes, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from megatron.dynamic_cp.agreement import verify

    monkeypatch.setattr(verify, "run_on_all_ranks", lambda compute, _: compute())
    monkeypatch.setattr(verify, "check_same_digest", lambda *_: None)
    monkeypatch.setattr(varlen, "data_tokenizer", lambda _: tokenizer)
    args = arguments(data_path=[corpus["a"]], split="8,1,1")
    with caplog.at_level(logging.INFO):
        varlen.build_on_all_ranks(args, torch.device("cpu"))
        varlen.build_on_all_ranks(argparse.Namespace(**{**vars(args), "eod_id": 5}), torch.device("cpu"))
    ours = [record.getMessage() for record in caplog.records if record.name == varlen.__name__]
    assert ours[0] == "dynamic CP: documents end with id 0, the EOD of --tokenizer-type HuggingFaceTokenizer"
    assert [line.split(":")[1] for line in ours[1:4]] == [" data, train", " data, valid", " data, test"]
    assert all("EOD in the data (id 0)" in line for line in ours[1:4])
    assert ours[4] == "dynamic CP: documents end with id 5, --eod-id"
    assert all("EOD appended (id 5)" in line for line in ours[5:])
