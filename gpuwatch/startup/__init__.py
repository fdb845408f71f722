"""What `gpuwatch run` puts at the start of every Python: `sitecustomize`, and what it watches frameworks with."""
