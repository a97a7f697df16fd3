"""`dynamic-cp profile` on one GPU: below five minutes, and random packs within 5 % at the median."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dynamic_cp import load_hardware
from dynamic_cp.decide.calibration import Measurements, calibrate
from dynamic_cp.decide.calibration.measurements import SECTIONS

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
PROFILE = "megatron.decide.calibration --device cuda --model llama-3-8b --tp 4 --hardware h100"
LIMIT_S = 300.0
GOAL_MEDIAN = 0.05


@pytest.mark.timeout(900)
def test_profile_of_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    words = [sys.executable, "-m", *PROFILE.split(), "--output", str(output)]
    started = time.monotonic()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)
    elapsed_s = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    measured = json.loads(Path(f"{output}.measured.json").read_text())
    assert list(measured["sections"]) == list(SECTIONS)
    hardware = load_hardware(output)
    assert torch.cuda.get_device_name() in hardware.source["linear_flops_per_s"]
    # What no GPU reaches, and what every one of them does.
    for name in ("linear_flops_per_s", "attention_flops_per_s", "attention_full_flops_per_s", "head_flops_per_s"):
        assert 2e13 < getattr(hardware, name) < 2.5e15, name
    found = calibrate(load_hardware("h100"), Measurements.load(f"{output}.measured.json"), name="gpu")
    error = found.error("held_out")
    assert error is not None
    assert elapsed_s < LIMIT_S
    assert error.median <= GOAL_MEDIAN, error
