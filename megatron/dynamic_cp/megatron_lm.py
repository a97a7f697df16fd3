"""Imported as the first line of a Megatron-LM script: the script then takes --dynamic-cp.

The script is the one that was started (`sys.argv[0]`); `python -m megatron.dynamic_cp.run` does the same without an
edit. This module does its work when it is imported; everything else is in `megatron.integrations.lm_adaptor`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron.integrations.lm_adaptor.checkout import open_checkout
from megatron.integrations.lm_adaptor.replacements import activate

activate(open_checkout(Path(sys.argv[0])))
