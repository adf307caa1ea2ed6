"""A reward function for verl: the share of a response's words whose number is even. A random model begins at 0.5."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **unused: Any
) -> float:
    words = solution_str.split()
    even = [word for word in words if word.startswith("w") and int(word[1:]) % 2 == 0]
    return len(even) / max(len(words), 1)
