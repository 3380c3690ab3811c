"""Pagoda's version, as shown to clients and in transcripts."""

from importlib import metadata

VERSION = metadata.version("pagoda-serve")
