"""Which version of Pagoda this is, as clients and transcripts are told."""

from importlib import metadata

VERSION = metadata.version("pagoda-serve")
