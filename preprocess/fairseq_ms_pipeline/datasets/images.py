"""Prepare 32 x 32 images (ImageNet-32, CIFAR-10, PNG folders and zips, two photographs) as 3,072 tokens each."""

from fairseq_ms_pipeline.images import cli


def main() -> int:
    """Prepare what the command line asks for; returns the exit code."""
    return cli.main(__doc__)
