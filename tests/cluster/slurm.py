"""A real SLURM on this machine: two nodes, each with eight devices that are /dev/null, whose ranks are CPU ranks.

Debian's and Ubuntu's packages `slurm-wlm` and `munge` have all that is needed; everything else lies in one folder.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.conftest import ROOT, inherited
from tests.trainer.commandline import NO_COMPILE

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("127.0.0.1", "127.0.0.2")
"""Names that resolve everywhere: torchrun meets at the first one."""
CTLD_PORT = 17817
USER_SIGNAL = "SlurmctldParameters=preempt_send_user_signal"
"""A job that is preempted gets the signal that it asked for, and not SIGTERM; PreemptParameters from SLURM 23.02 on."""
PATIENCE_S = 240.0

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
GresTypes=gpu
SlurmctldPort={port}
SlurmctldTimeout=30
SlurmdTimeout=20
KillWait=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{user_signal}
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[17818-17819] CPUs=2 RealMemory=1000 Gres=gpu:8
PartitionName=main Nodes=127.0.0.[1-2] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=127.0.0.[1-2] MaxTime=INFINITE PriorityTier=10
"""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Submits jobs of examples/slurm from the root of the repository.

    Attributes:
        folder: of SLURM's own files.
        environment: of every command, and so of every job."""

    folder: Path
    environment: dict[str, str]

    def command(self, *words: str) -> str:
        """Return what a command of SLURM prints."""
        done = subprocess.run(words, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str, output: Path, **environment: str) -> Job:
        """Return a job: `sbatch words`, whose output goes to a file."""
        with_more = Slurm(folder=self.folder, environment={**self.environment, **environment})
        printed = with_more.command("sbatch", "--parsable", f"--output={output}", *words)
        return Job(slurm=self, number=printed.strip(), output=output)

    @contextmanager
    def without(self, line: str) -> Iterator[None]:
        """Leave a line of the configuration out, in the block."""
        path = self.folder / "slurm.conf"
        text = path.read_text(encoding="utf-8")
        assert line in text
        path.write_text(text.replace(line, ""), encoding="utf-8")
        self.command("scontrol", "reconfigure")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            self.command("scontrol", "reconfigure")

    def lose(self, node: str) -> None:
        """Kill everything on a node at once, as a loss of power would."""
        victims = [process for process in psutil.process_iter() if _runs_on(process, node)]
        victims += [one for process in victims if (one := process.parent()) and "slurmstepd" in one.name()]
        victims += [process for process in psutil.process_iter() if words_of(process)[-2:] == ["-N", node]]
        assert victims
        for process in {one.pid: one for one in victims}.values():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        with (self.folder / f"slurmd-{node}.out").open("a", encoding="utf-8") as output:
            words = ["slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", node]
            subprocess.Popen(words, env=self.environment, stdout=output, stderr=output)
        wait_until(lambda: node in self.command("sinfo", "-h", "-N", "-t", "idle", "-o", "%N"), f"{node} is idle")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that was submitted; `output` is the file that it writes."""

    slurm: Slurm
    number: str
    output: Path

    def text(self) -> str:
        """Return what it has written so far."""
        return self.output.read_text(encoding="utf-8") if self.output.exists() else ""

    def field(self, name: str) -> str:
        """Return a field of `scontrol show job`."""
        (found,) = re.findall(rf"\b{name}=(\S+)", self.slurm.command("scontrol", "show", "job", self.number))
        return str(found)

    def wait_for(self, pattern: str) -> None:
        """Wait until it has written what matches."""
        wait_until(lambda: bool(re.search(pattern, self.text())), f"{pattern!r} in the output", self.text)

    def wait_for_state(self, *states: str) -> str:
        """Wait until SLURM says that it is in one of `states`; return which."""
        wait_until(lambda: self.field("JobState") in states, f"job {self.number} is {states}", self.text)
        return self.field("JobState")

    def start_now(self) -> None:
        """Have a job that was requeued start: SLURM would let it wait for two minutes."""
        self.wait_for_state("PENDING")

        def is_started() -> bool:
            # Asked again, as what is asked while its nodes are still being left is overwritten.
            if self.field("Reason") == "BeginTime":
                self.slurm.command("scontrol", "update", f"JobId={self.number}", "StartTime=now")
            return self.field("JobState") != "PENDING"

        wait_until(is_started, f"{self.number} starts", self.text)

    def signal(self, name: str) -> None:
        """Send a signal to its script, as `--signal=B:USR1@300` does."""
        self.slurm.command("scancel", "--batch", f"--signal={name}", self.number)

    def cancel(self) -> None:
        """End it, whatever it does."""
        with suppress(AssertionError):
            self.slurm.command("scancel", self.number)
            self.wait_for_state("CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT")


def wait_until(is_so: Callable[[], bool], what: str, output: Callable[[], str] = str) -> None:
    """Wait for PATIENCE_S at most."""
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s, f"not within {PATIENCE_S:.0f} s: {what}\n{output()}"
        time.sleep(0.3)


def missing() -> str | None:
    """Return why no SLURM can be started here; None where it can."""
    lacking = [name for name in DAEMONS if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install --no-install-recommends slurm-wlm munge"
    return None if os.geteuid() == 0 else "daemons of SLURM are started by root"


@contextmanager
def two_nodes(folder: Path) -> Iterator[Slurm]:
    """Start SLURM below `folder`, which is empty; stop all of it behind the block."""
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for number in range(8):
        (folder / f"gpu{number}").symlink_to("/dev/null")
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    path = folder / "slurm.conf"
    path.write_text(CONFIGURATION.format(host=host, root=folder, port=CTLD_PORT, user_signal=USER_SIGNAL))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    environment = {
        **inherited(), **NO_COMPILE, "SLURM_CONF": str(path), "PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
        "RANKS_PER_NODE": "2", "RESEND_S": "1",
    }  # fmt: skip
    slurm = Slurm(folder=folder, environment=environment)
    files = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    started = [
        _started(["munged", "--foreground", "--force", f"--key-file={folder}/key", *files], environment, folder),
        _started(["slurmctld", "-D", "-c", "-f", str(path)], environment, folder),
    ]
    try:
        for node in NODES:
            slurm.start_node(node)
        yield slurm
    finally:
        with suppress(AssertionError):
            slurm.command("scancel", "--full", "--signal=KILL", "--user=root")
        ours = [one for one in psutil.process_iter() if str(path) in words_of(one)]
        for process in [*ours, *started]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        for started_one in started:
            started_one.wait(timeout=30)


def _started(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"{words[0]}.out").open("w", encoding="utf-8") as output:
        return subprocess.Popen(words, env=environment, stdout=output, stderr=output)


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty for one that has ended."""
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _runs_on(process: psutil.Process, node: str) -> bool:
    with suppress(psutil.Error):
        return process.environ().get("SLURMD_NODENAME") == node
    return False
