"""Prepare 32 x 32 images (ImageNet-32, CIFAR-10, PNG folders and zips, two photographs) as 3,072 tokens each."""

import sys

from fairseq_ms_pipeline.images.cli import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
