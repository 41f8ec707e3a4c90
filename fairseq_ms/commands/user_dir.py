"""Print the absolute path of the plugin, for fairseq's --user-dir."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command takes no arguments."""


def run(args: argparse.Namespace) -> None:
    print(Path(__file__).resolve().parent.parent)
