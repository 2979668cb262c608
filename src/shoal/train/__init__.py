"""Training: step.py is the step, loop.py repeats it, build.py makes the parts, run.py is the face."""
