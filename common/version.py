"""The version of this Baton."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("baton-serve")
except PackageNotFoundError:  # run from a source tree that is not installed
    VERSION = "0+source"
