"""Which Python this needs, said before anything else fails on an older one; imported first, by the package itself."""

import sys

LEAST = (3, 10)

if sys.version_info < LEAST:
    found, needed = (".".join(map(str, version[:2])) for version in (sys.version_info, LEAST))
    raise ImportError(f"this is Python {found}, dynamic_cp needs {needed} or newer: install one, and use its pip")
