"""Imported as the first line of a Megatron-LM script: the script then takes --dynamic-cp.

Importing this does the work, for the script in `sys.argv[0]`; `python -m megatron.dynamic_cp.run` needs no edit.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron.integrations.lm_adaptor.checkout import open_checkout
from megatron.integrations.lm_adaptor.replacements import activate

activate(open_checkout(Path(sys.argv[0])))
