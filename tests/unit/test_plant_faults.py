"""Every planted fault still fits the code, in one place."""

import subprocess
import sys

import pytest

from tools.plant_faults import FAULTS, ROOT, place_of


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fits_one_place(name: str) -> None:
    fault = FAULTS[name]
    assert place_of(fault, ROOT).suffix == ".py"
    assert fault.wrong != fault.right
    files = fault.tests.partition(" -k ")[0].split()
    assert all((ROOT / file).exists() for file in files)


def test_nothing_that_gets_faults_is_imported_before_forking() -> None:
    """Of torch's imports, torchrun's handlers are this package's."""
    words = "from tools import plant_faults as one; one.import_what_stays(); print(one.modules_with_faults())"
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
