"""gpuwatch: where every GPU-second of a training job goes, and what to change."""

__version__ = "0.1.0"
