"""The version, in a file that imports nothing: read by the build and by what `gpuwatch` itself imports."""

__version__ = "0.1.0"
