"""The layouts that are written, by name."""

LAYOUTS = ("native", "xser", "pt")
"""``xser`` and ``pt`` are what neuronx-distributed writes with and without ``use_xser``."""

OTHER_NAMES = {"nxd": "pt"}
"""What a layout is called, too, where a conversion is asked for."""

FORMATS = (*LAYOUTS, *OTHER_NAMES, "safetensors")
"""What a conversion makes."""
