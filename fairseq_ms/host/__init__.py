"""All that registering the plugin changes in fairseq, Python or NumPy; docs/host.md lists it with its reasons."""

from fairseq_ms import register

register()
