"""What tests of a real checkout share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkout() -> str:
    """The folder of a Megatron-LM checkout of a supported release."""
    folder = os.environ.get("MEGATRON_LM")
    if folder is None:
        pytest.skip("MEGATRON_LM does not name a Megatron-LM checkout of a supported release")
    return folder


@pytest.fixture(scope="session")
def version(checkout: str) -> str:
    """What the checkout says it is."""
    from megatron.integrations.lm_adaptor.checkout import open_checkout

    return open_checkout(Path(checkout) / "pretrain_gpt.py").version


@pytest.fixture(scope="session")
def corpora(checkout: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """(folder with a tokenizer, prefixes of documents by name)."""
    from tests.megatron_lm.corpora import preprocess

    folder = tmp_path_factory.mktemp("corpora")
    return folder, preprocess(checkout, folder)
