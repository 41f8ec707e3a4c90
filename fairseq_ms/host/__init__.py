"""Everything that importing the plugin changes in fairseq, Python or NumPy; docs/host.md lists it with its reasons."""
