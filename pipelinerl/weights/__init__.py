"""What both ends of a weight transfer agree on, as pure data. No torch, no transport."""
