"""What can be said of the Dockerfile without building it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib.metadata import requires
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from dynamic_cp.decide import cli
from megatron.dynamic_cp.attention.linear import kernels
from megatron.dynamic_cp.repairs.releases import RELEASES
from tests.cluster.conftest import ROOT

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PINNED_TAG = re.compile(r"\d+\.\d+(\.\d+)?-[\w-]+")


class Instruction(NamedTuple):
    """One instruction: the stage it stands in, its name in capitals, the rest as one line."""

    stage: str
    name: str
    rest: str


def instructions() -> list[Instruction]:
    found, stage = [], ""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", TEXT, flags=re.MULTILINE))
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stage = rest.rpartition(" AS ")[2]
        found.append(Instruction(stage, name, re.sub(r"\s+", " ", rest)))
    return found


ALL = instructions()
STAGES = [one.stage for one in ALL if one.name == "FROM"]
IMAGES = ("cpu", "gpu")
BASES = dict(one.rest.split("=") for one in ALL if (one.stage, one.name) == ("", "ARG"))
PYTHON = re.match(r"\d+\.\d+", BASES["PYTHON"])[0]  # type: ignore[index]
PINS = dict(
    line.split("==")
    for line in (ROOT / "docker" / "constraints.txt").read_text(encoding="utf-8").lower().splitlines()
    if not line.startswith("#")
)


def needed_by(*extras: str) -> list[Requirement]:
    """Return what the project needs with these extras on the images' Python."""
    known = [Requirement(line) for line in requires("megatron-dynamic-cp") or []]
    environments = [{"extra": extra, "python_version": PYTHON} for extra in ("", *extras)]
    return [one for one in known if one.marker is None or any(map(one.marker.evaluate, environments))]


def of(stage: str, name: str) -> list[str]:
    return [one.rest for one in ALL if (one.stage, one.name) == (stage, name)]


def test_bases_are_pinned() -> None:
    assert set(BASES) == {"NGC", "TE", "PYTHON"}
    for name in ("NGC", "PYTHON"):
        assert PINNED_TAG.fullmatch(BASES[name]), name
    for one in ALL:
        if one.name == "FROM":
            assert re.match(r"(python:\$\{PYTHON\}|nvcr\.io/nvidia/pytorch:\$\{NGC\}) AS ", one.rest), one.rest
    assert "latest" not in TEXT


def test_what_pip_installs_is_pinned() -> None:
    commands = [part for one in ALL if one.name == "RUN" for part in one.rest.split("&&") if "pip install" in part]
    assert len(commands) == 7
    for command in commands:
        assert "--no-cache-dir" in command
        assert "--constraint" in command or "==" in command or "/wheels/" in command, command
    assert not [one for one in ALL if "apt-get" in one.rest]  # nor lists of packages to clean up


def test_constraints_cover_what_the_trainer_needs() -> None:
    needed = needed_by("train", "report")
    names = {one.name.lower() for one in needed}
    assert len(names) >= 10
    assert names - {"torch"} <= set(PINS), names - set(PINS)
    for one in needed:
        if one.name.lower() in PINS:
            assert one.specifier.contains(PINS[one.name.lower()]), one


def test_images_have_the_newest_release_and_a_python_for_it() -> None:
    newest = RELEASES[-1]
    assert PINS["megatron-core"] == newest.version
    assert tuple(map(int, PYTHON.split("."))) >= newest.min_python
    assert not re.search(r"megatron-core==\d", TEXT)  # the GPU image reads it from the constraints
    (installed,) = [one for one in of("gpu", "RUN") if "megatron-core" in one and "pip install" in one]
    assert "--no-deps $(grep '^megatron-core==' /opt/dynamic-cp/docker/constraints.txt)" in installed


def test_the_gpu_image_has_what_the_trainer_needs() -> None:
    (installed,) = [one for one in of("gpu", "RUN") if "--constraint" in one]
    words = set(re.search(r"--constraint \S+ ([^&]*)", installed)[1].split())  # type: ignore[index]
    of_ngc = {"torch", "numpy"}
    assert {one.name for one in needed_by("train")} == words | of_ngc | {"megatron-core"}
    pinned = set(re.search(r"\^\(([\w|]+)\)==", installed)[1].split("|"))  # type: ignore[index]
    assert words - pinned == {"packaging", "tensorboard"}  # NGC's own, if it has them
    assert pinned <= set(PINS)


def test_transformer_engine_is_one_that_the_extra_permits() -> None:
    (permitted,) = [one for one in needed_by("te") if one.name == "transformer-engine"]
    assert permitted.specifier.contains(BASES["TE"].removeprefix("v"))
    assert of("transformer-engine", "ARG") == of("gpu", "ARG") == ["TE"]  # the version is compared as the last step
    assert "startswith('${TE#v}')" in of("gpu", "RUN")[-1]


def test_kernels_of_hybrids_are_of_the_release_that_was_tried() -> None:
    assert any(f"fla-core=={kernels.RELEASE}" in one for one in of("gpu", "RUN"))


def test_the_offline_recipe_brings_what_the_trainer_needs() -> None:
    page = (ROOT / "docs" / "GPU.md").read_text(encoding="utf-8")
    (fetched,) = [line.split() for line in page.splitlines() if line.startswith("pip download")]
    assert fetched[fetched.index("--python-version") + 1] == PYTHON
    names = {Requirement(word).name for word in fetched[fetched.index("-d") + 2 :]}
    assert f"megatron-core=={PINS['megatron-core']}" in fetched
    # The machine has torch; without numba the planner is slower, without tensorboard there are no curves.
    assert {one.name for one in needed_by("train")} - names == {"torch", "numba", "tensorboard"}


def test_images_run_as_a_user_who_may_write_where_runs_go() -> None:
    for stage in IMAGES:
        assert of(stage, "USER") == ["trainer"]
        (added,) = [one for one in of(stage, "RUN") if "useradd" in one]
        assert "install -d -o trainer /runs" in added
        order = [one.name for one in ALL if one.stage == stage]
        last_root_step = max(index for index, one in enumerate(order) if one == "COPY")
        assert order.index("USER") > last_root_step
        assert [one for one in of(stage, "ENV") if "RUN_DIR=/runs" in one]


def test_sources_exist_and_are_sent_to_the_build() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignore
    sent = {line[1:] for line in ignore if line.startswith("!")}
    looked_at = 0
    for one in ALL:
        if one.name == "COPY" and not one.rest.startswith("--from="):
            *sources, _target = one.rest.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert source.split("/")[0] in sent, source
                looked_at += 1
        elif one.name == "COPY":
            stage = one.rest.split()[0].removeprefix("--from=")
            assert STAGES.index(stage) < STAGES.index(one.stage)
    assert looked_at >= 10
    assert sent == {name for name in sent if (ROOT / name).exists()}
    read = set(re.findall(r'ROOT / "([^"]+)"', (ROOT / "setup.py").read_text(encoding="utf-8")))
    copied = [source for one in of("wheel", "COPY") for source in one.split()[:-1]]
    assert read >= {"README.md"}
    assert all(any(Path(name).is_relative_to(source) for source in copied) for name in read), "setup.py reads these"


def test_jobs_find_the_code_where_the_images_have_it() -> None:
    for stage in IMAGES:
        assert of(stage, "WORKDIR") == ["/opt/dynamic-cp"]
        copied = {word for one in of(stage, "COPY") for word in one.split()}
        assert {"pretrain_gpt.py", "examples", "docker/entrypoint.sh"} <= copied
        (entry,) = of(stage, "ENTRYPOINT")
        assert json.loads(entry)[-1] == "/opt/dynamic-cp/docker/entrypoint.sh"
    assert os.access(ROOT / "docker" / "entrypoint.sh", os.X_OK)
    assert (ROOT / json.loads(of("cpu", "CMD")[0])[1]).is_file()


def test_the_plan_that_compiles_the_planner_is_legal() -> None:
    commands = [part.split() for one in ALL if one.name == "RUN" for part in one.rest.split("&&")]
    plans = [words[1:] for words in commands if words[0] == "dynamic-cp"]
    assert len(plans) == 2
    assert plans[0] == plans[1]
    assert cli.main(plans[0]) == 0


def entry(folder: Path, *words: str, gpus: int | None = None, **environment: str) -> list[str]:
    """Return what the entry point starts, on a machine with `gpus` GPUs (None: without nvidia-smi)."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    commands = {"python3": 'printf "%s\\n" "$@"'}
    if gpus is not None:
        listed = [f"GPU {number}: NVIDIA H100 (UUID: GPU-{number})\\n  MIG 1g.10gb" for number in range(gpus)]
        commands["nvidia-smi"] = f"printf '%b\\n' '{chr(10).join(listed) or 'No devices found.'}'"
    for name, text in commands.items():
        (bin_folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (bin_folder / name).chmod(0o755)
    done = subprocess.run(
        [ROOT / "docker" / "entrypoint.sh", *words], env={"PATH": f"{bin_folder}:/usr/bin:/bin", **environment},
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_the_entry_point_starts_a_rank_per_gpu(tmp_path: Path) -> None:
    def ranks(*backend: str, **how: object) -> str:
        words = entry(tmp_path, "pretrain_gpt.py", "--dynamic-cp", "--lr", "a b", **how)  # type: ignore[arg-type]
        assert words[:5] == ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
        assert words[7:] == ["pretrain_gpt.py", "--dynamic-cp", "--lr", "a b", *backend]
        return words[words.index("--nproc-per-node") + 1]

    gloo = ("--distributed-backend", "gloo")
    assert ranks(*gloo) == "4"
    assert ranks(*gloo, RANKS_PER_NODE="3") == "3"
    assert ranks(*gloo, gpus=0) == "4"
    assert ranks(gpus=8) == "8"
    assert ranks(gpus=8, RANKS_PER_NODE="2") == "2"
    assert entry(tmp_path, "echo", "as it is") == ["as it is"]


def test_the_entry_point_leaves_the_backend_that_is_asked_for(tmp_path: Path) -> None:
    words = entry(tmp_path, "pretrain_gpt.py", "--distributed-backend", "nccl")
    assert words[7:] == ["pretrain_gpt.py", "--distributed-backend", "nccl"]
