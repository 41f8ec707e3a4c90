"""For tools that look for it; pyproject.toml says everything."""

from setuptools import setup

setup()
