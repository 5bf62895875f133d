"""The arithmetic of asynchronous reinforcement learning that needs no torch: data in, data out.

No clock, socket, environment or logger is reached from here. One noun per module; import the module you need.
"""
