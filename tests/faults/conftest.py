"""What all faulty jobs share."""

from tests.trainer.conftest import few_documents  # noqa: F401 (a fixture of every test here)
