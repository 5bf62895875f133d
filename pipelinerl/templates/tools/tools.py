def add(a: int, b: int) -> int:
    """Sum of two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b
