"""One file per architecture: config dataclass, presets table, model; each file registers what it defines."""
