"""The planner runs where neither torch nor megatron is installed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron"):
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Refuse())
import dynamic_cp
names = [module.name for module in pkgutil.walk_packages(dynamic_cp.__path__, "dynamic_cp.")]
for name in names:
    importlib.import_module(name)
print(len(names), *sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "megatron")))
"""


def test_no_module_of_dynamic_cp_needs_torch_or_megatron():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    count, *imported = result.stdout.split()
    assert imported == []
    assert int(count) >= 14
