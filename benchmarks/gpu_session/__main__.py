"""`python -m benchmarks.gpu_session`; see the package."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.parts import COMMANDS, HERE, OUTPUT, Part

GRACE_S = 5


def main(words: list[str] | None = None) -> int:
    """Return 0 if every part ended well, else 2."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_session", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--output", type=Path, required=True, help="a folder for logs and results")
    parser.add_argument("--only", action="append", help="a part; may be given again")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first, without a network")
    options = parser.parse_args(words)
    parts = COMMANDS[options.command]
    if unknown := set(options.only or ()) - parts.keys():
        parser.error(f"--only {' '.join(sorted(unknown))} is no part of {options.command}: {', '.join(parts)}")
    chosen = {name: part for name, part in parts.items() if not options.only or name in options.only}
    options.output.mkdir(parents=True, exist_ok=True)
    site = None if options.wheels is None else installed(options.wheels, options.output / "site")
    return 0 if run(chosen, options.output, site) else 2


def run(parts: Mapping[str, Part], output: Path, site: Path | None = None) -> bool:
    """Run parts one after the other, keep their logs, write what came of them, and return whether all ended well."""
    path = output / "parts.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, part in parts.items():
        print(f"== {time.strftime('%T')} {name}, at most {part.limit_s} s", flush=True)
        started = time.monotonic()
        status, log = run_part(part, output, output / f"{name}.log", site)
        found[name] = {"status": status, "seconds": round(time.monotonic() - started, 1), "limit_s": part.limit_s}
        print(f"   {name}: {status} after {found[name]['seconds']} s", flush=True)
        print("\n".join(line[:300] for line in log.splitlines()[-part.lines :]), flush=True)
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return all(found[name]["status"] == "ok" for name in parts)


def run_part(part: Part, output: Path, log: Path, site: Path | None) -> tuple[str, str]:
    """Return ("ok", "exit N" or "out of time", what the part wrote)."""
    words = [word.replace(OUTPUT, str(output)) for word in part.words]
    with open(log, "wb") as file:
        try:
            process = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, env=environment(part, site), start_new_session=True
            )
        except OSError as error:
            file.write(str(error).encode())
            return "exit 127", str(error)
        try:
            code = process.wait(part.limit_s)
            status = "ok" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            status = "out of time"
        end(process)
    return status, log.read_text(encoding="utf-8", errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a part and what it started, ranks for example."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def environment(part: Part, site: Path | None) -> dict[str, str]:
    """Return the variables of a part."""
    folders = [*([str(HERE / "hooks")] if part.hooks else []), *([str(site)] if site else []), os.getcwd()]
    given = os.environ | dict.fromkeys(part.hooks, "1") | {"PYTHONUNBUFFERED": "1"}
    given["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    if part.with_cudnn:
        libraries = [str(path) for folder in sys.path for path in Path(folder).glob("nvidia/cudnn/lib/libcudnn*.so.9")]
        given["LD_PRELOAD"] = " ".join(libraries)
    return given


def installed(wheels: Path, site: Path) -> Path:
    """Install the wheels of a folder into another one, once, and return that."""
    if not (site / ".ready").exists():
        pip = "-m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target"
        subprocess.run([sys.executable, *pip.split(), str(site), *map(str, sorted(wheels.glob("*.whl")))], check=True)
        (site / ".ready").touch()
    return site


if __name__ == "__main__":
    sys.exit(main())
