"""Measurements on trained models; a module here with NAME, HELP, add_arguments and run is a command.

The contract of a command is described in `fairseq_ms.commands`.
"""
