"""Packages of the project: the pure planner `dynamic_cp` and three siblings of `megatron.core`.

`megatron` is a namespace package that the PyPI package megatron-core also lives in, so it has no `__init__.py` here.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
VERSION = re.findall(r'^__version__ = "(.+)"$', (ROOT / "dynamic_cp/__init__.py").read_text(encoding="utf-8"), re.M)
TYPED = [f"megatron.{name}" for name in ("dynamic_cp", "trainer", "decide", "integrations")]

FAST = ["numba>=0.60"]  # compiles the planner's inner loops; without it they run as Python
EXACT = ["pulp>=2.8,<4", "highspy>=1.7"]  # the exact search of tiny batches; 4 changes its API
# pip takes the newest that runs on its Python: 0.16.1 on 3.10 and 3.11, 0.19.2 from 3.12 on. Exactly those of
# megatron/dynamic_cp/repairs/releases.py, which a test compares with this.
MEGATRON_CORE = "megatron-core>=0.16.1,<=0.19.2,!=0.17.0,!=0.18.0,!=0.19.0"
TRAIN = [
    *FAST,
    MEGATRON_CORE,
    "torch>=2.6",
    "einops",
    "packaging",
    "psutil",  # dist_checkpointing.save needs it without declaring it: without psutil a save hangs
    "tensorboard",
    "xxhash>=3",  # hashes of checkpoint files
    "safetensors>=0.4.3,<1",  # weights from and to Hugging Face; 1.2 MB
]
REPORT = ["jinja2>=3.1", "matplotlib>=3.8"]  # pictures and HTML pages; traces need neither
# mkdocs 2 breaks themes and plugins; mkdocs-material 9 is the last major version.
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "mkdocstrings-python>=2,<3"]
PARQUET = ["pyarrow>=14"]  # lengths out of parquet files, records to train on; 45 MB
# Local tokenizer.json files and chat templates; no torch. Before 3.1.6 a template could leave jinja2's sandbox.
TOKENIZERS = ["tokenizers>=0.20", "jinja2>=3.1.6"]
# Pinned: their attention and mesh interfaces change. 26 MB in all. From 5.21 on transformers needs Python 3.11.
HF = [
    "transformers==5.20.2; python_version<'3.11'",
    "transformers==5.23.0; python_version>='3.11'",
    "accelerate==1.15.0",
]
# Released chat templates, which a test compares with transformers 5.23; it brings datasets and pandas, no CUDA.
TEMPLATES = ["trl==1.16.0; python_version>='3.11'"]
MEGATRON_LM = ["six", "regex", "pyyaml"]  # what the training code of a Megatron-LM checkout imports
# pydantic: TransformerEngine's own Python imports it.
TEST = [*FAST, *EXACT, "hypothesis", "pydantic", "pytest>=8", "pytest-timeout"]

setup(
    name="megatron-dynamic-cp",
    version=VERSION[0],
    description="Dynamic context parallelism for Megatron-Core: every micro-batch gets its own CP size",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    project_urls={"Megatron-Core, which it extends": "https://github.com/NVIDIA/Megatron-LM"},
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_namespace_packages(include=["dynamic_cp*", *(f"{name}*" for name in TYPED)]),
    package_data={
        "dynamic_cp": ["data/**/*.json", "data/**/*.npy", "data/**/*.md", "decide/report/templates/*", "py.typed"],
        **{name: ["py.typed"] for name in TYPED},
    },
    # click and rich are the command's alone: `import dynamic_cp` imports neither.
    install_requires=["numpy>=1.26", "click>=8.2", "rich>=13"],
    extras_require={
        "fast": FAST,
        "exact": EXACT,
        "report": REPORT,
        "train": TRAIN,
        # megatron-core 0.16.1 declares 2.9 to 2.11; later ones any. 2.20 is the newest that was read for this.
        "te": [
            "transformer-engine[pytorch]>=2.11,<2.12; python_version<'3.12'",
            "transformer-engine[pytorch]>=2.11,<2.21; python_version>='3.12'",
        ],
        "megatron-lm": MEGATRON_LM,
        "test": TEST,
        "docs": DOCS,
        "tokenizers": TOKENIZERS,
        "parquet": PARQUET,
        "hf": HF,
        "dev": [*TEST, *REPORT, *DOCS, *TOKENIZERS, *PARQUET, *HF, *TEMPLATES, "mypy", "ruff"],
    },
    entry_points={
        "console_scripts": ["dynamic-cp=dynamic_cp.decide.cli:main"],
        # What needs more than dynamic_cp has: `dynamic-cp profile` finds it here.
        "dynamic_cp.commands": [
            "profile=megatron.decide.calibration.command:command",
            "weights=megatron.integrations.weights.command:command",
        ],
        "torchrun.handlers": ["dynamic-cp=megatron.integrations.torchrun:end_in_a_line"],
        "dynamic_cp.lengths": ["tokens=megatron.decide.token_lengths:token_lengths"],
        "dynamic_cp.doctor": ["training=megatron.decide.doctor:checks"],
    },
)
