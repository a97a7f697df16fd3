"""A wheel, built from the source distribution and installed where no clone is, has all that the commands need."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import dynamic_cp
from dynamic_cp.decide.sweep.job_files import RUN
from tests.trainer.commandline import FIXED, NO_COMPILE

ROOT = Path(__file__).parents[2]
NOT_SHIPPED = ("__pycache__",)
PACKAGES = ("dynamic_cp", "megatron/dynamic_cp", "megatron/trainer", "megatron/decide", "megatron/integrations")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel and, from the tests' own, the packages that it needs; `folder` is empty."""

    python: Path
    folder: Path
    sdist: Path
    wheel: Path

    def run(self, *words: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [str(self.python.parent / words[0]), *words[1:]],
            cwd=self.folder, capture_output=True, text=True, check=False, timeout=timeout_s,
            env={**kept, **NO_COMPILE, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        )  # fmt: skip


def build(kind: str, tree: Path, target: Path) -> Path:
    """Return what setuptools builds of a tree, as pip has it build it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, f"build_{kind}", str(target)],
        cwd=tree, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return target / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("installed")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("no git checkout: what belongs to a release is not known")
    for name in listed.stdout.splitlines():
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (base / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, base / "clone" / name)
    sdist = build("sdist", base / "clone", base)
    with tarfile.open(sdist) as archive:
        archive.extractall(base / "unpacked", filter="data")
    (tree,) = (base / "unpacked").iterdir()
    wheel = build("wheel", tree, base)
    shutil.rmtree(base / "clone")
    shutil.rmtree(base / "unpacked")

    environment, empty = base / "environment", base / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    python = environment / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    # A line of a .pth file adds the folder, but not what the .pth files in it add, such as an editable install.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", str(wheel)], check=True, timeout=240)
    shutil.copytree(ROOT / "dynamic_cp" / "__pycache__", site / "dynamic_cp" / "__pycache__", dirs_exist_ok=True)
    return Installed(python, empty, sdist, wheel)


def test_wheel_and_sdist_hold_every_file_of_the_packages(installed: Installed) -> None:
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not set(NOT_SHIPPED) & set(path.parts)
    }
    assert len(wanted) > 400
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    assert wanted <= names, sorted(wanted - names)
    assert (
        not {name.split("/")[0] for name in names}
        - {"dynamic_cp", "megatron"}
        - {f"megatron_dynamic_cp-{dynamic_cp.__version__}.dist-info"}
    )
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    with tarfile.open(installed.sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    more = {"README.md", "CHANGELOG.md", "LICENSE", "setup.py", "pretrain_gpt.py", "examples/slurm/common.sh"}
    assert wanted | more <= inside, sorted((wanted | more) - inside)
    metadata = (
        zipfile.ZipFile(installed.wheel)
        .read(f"megatron_dynamic_cp-{dynamic_cp.__version__}.dist-info/METADATA")
        .decode()
    )
    assert f"\nVersion: {dynamic_cp.__version__}\n" in metadata
    assert "\nProject-URL: " in metadata
    assert "# Dynamic context parallelism for Megatron-Core" in metadata


def test_the_version_stands_in_one_place() -> None:
    """Names of images are its only copies."""
    version = dynamic_cp.__version__
    for name in (
        "Dockerfile",
        "docs/how-to/operate.md",
        *(f"examples/slurm/{kind}.sbatch" for kind in ("docker", "pyxis")),
    ):
        found = re.findall(r"megatron-dynamic-cp:(\d[\w.]*\d)", (ROOT / name).read_text(encoding="utf-8"))
        assert found, name
        assert set(found) == {version}, name
    assert version not in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert "\n## Unreleased\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_the_commands_answer_and_train_without_a_clone(installed: Installed) -> None:
    named = ", ".join(package.replace("/", ".") for package in PACKAGES)
    where = installed.run("python", "-c", f"import {named}\nprint(*(one.__file__ for one in ({named})))")
    assert where.returncode == 0, where.stderr
    assert all(str(installed.python.parents[1]) in path for path in where.stdout.split()), where.stdout
    assert installed.run("dynamic-cp", "--version").stdout == f"dynamic-cp, version {dynamic_cp.__version__}\n"

    model = {
        "source": "a test", "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128,
        "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16, "vocab_size": 256,
        "gated_linear_unit": True, "share_embeddings_and_output_weights": False,
    }  # fmt: skip
    (installed.folder / "model.json").write_text(json.dumps(model), encoding="utf-8")
    (installed.folder / "lengths.txt").write_text("\n".join(map(str, [900, 400, 90, 60] * 4)), encoding="utf-8")
    layout = "--lengths lengths.txt --model model.json --lanes 2 --max-tokens-per-rank 1024"
    done = installed.run("dynamic-cp", *f"plan {layout} --output plan.json".split())
    assert done.returncode == 0, done.stderr
    assert json.loads((installed.folder / "plan.json").read_text())["version"] == dynamic_cp.__version__
    done = installed.run("dynamic-cp", "check", "plan.json", "--lengths", "lengths.txt")
    assert done.stdout.startswith("legal: "), done.stderr
    done = installed.run("dynamic-cp", *f"report {layout} --output report.html --policy dynamic,balanced".split())
    assert done.returncode == 0, done.stderr
    assert f"megatron-dynamic-cp {dynamic_cp.__version__}" in (installed.folder / "report.html").read_text()

    words = "sweep --lengths lengths.txt --model model.json --gpus 2 --tp 1 --pp 1 --recompute none --jobs 1"
    done = installed.run(
        "dynamic-cp", *words.split(), "--max-tokens-per-rank", "1024", "--policy", "dynamic", "--output", "job.flags"
    )
    assert done.returncode == 0, done.stderr
    trained = installed.run(
        "python", "-m", "torch.distributed.run", "--local-addr", "localhost", "--nproc-per-node", "2",
        "-m", "megatron.trainer", "@job.flags", *RUN.split(), *FIXED.split(), "--train-iters", "2",
        "--dynamic-cp-hardware", "cpu", "--save", "saved", "--save-interval", "2", "--num-workers", "0",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr[-2000:]
    assert "lm loss" in trained.stdout + trained.stderr
    (manifest,) = (installed.folder / "saved").rglob("manifest.json")
    assert json.loads(manifest.read_text())["run"]["version"] == dynamic_cp.__version__

    failed = installed.run(
        "python", "-m", "torch.distributed.run", "--local-addr", "localhost", "--nproc-per-node", "2",
        "-m", "megatron.trainer", "@job.flags", "--lr", "-1",
    )  # fmt: skip
    assert failed.returncode == 1
    assert len(failed.stderr.split("error:", 1)[1].splitlines()) <= 7, failed.stderr
