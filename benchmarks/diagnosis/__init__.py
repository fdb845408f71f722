"""Does gpuwatch name the cause? Real programs, each with one thing wrong (or none, or two), and what is reported."""
