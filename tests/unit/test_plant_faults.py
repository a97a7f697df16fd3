"""Every planted fault still fits the code, in one place."""

import pytest

from tools.plant_faults import FAULTS, ROOT, place_of


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fits_one_place(name: str) -> None:
    fault = FAULTS[name]
    assert place_of(fault, ROOT).suffix == ".py"
    assert fault.wrong != fault.right
    files = fault.tests.partition(" -k ")[0].split()
    assert all((ROOT / file).exists() for file in files)
