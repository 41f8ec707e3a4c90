"""Packaging of fairseq_ms; lint, type and test settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """The version is written once, in the package, and read here without importing torch."""
    text = (ROOT / "fairseq_ms" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError('fairseq_ms/version.py must hold a line like __version__ = "0.1.0"')
    return match.group(1)


setup(
    name="fairseq_ms",
    version=read_version(),
    description="Long-context language models for fairseq: multi-scale Transformers, Transformer-QL, HAED",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the fairseq_ms authors",
    license="MIT",
    license_files=["LICENSE"],
    keywords="fairseq, language modeling, long context, multi-scale attention, transformer-xl",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: MIT License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    # The scripts under preprocess/ import their pipeline by a name that is the plugin's own.
    packages=find_packages(include=["fairseq_ms", "fairseq_ms.*"]) + find_packages("preprocess"),
    package_dir={"fairseq_ms_pipeline": "preprocess/fairseq_ms_pipeline"},
    package_data={"fairseq_ms": ["**/*.md", "presets/sizes.json", "py.typed", "shipped/*"]},
    python_requires=">=3.10,<3.14",
    # fairseq is an extra, not a requirement: several builds of it work here, under several distribution
    # names, and installing the plugin must never overwrite the one that is already there.
    install_requires=["torch>=2.6", "numpy>=1.26", "tqdm"],
    extras_require={
        "fairseq": ["fairseq-fixed==0.12.3.1", "omegaconf"],
        "analysis": ["matplotlib>=3.8", "sacrebleu>=2.3"],
        "export": ["safetensors>=0.4"],
        "ngram": ["kenlm>=0.3"],
        # Parquet, and what `save_to_disk` of Hugging Face's datasets wrote.
        "arrow": ["pyarrow>=15"],
        "tokenizers": ["tokenizers>=0.20"],
        "preprocess": ["sacremoses>=0.1", "subword-nmt>=0.3.8", "pillow>=10", "scikit-learn>=1.4"],
        "dev": ["pytest>=8", "pytest-xdist>=3.5", "ruff>=0.6", "mypy>=1.10"],
    },
    entry_points={"console_scripts": ["fairseq-ms = fairseq_ms.cli:main"]},
    zip_safe=False,
)
