#!/bin/sh
# Prints the command of the newest Python from 3.10 on that works: python3.13, ..., python3.10 or python3 of the PATH.
#   find_python.sh 3.12     of that one, also where pyenv keeps it; prints nothing if there is none
works() { "$1" -c "import sys; sys.exit(sys.version_info < (3, 10))" >/dev/null 2>&1; }

if [ $# = 1 ]; then
    pyenv=$(PYENV_VERSION=$(pyenv latest "$1" 2>/dev/null) pyenv which "python$1" 2>/dev/null)
    for python in "python$1" $pyenv; do
        if works "$python"; then echo "$python" && exit; fi
    done
    exit 0
fi
for python in python3.13 python3.12 python3.11 python3.10 python3; do
    if works "$python"; then echo "$python" && exit; fi
done
echo "no Python from 3.10 on is on the PATH: install one, or name it, make PYTHON=/path/to/python" >&2
exit 2
