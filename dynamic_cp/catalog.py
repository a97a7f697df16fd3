"""The documented path of hardware and models by name, which are in `models/catalog.py`."""

from dynamic_cp.models.catalog import hardware_names, load_hardware, load_model, model_names

__all__ = ["hardware_names", "load_hardware", "load_model", "model_names"]
