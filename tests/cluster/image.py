"""A real build of the Dockerfile by buildah, without any registry of images.

The base that the Dockerfile names is made here: packages of Debian, and a Python of this machine.

Debian's and Ubuntu's packages `buildah` and `debootstrap` have all that is needed; everything else lies in one folder.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.conftest import ROOT
from tools.releases import command_of

COMMANDS = ("buildah", "debootstrap")
LIBRARIES = (
    "ca-certificates,libbz2-1.0,libexpat1,libffi8,libgdbm6,libgomp1,liblzma5,libncursesw6,libreadline8,libsqlite3-0,"
    "libssl3,libuuid1,netbase,passwd,tzdata,zlib1g"
)
"""What Debian's part of the image python:slim has beside a minimal system, as a Python needs it."""
LEFT_OUT = ("site-packages", "dist-packages", "test", "__pycache__")
WHERE = """
import json, os, sys, sysconfig
folder, name, is_shared = sysconfig.get_config_vars("LIBDIR", "INSTSONAME", "Py_ENABLE_SHARED")
shared = os.path.join(folder, name) if is_shared else None
print(json.dumps([os.path.realpath(sys.executable), sysconfig.get_path("stdlib"), shared]))
"""
PACKAGE_INDEX = "https://pypi.org/simple"
ASK_S = 20.0
STEP_S, BUILD_S = 600.0, 2400.0


@dataclass(frozen=True, kw_only=True)
class Python:
    """A Python of this machine: which files a base needs of it, and how its pip finds packages."""

    executable: Path
    library: Path
    shared: Path | None
    pip: dict[str, str]

    def folders(self) -> list[Path]:
        """Return the folders of this machine in which pip looks. Pages of an index name files beside the index."""
        paths = {path.parent if name.endswith("index-url") else path for name, path in self._paths() if path.is_dir()}
        return sorted(paths - {Path("/")})

    def files(self) -> list[Path]:
        """Return files that pip's settings name: certificates, constraints."""
        return sorted({path for _, path in self._paths() if path.is_file()})

    def environment(self) -> dict[str, str]:
        """Return all settings as variables, of which pip knows each."""
        return {f"PIP_{name.replace('-', '_').upper()}": value for name, value in self.pip.items()}

    def _paths(self) -> Iterator[tuple[str, Path]]:
        for name, value in self.pip.items():
            for word in value.split():
                path = Path(word.removeprefix("file://"))
                if path.is_absolute() and path.exists():
                    yield name, path


def missing(version: str) -> str | None:
    """Return why no image can be built here; None where it can.

    Args:
        version: of the Python that the base gets."""
    lacking = [name for name in COMMANDS if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install --no-install-recommends buildah debootstrap"
    if os.geteuid() != 0:
        return "a system of Debian is unpacked by root"
    return None if command_of(version) else f"no Python {version} for the base: put python{version} on PATH"


def python_of(version: str) -> Python:
    """Return what there is to know of a Python of this machine."""
    command = command_of(version)
    executable, library, shared_library = json.loads(_printed(command, "-c", WHERE))
    listed = re.findall(r"(?m)^(\S+?)\.([\w-]+)=(.*)$", _printed(command, "-m", "pip", "config", "list"))
    listed.sort(key=lambda one: one[0] == ":env:")  # the environment wins over files
    settings = {name: " ".join(ast.literal_eval(value).split()) for _, name, value in listed}
    settings.pop("config-file", None)
    return Python(
        executable=Path(executable),
        library=Path(library),
        shared=Path(shared_library) if shared_library else None,
        pip=settings,
    )


@dataclass(frozen=True, kw_only=True)
class Image:
    """A built image, and a container of it in which commands run one after another.

    Attributes:
        entry: words before each command; `default` is the command if none is given.
        root: the container's files, as this machine sees them."""

    buildah: Buildah
    container: str
    entry: list[str]
    default: list[str]
    root: Path

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command through the image's entry point, as its user, as `docker run IMAGE words` does."""
        variables = [f"--env={name}={value}" for name, value in environment.items()]
        command = [*self.entry, *(words or self.default)]
        return self.buildah.start("run", *variables, self.container, "--", *command)


@dataclass(frozen=True, kw_only=True)
class Buildah:
    """Runs buildah, whose images and containers all lie below `folder`.

    How they are stored is buildah's choice: overlay where the system can (up to 20 GB), else vfs, which copies each
    layer. STORAGE_DRIVER=vfs chooses."""

    folder: Path

    def start(self, *words: str, timeout_s: float = STEP_S) -> subprocess.CompletedProcess[str]:
        """Run `buildah words`."""
        storage = [f"--root={self.folder}/root", f"--runroot={self.folder}/runroot"]
        environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(self.folder)}
        return _done(["buildah", *storage, *words], timeout_s, environment)

    def call(self, *words: str, timeout_s: float = STEP_S) -> str:
        """Return what `buildah words` prints; it must succeed."""
        done = self.start(*words, timeout_s=timeout_s)
        assert done.returncode == 0, f"{words}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout.strip()

    @contextmanager
    def container(self, image: str) -> Iterator[tuple[str, Path]]:
        """Yield a new container's name and where its files are; it is removed behind the block."""
        name = self.call("from", "--pull=never", image)
        try:
            yield name, Path(self.call("mount", name))
        finally:
            self.start("umount", name)
            self.start("rm", name)

    def make_base(self, tag: str, python: Python, suite: str) -> None:
        """Make the image `python:tag`: a small Debian, and a Python in /usr/local."""
        with self.container("scratch") as (name, root):
            _printed("debootstrap", "--variant=minbase", f"--include={LIBRARIES}", suite, str(root))
            _install(python, root)
            variables = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
            for variable, value in {**variables, **python.environment()}.items():
                self.call("config", f"--env={variable}={value}", name)
            self.call("commit", "--quiet", name, f"python:{tag}")

    def build(self, target: str, folders: list[Path], arguments: Mapping[str, str]) -> str:
        """Return the name of the image that the Dockerfile's `target` makes; `folders` are seen while it is built."""
        name = f"megatron-dynamic-cp:{target}"
        volumes = [f"--volume={folder}:{folder}:ro" for folder in folders]
        given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        words = ["build", "--pull=never", f"--target={target}", f"--tag={name}", *volumes, *given, "."]
        self.call(*words, timeout_s=BUILD_S)
        return name

    @contextmanager
    def started(self, name: str) -> Iterator[Image]:
        """Yield an image with a container, which is removed behind the block."""
        config = json.loads(self.call("inspect", "--type=image", name))["OCIv1"]["config"]
        with self.container(name) as (container, root):
            yield Image(buildah=self, container=container, entry=config["Entrypoint"], default=config["Cmd"], root=root)

    def remove_all(self) -> None:
        """Remove all containers and images, and the folder: gigabytes."""
        self.start("rm", "--all")
        self.start("rmi", "--all", "--force")
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
        for path in reversed(mounted):
            if path.startswith(f"{self.folder}/"):
                _printed("umount", path)
        shutil.rmtree(self.folder)


def index_of_torch(text: str, python: Python) -> dict[str, str]:
    """Return the build arguments with which torch is found: none where the Dockerfile's own index can be reached."""
    (index,) = re.findall(r"(?m)^ARG TORCH_INDEX=(\S+)$", text)
    with suppress(OSError), urllib.request.urlopen(f"{index}/torch/", timeout=ASK_S):
        return {}
    return {"TORCH_INDEX": python.pip.get("index-url", PACKAGE_INDEX)}


def _install(python: Python, root: Path) -> None:
    """Copy a Python to where the image python:slim has it, and give it pip."""
    there = root / "usr" / "local"
    command = there / "bin" / python.library.name
    shutil.copy2(python.executable, command)
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(python.library, there / "lib" / python.library.name, ignore=ignore, symlinks=True)
    (there / "lib" / python.library.name / "site-packages").mkdir()
    if python.shared:
        shutil.copy2(python.shared, there / "lib")
    for path in python.files():
        copy = root / path.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for name in ("python", "python3"):
        (there / "bin" / name).symlink_to(command.name)
    _printed("chroot", str(root), "/sbin/ldconfig")
    words = [f"/usr/local/bin/{command.name}", "-I", "-m", "ensurepip", "--default-pip"]
    _printed("chroot", str(root), *words)


def _printed(*words: str) -> str:
    done = _done(words, STEP_S)
    assert done.returncode == 0, f"{words}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def _done(
    words: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root. Whatever it started ends with it if it takes too long."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=ROOT, env=environment, text=True, **pipes) as process:
        try:
            output, error = process.communicate(timeout=timeout_s)
        except BaseException:
            _end(process.pid)
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, error)


def _end(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
