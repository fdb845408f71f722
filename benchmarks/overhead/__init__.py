"""What gpuwatch adds to a training step, on the host and in calls of the device."""
