"""Pure arithmetic of asynchronous reinforcement learning, without torch, clock, socket, environment or logger."""
