"""The one place of the version number; the build reads it from here."""

__version__ = "0.1.0"
