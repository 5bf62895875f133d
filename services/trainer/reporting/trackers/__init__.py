"""Experiment trackers: Weights & Biases, MLflow, TensorBoard, each in a process of its own beside the trainer."""
