"""Interfaces with which users write episodes of several turns: environments and tools. Needs neither torch nor vLLM."""

from pipelinerl.episodes.environment import Done, Environment, Messages, Tool, ToolCall, Turn, tool_of

__all__ = ["Done", "Environment", "Messages", "Tool", "ToolCall", "Turn", "tool_of"]
