"""Shows the site's pages modules in folders without an `__init__.py`; griffe reads them below namespace packages alone.

mkdocs.yml names this file; nothing else runs it.
"""

from pathlib import Path
from typing import Any

from griffe import Extension, GriffeLoader, Module, visit

ROOT = Path(__file__).absolute().parents[1]


class Folders(Extension):
    """Adds the modules of such folders to a package that was loaded."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **kwargs: Any) -> None:
        del kwargs
        for module in [pkg, *pkg.modules.values()]:
            file = module.filepath
            if module.is_init_module and isinstance(file, Path) and ROOT in file.absolute().parents:
                _add_folders(module, file.parent, loader)


def _add_folders(parent: Module, folder: Path, loader: GriffeLoader) -> None:
    for below in sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in parent.members):
        if not (files := sorted(below.glob("*.py"))):
            continue
        module = Module(below.name, filepath=[below], parent=parent)
        parent.set_member(below.name, module)
        for file in files:
            found = visit(
                file.stem,
                filepath=file,
                code=file.read_text(encoding="utf-8"),
                parent=module,
                docstring_parser=loader.docstring_parser,
                docstring_options=loader.docstring_options,
                lines_collection=loader.lines_collection,
                modules_collection=loader.modules_collection,
            )
            module.set_member(file.stem, found)
        _add_folders(module, below, loader)
