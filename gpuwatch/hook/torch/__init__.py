"""What is hooked in torch while a training is watched."""
